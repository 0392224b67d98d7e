"""`fleet sim faults`: runs production's machines in virtual time under randomly drawn faults.

Exit status 0: every promise was kept, and every fault point was reached often enough (checked only for 10,000 seeds or
more); 1: a promise was broken (the shrunk schedule and the command that replays it are shown), or a point was missed.
With `--handoffs`, 1 means that a rule of `fleet.app.fault_simulation.handoff_states` was broken.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.simulator.outputs import SimulationOutputs, say
from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from kvstore.system_clock import MonotonicClock

if TYPE_CHECKING:
    from fleet.app.fault_simulation.campaign import CampaignResult
    from fleet.app.fault_simulation.handoff_states import HandoffExploration
    from fleet.app.fault_simulation.seed_run import SeedOutcome

MOST_SEEDS = 10_000_000
TELL_EVERY = Nanos(10 * SECOND)


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=int, default=1000, metavar="N", help="run N seeds (default: 1000)")
    what.add_argument("--seed", type=int, metavar="S", help="run only this seed, and list what happens in it")
    what.add_argument(
        "--handoffs", action="store_true", help="run handoff leases through every interleaving instead of drawing seeds"
    )
    parser.add_argument(
        "--from", type=int, default=1, dest="first", metavar="S", help="first of the seeds (default: 1)"
    )
    parser.add_argument(
        "--keep", metavar="I,J", help="with --seed: run only the requests and faults with these indices"
    )
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time (default: all cores)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigurationRefused: An option cannot be used.
    """
    from fleet.app.fault_simulation.campaign import replay, run_campaign  # noqa: PLC0415 - help needs none of it
    from fleet.app.fault_simulation.handoff_states import explore  # noqa: PLC0415

    keep = _keep(arguments)
    if not 0 < arguments.seeds <= MOST_SEEDS:
        raise ConfigurationRefused(f"--seeds: {arguments.seeds} is not between 1 and {MOST_SEEDS}")
    if arguments.processes < 1:
        raise ConfigurationRefused(f"--processes: {arguments.processes} must be at least 1")
    if arguments.first < 0 or (arguments.seed or 0) < 0:
        raise ConfigurationRefused("--seed and --from: a seed is not negative")
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        files.enter_context(_quiet())
        if arguments.handoffs:
            explored = explore()
            outputs.write_json(explored)
            say(arguments, explored, list(_exploration_lines(explored)))
            return DONE if not explored.violation else FAILED
        if arguments.seed is not None:
            outcome = replay(arguments.seed, keep)
            outputs.write_json(outcome)
            say(arguments, outcome, list(_outcome_lines(outcome, keep)))
            return FAILED if outcome.promise else DONE
        result = run_campaign(arguments.first, arguments.seeds, arguments.processes, _Progress(arguments.seeds))
        outputs.write_json(result)
        say(arguments, result, list(_lines(result)))
    return DONE if result.good else FAILED


def _keep(arguments: argparse.Namespace) -> list[int] | None:
    if arguments.keep is None:
        return None
    if arguments.seed is None:
        raise ConfigurationRefused("--keep: needs --seed")
    if arguments.keep == "none":
        return []
    texts = arguments.keep.split(",")
    if not all(text.isdecimal() and len(text) < 6 for text in texts):
        raise ConfigurationRefused(f"--keep: {arguments.keep!r} is not a list of indices as in 0,3,7")
    return [int(text) for text in texts]


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off log messages up to the level WARNING, because every simulated fault would cause one."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Progress:
    """Shows the progress of a campaign on standard error."""

    def __init__(self, seeds: int):
        self._seeds = seeds
        self._clock = MonotonicClock()
        self._began = self._printed_at = self._clock.now()

    def __call__(self, done: int, failed: int) -> None:
        now = self._clock.now()
        if now - self._printed_at >= TELL_EVERY:
            self._printed_at = now
            rate = done * SECOND / (now - self._began)
            print(
                f"{done:,} of {self._seeds:,} seeds, {failed} failed, {rate:.0f} a second", file=sys.stderr, flush=True
            )


def _lines(result: "CampaignResult") -> Iterator[str]:
    yield (
        f"{result.seeds:,} seeds, {result.requests:,} requests, {result.tokens_compared:,} tokens compared, "
        f"{result.events:,} events"
    )
    yield "ends: " + ", ".join(f"{count:,} {how}" for how, count in result.ends.items())
    yield (
        f"well again after {result.recovery_seconds_p50:.2f} s of virtual time (median), "
        f"{result.recovery_seconds_p99:.2f} s (p99), {result.recovery_seconds_max:.2f} s (most)"
    )
    rarest = sorted(result.points.items(), key=lambda point: point[1])[:5]
    yield f"{len(result.points)} fault points; rarest: " + ", ".join(f"{name} {count:,}" for name, count in rarest)
    for name in result.missed_points:
        yield f"fault point reached too rarely: {name}, {result.points[name]} times"
    if not result.failed:
        yield "no promise was broken"
        return
    yield f"{result.failed:,} seeds broke a promise"
    for failure in result.failures:
        yield f"seed {failure.seed}: {failure.promise}: {failure.detail}"
        for happening in failure.happenings:
            yield f"    {happening}"
        yield f"  replay: {failure.replay}"


def _outcome_lines(outcome: "SeedOutcome", keep: list[int] | None) -> Iterator[str]:
    from fleet.app.fault_simulation.schedule import draw  # noqa: PLC0415 - help needs none of it

    for index, happening in enumerate(draw(outcome.seed)):
        if keep is None or index in keep:
            yield f"{index:3} {happening}"
    yield "ends: " + ", ".join(f"{count:,} {how}" for how, count in outcome.ends.items())
    yield f"{outcome.promise}: {outcome.detail}" if outcome.promise else "no promise was broken"


def _exploration_lines(explored: "HandoffExploration") -> Iterator[str]:
    yield f"{explored.states:,} states, {explored.steps:,} steps, {explored.ends:,} of the states are final"
    if explored.violation:
        yield f"broken: {explored.violation}"
        yield from (f"    {step}" for step in explored.path)
    else:
        yield "no promise was broken"
