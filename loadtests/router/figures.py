"""From what was counted in each round to the rows of the table."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

MICROSECONDS = 1e6
MEBIBYTE = 1 << 20

COLUMNS = (
    ("CPU us/request", "cpu_us_per_request", 1),
    ("us/token", "cpu_us_per_token", 1),
    ("TTFT +us", "ttft_added_us_p50", 0),
    ("ITL +us p99", "itl_added_us_p99", 0),
    ("RSS MB", "rss_mb", 0),
    ("hits", "hit_rate", 3),
    ("imbalance", "imbalance", 2),
    ("of work", "work_imbalance", 2),
    ("TTFT us", "ttft_us_p50", 0),
    ("req/s", "requests_per_second", 0),
    ("busy", "router_busy", 2),
    ("client us", "client_us_per_request", 1),
    ("worker us", "worker_us_per_request", 1),
)
"""Of the table: title, field, digits after the point."""


class MeasuredRound(Struct, frozen=True, kw_only=True):
    """One target's turn."""

    requests: int
    """Answered in full."""

    failures: int
    tokens: int
    seconds: float
    router_cpu_seconds: float | None
    """User and system, all threads and child processes; None where there is no router."""

    client_cpu_seconds: float
    worker_cpu_seconds: float | None
    ttft_seconds: float
    """Median over the requests."""

    gap_seconds_p99: float | None = None
    """Between the tokens of an answer, as the client gets them; None where it gets them all at once."""

    resident_bytes: int | None
    """Of the router, at the end."""

    served: tuple[int, ...] = ()
    """Requests by worker; empty where the workers are not ours."""

    computed: tuple[int, ...] = ()
    """Blocks by worker that it did not remember."""

    blocks: int = 0
    hits: int = 0


class BenchmarkRow(Struct, frozen=True, kw_only=True):
    """Medians over the rounds; None where there is nothing to measure."""

    scenario: str
    target: str
    cpu_us_per_request: float | None
    cpu_us_per_token: float | None
    ttft_added_us_p50: float | None
    """Over the client's asking the workers directly, in the same round; at concurrency 1 only."""

    rss_mb: float | None
    hit_rate: float | None
    """Blocks that the workers remembered, of all they were asked for."""

    imbalance: float | None
    """Requests of the busiest worker over the mean."""

    rounds: int
    work_imbalance: float | None = None
    """The same of the blocks that the workers had to compute."""

    ttft_us_p50: float | None = None
    requests_per_second: float | None = None
    router_busy: float | None = None
    """Cores that the router used; near 1: it was the limit, on the one core that it has."""

    client_us_per_request: float | None = None
    worker_us_per_request: float | None = None
    rss_mb_by_round: tuple[float, ...] = ()
    failures: int = 0
    spread: dict[str, tuple[float, float]] = {}
    """Lowest and highest round of each figure."""

    cpu_s_per_1k_tokens: float | None = None
    """`cpu_us_per_token`, as it is usually quoted."""

    itl_added_us_p99: float | None = None
    """The 99th percentile of the gaps between tokens, over that of the client's asking the workers directly in the same round; where
    the workers send tokens at a beat."""

    version: str = ""
    absent: str = ""
    """Why there are no figures."""

    machine: dict[str, Any] = {}


