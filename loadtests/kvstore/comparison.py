"""Interleaved comparison: several contestants do the same work in turn, round by round, so that a change of the machine's speed affects all alike.

A contestant is a function that does the work once and returns its figure; it prepares and cleans up outside of the measured time. A
contestant that cannot take part raises `SystemUnavailable`, and the result contains the reason.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from loadtests.environments import SystemUnavailable

Contestant = Callable[[], float]

FLEET = "fleet"
LIMIT = "limit"


class LineDirection(StrEnum):
    MORE = "more"
    LESS = "less"


class BenchmarkLine(Struct, frozen=True, kw_only=True):
    """One line of the table: the contestants that do the same work, and the unit of their figures."""

    name: str
    unit: str
    better: LineDirection
    fleet: Contestant
    limit: Contestant | None = None  # measures the limit of the machine; None: no limit
    limit_is: str = ""  # description of the limit
    peers: Mapping[str, Contestant] = {}


class LineResult(Struct, frozen=True, kw_only=True):
    """Result of a line: medians over the rounds in its unit."""

    name: str
    unit: str
    fleet: float | None
    limit: float | None
    ratio_to_limit: float | None  # 1: as good as the limit; below 1: worse, also where lower figures are better
    peers: dict[str, float | None]
    rounds: int
    spread: dict[str, tuple[float, float]]  # lowest and highest value of each contestant
    limit_is: str = ""
    absent: dict[str, str] = {}  # by contestant, the reason why it has no figure


def measure(line: BenchmarkLine, rounds: int) -> LineResult:
    """Let every contestant do the work once to warm up, and then once in each round."""
    contestants: dict[str, Contestant] = {FLEET: line.fleet, **line.peers}
    if line.limit is not None:
        contestants = {LIMIT: line.limit, **contestants}
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    absent: dict[str, str] = {}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            if name in absent:
                continue
            try:
                figure = contestant()
            except SystemUnavailable as reason:
                absent[name] = str(reason)
                continue
            if number > 0:
                figures[name].append(figure)
    medians = {name: statistics.median(values) for name, values in figures.items() if values and name not in absent}
    fleet, limit = medians.get(FLEET), medians.get(LIMIT)
    return LineResult(
        name=line.name,
        unit=line.unit,
        fleet=_rounded(fleet),
        limit=_rounded(limit),
        ratio_to_limit=_rounded(ratio(fleet, limit, line.better)),
        peers={name: _rounded(medians.get(name)) for name in line.peers},
        rounds=rounds,
        spread={name: (_digits(min(figures[name])), _digits(max(figures[name]))) for name in medians},
        limit_is=line.limit_is,
        absent=absent,
    )


def ratio(figure: float | None, limit: float | None, better: LineDirection) -> float | None:
    """Return how good a figure is compared with its limit: 1 means as good. Return None if one of the two is missing or zero."""
    if not figure or not limit:
        return None
    return figure / limit if better is LineDirection.MORE else limit / figure


def table(results: Sequence[LineResult]) -> str:
    """Format the results as a table."""
    peers = list(dict.fromkeys(name for result in results for name in result.peers))
    width = max((len(result.name) for result in results), default=4)
    rows = [
        f"{'line':{width}} {'unit':>8} {'limit':>10} {'Fleet':>10} {'of limit':>8}"
        + "".join(f" {name:>10}" for name in peers)
    ]
    for result in results:
        share = "-" if result.ratio_to_limit is None else f"{100 * result.ratio_to_limit:.0f} %"
        cells = [_cell(result.peers.get(name)) for name in peers]
        rows.append(
            f"{result.name:{width}} {result.unit:>8} {_cell(result.limit)} {_cell(result.fleet)} {share:>8}"
            + "".join(f" {cell}" for cell in cells)
        )
    reasons = {(name, reason) for result in results for name, reason in result.absent.items()}
    return "\n".join([*rows, *(f"{name}: {reason}" for name, reason in sorted(reasons))])


def _cell(figure: float | None) -> str:
    return f"{'-' if figure is None else f'{figure:g}':>10}"


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else _digits(figure)


def _digits(figure: float) -> float:
    """Round to four significant digits; no figure is more exact than that."""
    return float(f"{figure:.4g}")
