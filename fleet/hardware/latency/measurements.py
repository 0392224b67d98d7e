"""Measurements of engines on real accelerators, and the error of predictions.

Rules:

1. A measurement is the mean TTFT and TPOT of a benchmark at one configuration and concurrency. Its curve is the same
   configuration at any concurrency, engine version and date.
2. Whole curves are held out of the fit, never single points: a fifth of all curves, chosen by a hash of their configuration, so that
   the split can be repeated. The same figures under two names are one measurement.
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
"""Name that stands for any system, engine or model."""

HELD_OUT_OF = 5
"""One curve in so many is held out of the fit."""


class MeasuredPhase(StrEnum):
    """Kind of serving that was measured."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


class MeasuredRole(Struct, frozen=True, kw_only=True):
    """The workers of one role."""

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
        """Configuration that all measurements of a curve share."""
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
    """Means and medians of the relative errors of predictions; 0.1 is 10 %."""

    rows: int
    ttft_mape: float
    ttft_median: float
    tpot_mape: float
    tpot_median: float


def distinct(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return each measurement once: equal figures of one GPU and backend are one measurement."""
    seen: dict[tuple[str, str, float, float], Measurement] = {}
    for each in measurements:
        seen.setdefault((each.gpu, each.backend, each.ttft_ms, each.tpot_ms), each)
    return list(seen.values())


def accuracy(
    measurements: Sequence[Measurement], predict: Callable[[Measurement], tuple[float, float]]
) -> Accuracy | None:
    """Return the accuracy of `predict`, which returns TTFT and TPOT in milliseconds; None without measurements."""
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
    """Set of measurements whose errors are reported: one system, engine, phase and model, or `ALL` of them."""

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
    """Return the sets whose errors are reported: all measurements, each engine, each GPU with each engine, each model."""
    found: set[AccuracyCell] = set()
    for each in measurements:
        found |= {
            AccuracyCell(ALL, ALL, each.phase),
            AccuracyCell(ALL, each.backend, each.phase),
            AccuracyCell(each.gpu, each.backend, each.phase),
            AccuracyCell(ALL, ALL, each.phase, each.model),
        }
    return sorted(found, key=lambda cell: (cell.model != ALL, cell))
