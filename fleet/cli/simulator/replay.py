"""`fleet sim replay`: gives the events in a recording of a live router to the router machine again, and compares its commands.

Exit status 0: the commands are equal to the recorded commands; 1: they differ, and the first difference is shown; 3: the
file is not a recording, or another option cannot be used.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.simulator.outputs import check_outputs
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.core.work import WorkerDescription
    from fleet.router.latency_predictions import WorkerProfile
    from fleet.sim.replay import RecordingReplayResult, ReplayDifference

MOST_SHOWN = 12  # maximum number of commands that are shown for the event at which the first difference was found


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="file of `fleet serve router --record`")
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")
    parser.add_argument(
        "--expect",
        type=Path,
        metavar="SCENARIO",
        help="a scenario with the same pools: show how well it predicts TTFT and gaps, and when workers drifted",
    )
    parser.add_argument(
        "--decisions", metavar="FILE", help="write a line for each decision, with all candidates; - for standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    from fleet.sim.replay import RecordingReplay  # noqa: PLC0415 - help needs none of it

    if arguments.json == arguments.decisions == "-":
        raise ConfigurationRefused("--decisions: standard output takes --json already; name a file")
    check_outputs(arguments, ("json", "decisions"))
    replay = RecordingReplay(arguments.recording, None if arguments.expect is None else _profiles(arguments.expect))
    with ExitStack() as files:
        decisions = _open_outputs(files, arguments.decisions, "--decisions")
        answer = _open_outputs(files, arguments.json, "--json")
        replayed = replay.run(None if decisions is None else partial(_write, decisions))
        if answer is not None:
            _write(answer, [msgspec.json.encode(replayed).decode()])
        elif decisions is not sys.stdout:
            _write(sys.stdout, _summary(replayed))
    return DONE if replayed.agree else FAILED


def _profiles(path: Path) -> "Callable[[WorkerDescription], WorkerProfile | None]":
    """Return a function that finds the profile of a worker in a scenario.

    The function returns the profile of the pool whose name is a prefix of the worker's name, or else of the first pool
    with the worker's role; None if the scenario has no such pool.
    """
    from fleet.core.ids import longest_prefix  # noqa: PLC0415
    from fleet.router.latency_predictions import WorkerProfile  # noqa: PLC0415
    from fleet.sim.run_plan import plan  # noqa: PLC0415
    from fleet.sim.scenario import read_scenario  # noqa: PLC0415

    pools = plan(read_scenario(path), path.parent).pools
    named = {f"{pool.name}-": pool for pool in pools}

    def profile_of(worker: "WorkerDescription") -> "WorkerProfile | None":
        name = longest_prefix(worker.worker_id, named)
        alike = (pool for pool in pools if pool.role is worker.role)
        pool = next(alike, None) if name is None else named[name]
        return None if pool is None else WorkerProfile(steps=pool.times, step_tokens=pool.limits.step_tokens)

    return profile_of


def _open_outputs(files: ExitStack, name: str | None, option: str) -> TextIO | None:
    from fleet.cli.console.files import whole_file  # noqa: PLC0415

    if name is None:
        return None
    if name == "-":
        return sys.stdout
    path = files.enter_context(whole_file(Path(name), option))
    return files.enter_context(path.open("w", encoding="utf-8"))


def _write(file: TextIO, lines: Sequence[str]) -> None:
    file.writelines(f"{line}\n" for line in lines)


def _summary(replayed: "RecordingReplayResult") -> list[str]:
    counts = (
        f"{replayed.events:,} events, {replayed.requests:,} requests, {replayed.commands:,} commands in "
        f"{replayed.recorded_seconds:,.1f} s, recorded by Fleet {replayed.recorded_by}"
    )
    if replayed.difference is None:
        return [counts, "the machine says what it said", *replayed.notes, *_expectation_lines(replayed)]
    return [counts, *_difference_lines(replayed.difference)]


def _expectation_lines(replayed: "RecordingReplayResult") -> list[str]:
    """Return lines about latencies: a table of how well profiles predicted them, and the workers with latency drift."""
    if not replayed.expected:
        return []
    head = f"{'worker':<24} {'':<4} {'predictions':>11} {'median error':>12} {'within 20 %':>11}  by the profile alone"
    rows = [
        f"{each.worker_id:<24} {each.kind:<4} {each.predictions:>11,} {each.error:>12.1%} {each.close:>11.1%}  "
        f"{each.profile_error:.1%}, {each.profile_close:.1%}; it takes {each.factor:.2f} times as long and {each.added_ms:.1f} ms"
        for each in replayed.expected
    ]
    drifts = [
        f"{drift.worker_id} drifted {drift.seconds:,.1f} s after the beginning ({drift.kind})"
        for drift in replayed.drifts
    ]
    return [head, *rows, *drifts]


def _difference_lines(difference: "ReplayDifference") -> list[str]:
    return [
        f"line {difference.line}, {difference.seconds:.6f} s after the beginning: the machine says something else",
        f"it hears      {difference.event} {_json(difference.fields)}",
        *_commands("it said", difference.recorded),
        *_commands("it says now", difference.replayed),
        *([f"              {difference.why}"] if difference.why else []),
        *(f"              {line}" for line in difference.decisions),
    ]


def _commands(title: str, commands: list[Any] | None) -> list[str]:
    if commands is None:
        return [f"{title:13} nothing: it broke"]
    if not commands:
        return [f"{title:13} nothing"]
    shown = [_json(command) for command in commands[:MOST_SHOWN]]
    if len(commands) > MOST_SHOWN:
        shown.append(f"and {len(commands) - MOST_SHOWN} more")
    return [f"{title if not index else '':13} {line}" for index, line in enumerate(shown)]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
