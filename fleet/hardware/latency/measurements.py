"""Measurements of engines on real accelerators, and how far a prediction is from them.

Rules:

1. A measurement is what one benchmark client saw on average: time to the first token and time per token, at a fixed
   concurrency, at one configuration. Its *curve* is the same configuration at any concurrency, any engine version, any day.
2. Whole curves are held out, never single points: a fifth of all curves, by a hash of what they are, so that whoever repeats
   the split gets the same one. The same figures under two names are one measurement.
3. Errors are relative to what was measured: |predicted / measured - 1|.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from statistics import fmean, median

from msgspec import Struct

from fleet.hardware.models import Precision
from fleet.hardware.sharding import ShardingDegrees

ALL = "all"
"""Whatever it is."""

HELD_OUT_OF = 5
"""One curve in so many is not used to fit."""


class MeasuredPhase(StrEnum):
    """What one engine did for a request."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


class MeasuredRole(Struct, frozen=True, kw_only=True):
    """The workers of one role."""

    parallelism: ShardingDegrees
    workers: int = 1


class Measurement(Struct, frozen=True, kw_only=True):
    gpu: str  # short name, as in `fleet.hardware.gpus`
    backend: str
    version: str
    model: str
    precision: Precision
    client: str  # who measured, and so in which way
    concurrency: int  # of the whole deployment
    prompt_tokens: int
    answer_tokens: int
    prefill: MeasuredRole  # of aggregated serving: the same as `decode`
    decode: MeasuredRole
    phase: MeasuredPhase
    ttft_ms: float
    tpot_ms: float

    @property
    def curve(self) -> str:
        """What has to be the same for two measurements to lie on one curve over concurrency."""
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
    """Relative errors of a set of predictions: their means and their medians; 0.1 is 10 %."""

    rows: int
    ttft_mape: float
    ttft_median: float
    tpot_mape: float
    tpot_median: float


def distinct(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Each once: the same figures of the same GPU and backend are one measurement, whatever else its rows say."""
    seen: dict[tuple[str, str, float, float], Measurement] = {}
    for each in measurements:
        seen.setdefault((each.gpu, each.backend, each.ttft_ms, each.tpot_ms), each)
    return list(seen.values())


def accuracy(
    measurements: Sequence[Measurement], predict: Callable[[Measurement], tuple[float, float]]
) -> Accuracy | None:
    """Of `predict`, which gives milliseconds to the first token and per token; None where there is nothing to compare."""
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
    """A set of measurements that errors are told of: one system, engine, phase and model, or all of them."""

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
    """All together, each engine, each GPU with each engine, each model."""
    found: set[AccuracyCell] = set()
    for each in measurements:
        found |= {
            AccuracyCell(ALL, ALL, each.phase),
            AccuracyCell(ALL, each.backend, each.phase),
            AccuracyCell(each.gpu, each.backend, each.phase),
            AccuracyCell(ALL, ALL, each.phase, each.model),
        }
    return sorted(found, key=lambda cell: (cell.model != ALL, cell))
