"""Comparison of two scenarios: compares runs with the same seeds, and computes confidence intervals of the differences.

With the same seed, the random choices are the same in both scenarios: the router's random source and, if the workloads are
equal, the requests. So two runs with the same seed, a pair, differ only because the scenarios differ. The confidence
interval is computed from the differences of all pairs, as in a paired t-test.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from msgspec import Struct

from fleet.sim.experiments.confidence_interval import ConfidenceInterval, confidence_interval
from fleet.sim.results.outcomes import RunOutcome


class FigureDirection(Enum):
    """Says whether higher or lower values of a figure are better, or neither."""

    HIGHER = 1
    LOWER = -1
    NEITHER = 0


class ComparedFigure(Struct, frozen=True):
    """A figure of run outcomes to compare: its name, how to read it from an outcome, and which direction is better."""

    name: str
    of: Callable[[RunOutcome], float]
    better: FigureDirection


def _quantile(times: str, name: str) -> ComparedFigure:
    return ComparedFigure(
        f"{times}_{name}", lambda outcome: float(getattr(outcome, times)[name]), FigureDirection.LOWER
    )


def _plain(name: str, better: FigureDirection) -> ComparedFigure:
    return ComparedFigure(name, lambda outcome: float(getattr(outcome, name)), better)


FIGURES = (
    _plain("attainment", FigureDirection.HIGHER),
    _plain("goodput_rps", FigureDirection.HIGHER),
    *(_quantile(times, name) for times in ("ttft_ms", "tpot_ms") for name in ("p50", "p90", "p99")),
    _quantile("e2e_ms", "p90"),
    ComparedFigure("refused", lambda outcome: float(sum(outcome.refused.values())), FigureDirection.LOWER),
    _plain("hit_rate", FigureDirection.HIGHER),
    _plain("imbalance", FigureDirection.LOWER),
    _plain("utilisation", FigureDirection.NEITHER),
    _plain("gpu_hours", FigureDirection.LOWER),
    _plain("cost_per_million_tokens", FigureDirection.LOWER),
    _plain("energy_kwh", FigureDirection.LOWER),
)


class FigureDifference(Struct, frozen=True, kw_only=True):
    """The difference of one figure between the scenarios `a` and `b`, with a verdict."""

    name: str
    a: float  # mean of the figure in scenario `a` over all seeds
    b: float
    difference: ConfidenceInterval  # mean of b - a over the pairs, with its interval
    # Verdict on `b`: "better", "worse", or "differs" if no direction is better; empty if the interval contains 0 or there is only one seed.
    verdict: str


class Comparison(Struct, frozen=True, kw_only=True):
    """The result of a comparison of two scenarios. `fleet sim compare --json` prints it."""

    a: str
    b: str
    seeds: tuple[int, ...]
    same_requests: bool  # True if both scenarios sent the same requests with every seed
    figures: tuple[FigureDifference, ...]
    runs: tuple[tuple[RunOutcome, RunOutcome], ...]  # outcomes of both scenarios, a pair for each seed


def compare(
    names: tuple[str, str], seeds: Sequence[int], runs: Sequence[tuple[RunOutcome, RunOutcome]], *, same_requests: bool
) -> Comparison:
    """Compare all figures of two scenarios. `runs` contains a pair for each seed: the outcomes of both scenarios."""
    return Comparison(
        a=names[0],
        b=names[1],
        seeds=tuple(seeds),
        same_requests=same_requests,
        figures=tuple(_difference(figure, runs) for figure in FIGURES),
        runs=tuple(runs),
    )


def means(runs: Sequence[RunOutcome]) -> dict[str, ConfidenceInterval]:
    """Return the mean of each figure with its confidence interval. The runs must differ only in their seeds."""
    return {figure.name: confidence_interval([figure.of(run) for run in runs]) for figure in FIGURES}


def _difference(figure: ComparedFigure, runs: Sequence[tuple[RunOutcome, RunOutcome]]) -> FigureDifference:
    pairs = [(figure.of(a), figure.of(b)) for a, b in runs]
    difference = confidence_interval([b - a for a, b in pairs])
    return FigureDifference(
        name=figure.name,
        a=sum(a for a, _ in pairs) / len(pairs),
        b=sum(b for _, b in pairs) / len(pairs),
        difference=difference,
        verdict=_verdict(figure.better, difference),
    )


def _verdict(better: FigureDirection, difference: ConfidenceInterval) -> str:
    if difference.low is None or difference.high is None or difference.low <= 0 <= difference.high:
        return ""
    if better is FigureDirection.NEITHER:
        return "differs"
    return "better" if (difference.mean > 0) == (better is FigureDirection.HIGHER) else "worse"
