"""Figures of the router benchmark: rows of the table from the measurements of each round."""

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
"""Columns of the table: title, field, digits after the decimal point."""


class MeasuredRound(Struct, frozen=True, kw_only=True):
    """Measurements of one target in one round."""

    requests: int
    """Requests that were answered completely."""

    failures: int
    tokens: int
    seconds: float
    router_cpu_seconds: float | None
    """User and system time of all threads and child processes; None without a router."""

    client_cpu_seconds: float
    worker_cpu_seconds: float | None
    ttft_seconds: float
    """Median TTFT of the requests, in seconds."""

    gap_seconds_p99: float | None = None
    """99th percentile of the seconds between tokens at the client; None if answers come in one piece."""

    resident_bytes: int | None
    """Resident memory of the router at the end of the round; None without a router."""

    served: tuple[int, ...] = ()
    """Number of requests that each worker served; empty if the target has workers of its own."""

    computed: tuple[int, ...] = ()
    """Number of blocks that each worker computed, because its cache did not have them."""

    blocks: int = 0
    hits: int = 0


class BenchmarkRow(Struct, frozen=True, kw_only=True):
    """Figures of one target in one scenario: medians over the rounds. None: the figure does not exist for this target."""

    scenario: str
    target: str
    cpu_us_per_request: float | None
    cpu_us_per_token: float | None
    ttft_added_us_p50: float | None
    """TTFT of the target minus the TTFT without a router in the same round, in microseconds; only at concurrency 1."""

    rss_mb: float | None
    hit_rate: float | None
    """Share of the requested blocks that were in the workers' caches."""

    imbalance: float | None
    """Requests of the busiest worker divided by the mean."""

    rounds: int
    work_imbalance: float | None = None
    """Computed blocks of the busiest worker divided by the mean."""

    ttft_us_p50: float | None = None
    requests_per_second: float | None = None
    router_busy: float | None = None
    """Cores that the router used; near 1 means that the router was the limit, because it has one core."""

    client_us_per_request: float | None = None
    worker_us_per_request: float | None = None
    rss_mb_by_round: tuple[float, ...] = ()
    failures: int = 0
    spread: dict[str, tuple[float, float]] = {}
    """Lowest and highest value of each figure over the rounds."""

    cpu_s_per_1k_tokens: float | None = None
    """The figure `cpu_us_per_token` in the unit of published benchmarks: CPU seconds per 1,000 tokens."""

    itl_added_us_p99: float | None = None
    """99th percentile of the gaps between tokens, minus the same figure without a router in the same round, in microseconds. It is
    measured only if workers send tokens at a fixed pace."""

    version: str = ""
    absent: str = ""
    """Reason why there are no figures; empty if there are figures."""

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
    """Return the row of a target in a scenario.

    Args:
        scenario: Name of the scenario.
        target: Name of the target.
        rounds: At least one round, without the warm-up.
        direct: Rounds of the client without a router, to compute the added TTFT; None: leave it out.
        version: Version of the target.
        paced: Rounds of the client without a router, to compute the added gaps; None: leave them out.
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
        rss_mb=_digits(figures["rss_mb"][-1]) if figures["rss_mb"] else None,  # memory grows, so the last round counts
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
    """Return the row of a target that could not take part."""
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
    """Return the router's CPU time divided by the tokens of the answers."""
    return _per(measured.router_cpu_seconds, measured.tokens)


def resident_mebibytes(measured: MeasuredRound) -> float | None:
    return None if measured.resident_bytes is None else measured.resident_bytes / MEBIBYTE


def hit_rate(measured: MeasuredRound) -> float | None:
    return measured.hits / measured.blocks if measured.blocks else None


def imbalance(by_worker: Sequence[int]) -> float | None:
    """Return the highest value divided by the mean: 1 at best, the number of workers at worst."""
    total = sum(by_worker)
    return max(by_worker) * len(by_worker) / total if total else None


def table(rows: Sequence[BenchmarkRow]) -> str:
    """Format the rows as a table."""
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
    """Return the figure of each round, or an empty list if any round lacks the figure."""
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
    """Round to four significant digits; no figure is more exact than that."""
    return float(f"{figure:.4g}")
