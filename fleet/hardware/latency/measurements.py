"""Measurements: describes measurements of engines on real GPUs, and computes the errors of predictions.

Rules:

1. A measurement is the mean TTFT and TPOT of a benchmark with one configuration and one concurrency. All measurements
   of one configuration form a curve; they may differ in concurrency, benchmark, engine version and date.
2. A fifth of all curves is held out: these curves are not used for the fit, but only to test the fit. Whole curves are held
   out, and never single measurements. A hash of the configuration selects these curves, so that the split is always the
   same.
   Measurements of one GPU and engine with equal TTFT and equal TPOT count as one measurement, even if the name of the
   model or the configuration differs.
3. Errors are relative to the measured value: |predicted / measured - 1|.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from statistics import fmean, median

from msgspec import Struct

from fleet.hardware.models import Precision
from fleet.hardware.sharding import ShardingDegrees

ALL = "all"
"""Name that stands for all systems, all engines or all models."""

HELD_OUT_OF = 5
"""One out of this number of curves is held out of the fit, on average."""


class MeasuredPhase(StrEnum):
    """Kinds of serving that were measured: aggregated or disaggregated."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


class MeasuredRole(Struct, frozen=True, kw_only=True):
    """Describes the workers of one role in a measurement: their number and their parallelism."""

    parallelism: ShardingDegrees
    workers: int = 1


class Measurement(Struct, frozen=True, kw_only=True):
    gpu: str  # short name of the GPU, as in `fleet.hardware.gpus`
    backend: str
    version: str
    model: str
    precision: Precision
    client: str  # name of the benchmark
    concurrency: int  # concurrent requests of the whole deployment
    prompt_tokens: int
    answer_tokens: int
    prefill: MeasuredRole  # prefill workers; equal to `decode` if serving is aggregated
    decode: MeasuredRole
    phase: MeasuredPhase
    ttft_ms: float
    tpot_ms: float

    @property
    def curve(self) -> str:
        """The configuration as a text, which is equal for all measurements of one curve."""
        ways = [
            f"{side.workers}x tp{side.parallelism.tp} pp{side.parallelism.pp} dp{side.parallelism.dp} ep{side.parallelism.ep}"
            for side in (self.prefill, self.decode)
        ]
        numbers = f"{self.precision.weights} {self.precision.experts}"
        lengths = f"{self.prompt_tokens} {self.answer_tokens}"
        return "|".join((self.gpu, self.backend, self.model, numbers, self.phase, *ways, lengths))

    @property
    def held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.curve.encode()).digest()[:8]) % HELD_OUT_OF == 0


class Accuracy(Struct, frozen=True, kw_only=True):
    """Holds the means (mape) and medians of the relative errors of predictions; 0.1 means 10 %."""

    rows: int
    ttft_mape: float
    ttft_median: float
    tpot_mape: float
    tpot_median: float


def distinct(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return each measurement once; measurements of one GPU and engine with equal TTFT and equal TPOT count as one."""
    seen: dict[tuple[str, str, float, float], Measurement] = {}
    for each in measurements:
        seen.setdefault((each.gpu, each.backend, each.ttft_ms, each.tpot_ms), each)
    return list(seen.values())


def accuracy(
    measurements: Sequence[Measurement], predict: Callable[[Measurement], tuple[float, float]]
) -> Accuracy | None:
    """Return the errors of `predict`, which predicts TTFT and TPOT in milliseconds, or None without measurements."""
    if not measurements:
        return None
    first, each = [], []
    for measured in measurements:
        ttft_ms, tpot_ms = predict(measured)
        first.append(abs(ttft_ms / measured.ttft_ms - 1))
        each.append(abs(tpot_ms / measured.tpot_ms - 1))
    return Accuracy(
        rows=len(measurements),
        ttft_mape=fmean(first),
        ttft_median=median(first),
        tpot_mape=fmean(each),
        tpot_median=median(each),
    )


class AccuracyCell(Struct, frozen=True, order=True):
    """Names a set of measurements whose errors are reported together.

    All measurements of the set have the same phase. They also have the same system, engine and model, except where the
    field is `ALL`.
    """

    system: str
    backend: str
    phase: MeasuredPhase
    model: str = ALL

    def holds(self, measured: Measurement) -> bool:
        return measured.phase is self.phase and all(
            wanted in (ALL, of)
            for wanted, of in (
                (self.system, measured.gpu),
                (self.backend, measured.backend),
                (self.model, measured.model),
            )
        )


def cells(measurements: Iterable[Measurement]) -> list[AccuracyCell]:
    """Return the sets of measurements whose errors are reported.

    For each phase, there is one set of all measurements. There is also a set for each engine, for each pair of a GPU and
    an engine, and for each model.
    """
    found: set[AccuracyCell] = set()
    for each in measurements:
        found |= {
            AccuracyCell(ALL, ALL, each.phase),
            AccuracyCell(ALL, each.backend, each.phase),
            AccuracyCell(each.gpu, each.backend, each.phase),
            AccuracyCell(ALL, ALL, each.phase, each.model),
        }
    return sorted(found, key=lambda cell: (cell.model != ALL, cell))
