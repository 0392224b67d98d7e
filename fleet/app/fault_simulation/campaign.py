"""Campaign: runs many seeds of the fault simulation in several processes, and shrinks the schedules of failing seeds."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from fleet.app.fault_simulation.fault_points import LEAST_REACHED, LEAST_SEEDS, FaultPoint
from fleet.app.fault_simulation.schedule import draw, part
from fleet.app.fault_simulation.seed_run import SeedOutcome, run_seed
from fleet.core.errors import ConfigurationRefused
from fleet.sim.experiments.process_pool import process_pool

MOST_FAILURES = 8  # maximum number of failing seeds that are shrunk and reported in full; further ones are only counted
MOST_SHRINKING_RUNS = 400
BATCH = 25  # number of seeds that a process runs before it reports their results


class FailingSeed(Struct, kw_only=True):
    """Describes a seed that broke a promise.

    `keep` and `happenings` state the smallest part of its schedule that was found to break the same promise.
    """

    seed: int
    promise: str
    detail: str
    keep: tuple[int, ...]  # indices, in the seed's schedule, of the happenings that are left after shrinking
    happenings: tuple[str, ...]
    replay: str  # command that runs these happenings again


class CampaignResult(Struct, kw_only=True):
    """Result of a campaign, as `fleet sim faults --json` prints it."""

    first_seed: int
    seeds: int
    failed: int
    failures: tuple[FailingSeed, ...]
    requests: int
    ends: dict[str, int]
    tokens_compared: int
    events: int
    points: dict[str, int]  # how often each fault point was reached, in all seeds together
    missed_points: tuple[str, ...]  # fault points reached too rarely; always empty for fewer than `LEAST_SEEDS` seeds
    recovery_seconds_p50: float
    recovery_seconds_p99: float
    recovery_seconds_max: float

    @property
    def good(self) -> bool:
        return not self.failed and not self.missed_points


class _Tally:
    """Adds up the outcomes of all seeds of a campaign."""

    def __init__(self) -> None:
        self.points: Counter[str] = Counter({point.name.lower(): 0 for point in FaultPoint})
        self.ends: Counter[str] = Counter()
        self.broken: list[SeedOutcome] = []
        self.recovery: list[float] = []
        self.requests = self.tokens = self.events = 0

    def add(self, outcome: SeedOutcome) -> None:
        self.points.update(outcome.points)
        self.ends.update(outcome.ends)
        self.requests += outcome.requests
        self.tokens += outcome.tokens
        self.events += outcome.events
        self.recovery.append(outcome.recovery_seconds)
        if outcome.promise:
            self.broken.append(outcome)


def run_campaign(
    first_seed: int, seeds: int, processes: int, progress: Callable[[int, int], None] = lambda _done, _failed: None
) -> CampaignResult:
    """Run consecutive seeds, shrink the schedules of the first `MOST_FAILURES` failing ones, and return the result.

    Args:
        first_seed: The first seed.
        seeds: Number of seeds.
        processes: Number of processes; if it is 1, all seeds run in the calling process.
        progress: Called with the number of seeds that are done and the number of failures so far.
    """
    tally = _Tally()
    for outcomes in _outcomes(first_seed, seeds, processes):
        for outcome in outcomes:
            tally.add(outcome)
        progress(len(tally.recovery), len(tally.broken))
    recovery = sorted(tally.recovery)
    least = LEAST_REACHED if seeds >= LEAST_SEEDS else 0
    return CampaignResult(
        first_seed=first_seed,
        seeds=seeds,
        failed=len(tally.broken),
        failures=tuple(shrink(outcome.seed) for outcome in tally.broken[:MOST_FAILURES]),
        requests=tally.requests,
        ends=dict(sorted(tally.ends.items())),
        tokens_compared=tally.tokens,
        events=tally.events,
        points=dict(tally.points),
        missed_points=tuple(name for name, count in tally.points.items() if count < least),
        recovery_seconds_p50=recovery[len(recovery) // 2],
        recovery_seconds_p99=recovery[len(recovery) * 99 // 100],
        recovery_seconds_max=recovery[-1],
    )


def _outcomes(first_seed: int, seeds: int, processes: int) -> Iterator[Sequence[SeedOutcome]]:
    batches = [
        range(first, min(first + BATCH, first_seed + seeds)) for first in range(first_seed, first_seed + seeds, BATCH)
    ]
    if processes == 1:
        yield from map(_run_batch, batches)
        return
    with process_pool(processes) as pool:
        yield from pool.map(_run_batch, batches)


def _run_batch(seeds: range) -> list[SeedOutcome]:
    logging.disable(logging.WARNING)  # warnings are not logged, because every fault would write one
    return [run_seed(seed, draw(seed)) for seed in seeds]


def replay(seed: int, keep: Sequence[int] | None) -> SeedOutcome:
    """Run one seed again with all its happenings, or only with the happenings whose indices are in `keep`.

    Raises:
        ConfigurationRefused: The schedule has no happening with an index that is in `keep`.
    """
    schedule = draw(seed)
    if keep is not None and (wrong := [index for index in keep if not 0 <= index < len(schedule)]):
        raise ConfigurationRefused(f"--keep: seed {seed} has the happenings 0 to {len(schedule) - 1}, not {wrong[0]}")
    return run_seed(seed, part(schedule, keep))


def shrink(seed: int) -> FailingSeed:
    """Search the smallest part of a failing seed's schedule that breaks the same promise (delta debugging); return the best found.

    The search ends after about `MOST_SHRINKING_RUNS` runs.
    """
    schedule = draw(seed)
    found = run_seed(seed, schedule)
    assert found.promise, seed
    keep = list(range(len(schedule)))
    runs = 0
    size = max(1, len(keep) // 2)
    while size and runs < MOST_SHRINKING_RUNS:
        left_out = False
        for begin in range(0, len(keep), size):
            fewer = keep[:begin] + keep[begin + size :]
            runs += 1
            outcome = run_seed(seed, part(schedule, fewer))
            if outcome.promise == found.promise:
                keep, found, left_out = fewer, outcome, True
                break
        if not left_out:
            size //= 2
        size = min(size, len(keep))
    return FailingSeed(
        seed=seed,
        promise=found.promise,
        detail=found.detail,
        keep=tuple(keep),
        happenings=tuple(str(schedule[index]) for index in keep),
        replay=f"fleet sim faults --seed {seed} --keep {','.join(map(str, keep)) or 'none'}",
    )
