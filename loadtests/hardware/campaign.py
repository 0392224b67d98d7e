"""Measurements as arrays, and the predictions of the latency model for all measurements at once.

`StepModel` and `closed_loop` do not branch on values, so the formulas of the simulator are evaluated here on arrays with one entry per
measurement.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec import Struct

from fleet.hardware.latency.closed_loop import (
    BenchmarkClient,
    ClientMeasurement,
    closed_loop,
    closed_loop_disaggregated,
)
from fleet.hardware.latency.coefficients import CLIENTS, EFFICIENCIES, NAMES
from fleet.hardware.latency.measurements import MeasuredPhase, Measurement
from fleet.hardware.latency.prediction import (
    BUDGET_TOKENS,
    MEAN_LENGTHS,
    MEMORY_SHARE,
    can_be_placed,
    cut,
    transfer_seconds,
)
from fleet.hardware.latency.step_model import Efficiency, StepWork, step_model, work
from fleet.hardware.models import ModelSizes
from fleet.hardware.sharding import ShardedModel
from loadtests.hardware.regression import Floats


class Campaign(Struct, frozen=True, kw_only=True):
    """The measurements of one phase. Each array has one entry per measurement, in the order of `measurements`."""

    phase: MeasuredPhase
    measurements: tuple[Measurement, ...]
    prefill: StepWork  # work of prefill steps; its fields are arrays
    decode: StepWork
    given: dict[str, Floats]  # further arguments of `closed_loop` or `closed_loop_disaggregated`, by name
    client: dict[str, Floats]  # fields of `BenchmarkClient` that are known and not fitted
    ttft: Floats  # measured TTFT in seconds
    tpot: Floats

    def predict(self, logs: Floats) -> ClientMeasurement:
        """Return the predicted TTFT and TPOT of all measurements.

        `logs` are the logarithms of the coefficients of each measurement, shape [measurements, coefficients]; the
        coefficients are in the order of `NAMES`.
        """
        values = dict(zip(NAMES, np.exp(logs).T, strict=True))
        efficiency = Efficiency(**{name: values[name] for name in EFFICIENCIES})
        client = BenchmarkClient(**{name: values[name] for name in CLIENTS}, **self.client)
        decode = step_model(self.decode, efficiency)
        if self.phase is MeasuredPhase.AGGREGATED:
            return closed_loop(decode, client, **self.given)
        return closed_loop_disaggregated(step_model(self.prefill, efficiency), decode, client, **self.given)

    def residuals(self, logs: Floats) -> Floats:
        """Return the logarithms of predicted / measured for TTFT and TPOT, shape [measurements, 2]."""
        seen = self.predict(logs)
        return np.log(np.stack([seen.ttft / self.ttft, seen.tpot / self.tpot], axis=-1))


def campaign(measurements: Sequence[Measurement], models: dict[str, ModelSizes], phase: MeasuredPhase) -> Campaign:
    """Return the measurements of one phase, without those whose model does not fit into the memory of their GPUs."""
    chosen = [each for each in measurements if each.phase is phase and can_be_placed(each, models)]
    prefill = [cut(each, models, each.prefill) for each in chosen]
    decode = [cut(each, models, each.decode) for each in chosen]

    def of(number: Callable[[Measurement], float]) -> Floats:
        return np.array([float(number(each)) for each in chosen])

    groups = of(lambda each: each.decode.parallelism.dp)
    concurrency = of(lambda each: each.concurrency)
    given = {
        "prompt_tokens": of(lambda each: each.prompt_tokens),
        "answer_tokens": of(lambda each: each.answer_tokens),
        "capacity_tokens": np.array([each.kv_capacity_tokens(MEMORY_SHARE) for each in decode]) / groups,
        "budget_tokens": np.full(len(chosen), BUDGET_TOKENS),
    }
    if phase is MeasuredPhase.AGGREGATED:
        given["concurrency"] = np.maximum(1.0, concurrency / groups)
    else:
        given["concurrency"] = concurrency
        given["prefill_groups"] = of(lambda each: each.prefill.workers * each.prefill.parallelism.dp)
        given["decode_groups"] = of(lambda each: each.decode.workers) * groups
        given["transfer"] = np.array(
            [transfer_seconds(*pair, each.prompt_tokens) for *pair, each in zip(prefill, decode, chosen, strict=True)]
        )
    return Campaign(
        phase=phase,
        measurements=tuple(chosen),
        prefill=_stacked(prefill),
        decode=_stacked(decode),
        given=given,
        client={"mean_length": of(lambda each: MEAN_LENGTHS[each.client])},
        ttft=of(lambda each: each.ttft_ms) / 1e3,
        tpot=of(lambda each: each.tpot_ms) / 1e3,
    )


def _stacked(placements: Sequence[ShardedModel]) -> StepWork:
    works = [work(each) for each in placements]
    columns = {name: np.array([getattr(each, name) for each in works]) for name in StepWork.__struct_fields__}
    return msgspec.structs.replace(works[0], **columns)