def row(
    scenario: str,
    target: str,
    rounds: Sequence[MeasuredRound],
    direct: Sequence[MeasuredRound] | None,
    version: str,
    *,
    paced: Sequence[MeasuredRound] | None = None,
) -> BenchmarkRow:
    """What came of a target in a scenario.

    Args:
        scenario: Its name.
        target: Its name.
        rounds: Without the warm-up; at least one.
        direct: The rounds of the client alone with the workers, taken beside; None: no latency is to be told.
        version: Of the target.
        paced: The same rounds, where workers send tokens at a beat; None: gaps between tokens tell nothing.
    """
    has_router = rounds[0].router_cpu_seconds is not None
    added = [
        MICROSECONDS * (each.ttft_seconds - base.ttft_seconds)
        for each, base in zip(rounds, direct or (), strict=direct is not None)
    ]
    gaps = [
        MICROSECONDS * (each.gap_seconds_p99 - base.gap_seconds_p99)
        for each, base in zip(rounds, paced or (), strict=paced is not None)
        if each.gap_seconds_p99 is not None and base.gap_seconds_p99 is not None
    ]
    figures: dict[str, list[float]] = {
        "cpu_us_per_request": _each(rounds, cpu_us_per_request),
        "cpu_us_per_token": _each(rounds, cpu_us_per_token),
        "ttft_added_us_p50": added if has_router else [],
        "itl_added_us_p99": gaps if has_router else [],
        "rss_mb": _each(rounds, resident_mebibytes),
        "hit_rate": _each(rounds, hit_rate),
        "imbalance": _each(rounds, lambda each: imbalance(each.served)),
        "work_imbalance": _each(rounds, lambda each: imbalance(each.computed) if each.blocks else None),
        "ttft_us_p50": _each(rounds, lambda each: MICROSECONDS * each.ttft_seconds),
        "requests_per_second": _each(rounds, lambda each: each.requests / each.seconds),
        "router_busy": _each(rounds, lambda each: _share(each.router_cpu_seconds, each.seconds)),
        "client_us_per_request": _each(rounds, lambda each: _per(each.client_cpu_seconds, each.requests)),
        "worker_us_per_request": _each(rounds, lambda each: _per(each.worker_cpu_seconds, each.requests)),
    }
    medians = {name: _median(values) for name, values in figures.items()}
    per_token = medians["cpu_us_per_token"]
    return BenchmarkRow(
        scenario=scenario,
        target=target,
        cpu_us_per_request=medians["cpu_us_per_request"],
        cpu_us_per_token=medians["cpu_us_per_token"],
        ttft_added_us_p50=medians["ttft_added_us_p50"],
        rss_mb=_digits(figures["rss_mb"][-1])
        if figures["rss_mb"]
        else None,  # it grows: the last round's is the figure
        hit_rate=medians["hit_rate"],
        imbalance=medians["imbalance"],
        rounds=len(rounds),
        work_imbalance=medians["work_imbalance"],
        ttft_us_p50=medians["ttft_us_p50"],
        requests_per_second=medians["requests_per_second"],
        router_busy=medians["router_busy"],
        client_us_per_request=medians["client_us_per_request"],
        worker_us_per_request=medians["worker_us_per_request"],
        cpu_s_per_1k_tokens=None if per_token is None else _digits(1000 * per_token / MICROSECONDS),
        itl_added_us_p99=medians["itl_added_us_p99"],
        rss_mb_by_round=tuple(_digits(each) for each in figures["rss_mb"]),
        failures=sum(each.failures for each in rounds),
        spread={name: (_digits(min(values)), _digits(max(values))) for name, values in figures.items() if values},
        version=version,
    )


def missing(scenario: str, target: str, reason: str, version: str) -> BenchmarkRow:
    """The row of a target that could not take part."""
    return BenchmarkRow(
        scenario=scenario,
        target=target,
        cpu_us_per_request=None,
        cpu_us_per_token=None,
        ttft_added_us_p50=None,
        rss_mb=None,
        hit_rate=None,
        imbalance=None,
        rounds=0,
        version=version,
        absent=reason,
    )


def cpu_us_per_request(measured: MeasuredRound) -> float | None:
    return _per(measured.router_cpu_seconds, measured.requests)


def cpu_us_per_token(measured: MeasuredRound) -> float | None:
    """All of the router's time on the tokens of the answers."""
    return _per(measured.router_cpu_seconds, measured.tokens)


def resident_mebibytes(measured: MeasuredRound) -> float | None:
    return None if measured.resident_bytes is None else measured.resident_bytes / MEBIBYTE


def hit_rate(measured: MeasuredRound) -> float | None:
    return measured.hits / measured.blocks if measured.blocks else None


def imbalance(by_worker: Sequence[int]) -> float | None:
    """The busiest over the mean; 1 at best, the number of workers at worst."""
    total = sum(by_worker)
    return max(by_worker) * len(by_worker) / total if total else None


def table(rows: Sequence[BenchmarkRow]) -> str:
    """For a person."""
    width = max((len(each.target) for each in rows), default=6)
    titles = " ".join(f"{title:>{max(6, len(title))}}" for title, _, _ in COLUMNS)
    lines = [f"{'scenario':14} {'target':{width}} {titles}  CPU us/request, lowest to highest round"]
    for each in rows:
        start = f"{each.scenario:14} {each.target:{width}}"
        if each.absent:
            lines.append(f"{start} absent: {each.absent}")
            continue
        cells = " ".join(
            f"{_cell(getattr(each, name), digits):>{max(6, len(title))}}" for title, name, digits in COLUMNS
        )
        low, high = each.spread.get("cpu_us_per_request", (None, None))
        failed = f"; {each.failures} FAILED" if each.failures else ""
        lines.append(f"{start} {cells}  {_cell(low, 1)} to {_cell(high, 1)}{failed}")
    return "\n".join(lines)


def _each(rounds: Sequence[MeasuredRound], figure: Callable[[MeasuredRound], float | None]) -> list[float]:
    """Nothing at all where a round has no such figure."""
    values = [value for each in rounds if (value := figure(each)) is not None]
    return values if len(values) == len(rounds) else []


def _median(values: Sequence[float]) -> float | None:
    return _digits(statistics.median(values)) if values else None


def _per(seconds: float | None, things: int) -> float | None:
    return None if seconds is None or not things else MICROSECONDS * seconds / things


def _share(cpu_seconds: float | None, seconds: float) -> float | None:
    return None if cpu_seconds is None else cpu_seconds / seconds


def _cell(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"


def _digits(figure: float) -> float:
    """Four significant digits: more than any of these figures has."""
    return float(f"{figure:.4g}")
