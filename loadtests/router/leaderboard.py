"""Leaderboard of placement policies: the production router over engines in virtual time, with the same requests for all policies.

    python -m loadtests.router.leaderboard [--policies NAME,...] [--workloads NAME,...] [--workers N,...] [--loads SHARE,...]
        [--seeds N] [--requests N] [--trace NAME=FILE]... [--half 0|1] [--json FILE]

At a load of 1, the engines could serve all requests in time only with one common cache and a perfect balance, so every policy is late
there. For each seed, all policies get the same requests at the same times, and two policies are compared by the mean difference. The
first half of a trace (formats of `fleet kv replay`) is for tuning and the second half for reporting.
`loadtests.router.simulated.cluster` says which parts are real and which are simulated.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.recording.trace_rows import TraceError
from fleet.recording.traces import read_trace
from fleet.router.placement.policies.built_in import BUILT_IN, DEFAULT, policy
from loadtests.router.simulated.cluster import PolicyOutcome, SimulatedDevice, ideal_rate, run
from loadtests.router.simulated.traffic import (
    RouterTraffic,
    conversations,
    hot_prefix,
    recorded,
    shared_prefixes,
    unique,
)

MISUSED = 2
NOT_COMPARED = ("composed",)  # its placement depends entirely on its settings
POLICIES = tuple(name for name in BUILT_IN.policies if name not in NOT_COMPARED)
WORKERS = (4, 16, 64)
LOADS = (0.5, 0.7, 0.9, 1.1)
REQUESTS = 250  # default number of requests per worker
NEVER = 1e9  # a factor so large that Mooncake's threshold is never reached
LEVEL = 0.01  # two policies count as equal if their shares of requests in time differ by less
TITLE = "workload         wrk load  policy            goodput in time   hits imbal. TTFT ms      p99   TPOT"

TIGHT = SimulatedDevice(kv_tokens=100_000)
"""Engines with room for few prompts beside the running ones, so that shared prefixes are easily lost."""

LONG = SimulatedDevice(kv_tokens=2_000_000, max_running=32)
"""Engines of several accelerators, for prompts of a hundred thousand tokens."""

MADE: Mapping[str, tuple[Callable[[int, int, int], RouterTraffic], SimulatedDevice]] = {
    "unique": (lambda requests, seed, _: unique(requests, seed), SimulatedDevice()),
    "few-prefixes": (
        lambda requests, seed, _: shared_prefixes(requests, seed, groups=16, skew=0.0, opening=32, own=8),
        SimulatedDevice(),
    ),
    "many-prefixes": (
        lambda requests, seed, workers: shared_prefixes(
            requests, seed, groups=16 * workers, skew=0.0, opening=32, own=8
        ),
        TIGHT,
    ),
    "zipf-prefixes": (
        lambda requests, seed, _: shared_prefixes(requests, seed, groups=256, skew=1.0, opening=64, own=8),
        SimulatedDevice(),
    ),
    "hot-prefix": (lambda requests, seed, _: hot_prefix(requests, seed), SimulatedDevice()),
    "conversations": (
        lambda requests, seed, workers: conversations(requests, seed, groups=16 * workers),
        TIGHT,
    ),
}
"""Random workloads by name: a function of the number of requests, the seed and the number of workers; and the engines that serve them."""


def fitted(name: str, device: SimulatedDevice) -> dict[str, Any]:
    """Return the parameters of a policy: the true step times for policies that are told them in advance, otherwise none.

    Mooncake's instances fetch prefixes from each other. These engines do not, so its policy must not count on it.
    """
    latency = device.latency
    prefill = {
        "prefill_seconds_per_token": latency.prefill_ms_per_token / 1000,
        "quadratic_seconds": latency.prefill_ms_per_token_and_context / 2 / 1000,
    }
    match name:
        case "preble":
            return {
                **prefill,
                "decode_seconds_per_token": (latency.step_base_ms + latency.step_ms_per_sequence) / 1000,
            }
        case "mooncake":
            return {**prefill, "balancing_threshold": NEVER}
        case _:
            return {}


class LeaderboardRow(Struct, frozen=True, kw_only=True):
    """Outcomes of one policy on one workload, one for each seed; `mean` averages them."""

    workload: str
    workers: int
    load: float
    policy: str
    seeds: int
    outcomes: tuple[PolicyOutcome, ...]
    requests_per_cpu_second: float  # simulated requests per second of CPU time

    def mean(self, field: str) -> float:
        return statistics.fmean(getattr(each, field) for each in self.outcomes)


class LeaderboardContest(Struct, frozen=True, kw_only=True):
    """One comparison: the engines, and the requests that the workload gives for each seed."""

    workload: str
    workers: int
    load: float
    device: SimulatedDevice
    made: tuple[RouterTraffic, ...]


def contests(
    workloads: Sequence[str],
    traces: Mapping[str, RouterTraffic],
    workers: Sequence[int],
    loads: Sequence[float],
    seeds: int,
    requests: int,
) -> Iterator[LeaderboardContest]:
    """Yield a comparison for each workload, number of workers and load."""
    sources: tuple[RouterTraffic, ...]
    for name in workloads:
        for count in workers:
            if name in traces:
                device = LONG if traces[name].name == "agentic" else SimulatedDevice(kv_tokens=1_000_000)
                sources = (_cut(traces[name], requests * count),)  # a trace does not depend on the seed
            else:
                make, device = MADE[name]
                sources = tuple(make(requests * count, seed + 1, count) for seed in range(seeds))
            for load in loads:
                made = tuple(each.at(load * ideal_rate(each, count, device)) for each in sources)
                yield LeaderboardContest(workload=name, workers=count, load=load, device=device, made=made)


def rows(contest: LeaderboardContest, policies: Sequence[str]) -> Iterator[LeaderboardRow]:
    """Run each policy on all workloads of a comparison, and yield a row for each policy."""
    for name in policies:
        began = time.process_time()
        outcomes = tuple(
            run(each, contest.workers, contest.device, policy(name, fitted(name, contest.device)), seed)
            for seed, each in enumerate(contest.made)
        )
        seconds = time.process_time() - began
        yield LeaderboardRow(
            workload=contest.workload,
            workers=contest.workers,
            load=contest.load,
            policy=name,
            seeds=len(outcomes),
            outcomes=outcomes,
            requests_per_cpu_second=sum(each.requests for each in outcomes) / seconds,
        )


def best_of(found: Sequence[LeaderboardRow]) -> LeaderboardRow:
    """Return the row with the highest share of requests in time; if several are equal, the one with the lowest mean TTFT."""
    return max(found, key=lambda row: (round(row.mean("attainment"), 3), -row.mean("ttft_mean")))


def line(row: LeaderboardRow, best: bool) -> str:
    return (
        f"{row.workload:16} {row.workers:3} {row.load:4.1f}  {row.policy:16} {row.mean('goodput'):8.2f} "
        f"{row.mean('attainment'):7.3f} {row.mean('hit_rate'):6.3f} {row.mean('imbalance'):6.2f} "
        f"{1000 * row.mean('ttft_mean'):8.0f} {1000 * row.mean('ttft_p99'):8.0f} {1000 * row.mean('tpot_mean'):6.1f}"
        f"{'  best' if best else ''}"
    )


def verdict(found: Sequence[Sequence[LeaderboardRow]], chosen: str = DEFAULT) -> list[str]:
    """Compare the policy `chosen` with every other policy by the differences for equal requests; return a line per other policy."""
    lines = []
    for name in sorted({row.policy for each in found for row in each} - {chosen}):
        ahead = level = behind = 0
        hits, in_time, ttfts = [], [], []
        for each in found:
            mine = next(row for row in each if row.policy == chosen)
            theirs = next(row for row in each if row.policy == name)
            for ours, other in zip(mine.outcomes, theirs.outcomes, strict=True):
                difference = ours.attainment - other.attainment
                in_time.append(difference)
                hits.append(ours.hit_rate - other.hit_rate)
                ttfts.append(ours.ttft_mean / other.ttft_mean)
                ahead += difference > LEVEL
                behind += difference < -LEVEL
                level += abs(difference) <= LEVEL
        lines.append(
            f"{chosen} beside {name:16} goodput: ahead {ahead}, level {level}, behind {behind}; in time "
            f"{statistics.fmean(in_time):+.3f}, hits {statistics.fmean(hits):+.3f}, TTFT × {statistics.geometric_mean(ttfts):.2f}"
        )
    return lines


def _cut(trace: RouterTraffic, requests: int) -> RouterTraffic:
    return msgspec.structs.replace(trace, sessions=trace.sessions[:requests])


def _trace(value: str, half: int) -> tuple[str, RouterTraffic]:
    """Read the trace of ``NAME=FILE`` and return its name and requests.

    Raises:
        ConfigurationRefused: The option has another form, or the file cannot be read.
    """
    name, _, path = value.partition("=")
    if not name or not path:
        raise ConfigurationRefused(f"--trace: {value!r} is not NAME=FILE")
    try:
        trace = read_trace(Path(path))
    except TraceError as error:
        raise ConfigurationRefused(f"--trace: {error}") from error
    return name, recorded(trace.format, trace.requests, trace.block_tokens).half(half)


def _names(option: str, value: str, known: Sequence[str]) -> list[str]:
    """Return the names of an option.

    Raises:
        ConfigurationRefused: A name is unknown.
    """
    names = value.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationRefused(f"{option}: {unknown[0]} is not one of {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="all by default")
    parser.add_argument("--workloads", default="", help=f"of {', '.join(MADE)} and the traces; all by default")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="how many; default: %(default)s")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of made-up workloads")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="for each worker")
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--half", type=int, choices=(0, 1), default=1, help="of a trace")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here as well")
    arguments = parser.parse_args(argv)
    try:
        traces = dict(_trace(each, arguments.half) for each in arguments.trace)
        known = (*MADE, *traces)
        workloads = _names("--workloads", arguments.workloads or ",".join(known), known)
        policies = _names("--policies", arguments.policies, POLICIES)
        workers = [int(each) for each in arguments.workers.split(",")]
        loads = [float(each) for each in arguments.loads.split(",")]
    except (ConfigurationRefused, ValueError) as error:
        print(f"loadtests.router.leaderboard: {error}", file=sys.stderr)
        return MISUSED
    found: list[list[LeaderboardRow]] = []
    print(TITLE)
    for contest in contests(workloads, traces, workers, loads, arguments.seeds, arguments.requests):
        each = list(rows(contest, policies))
        best = best_of(each)
        for row in each:
            print(line(row, row is best), flush=True)
        found.append(each)
        if arguments.json:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if DEFAULT in policies and len(policies) > 1:
        print("\n".join(verdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
