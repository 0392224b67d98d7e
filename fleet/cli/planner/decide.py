"""`fleet plan decide`: repeats the decisions in a planner's recording, with the same settings or with others."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.cli.console.exits import DONE, FAILED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet.recording.planner_decisions import DecidedAgain


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="file that `record` in a planner's settings names")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings of a planner whose rule, goals and pools decide instead of the recorded ones",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines for people")


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Return FAILED if decisions with the recorded settings differ from the recorded decisions.

    With other settings, return DONE even if decisions differ.
    """
    import msgspec  # noqa: PLC0415 - help needs none of it

    from fleet.app.planner import priced_settings, scaling_rule  # noqa: PLC0415
    from fleet.config import load  # noqa: PLC0415
    from fleet.planner.settings import PlannerSettings  # noqa: PLC0415
    from fleet.recording.planner_decisions import PlannerRecordingHead, decide_again, read_recording  # noqa: PLC0415

    lines = read_recording(arguments.recording)
    head = next(lines)
    assert isinstance(head, PlannerRecordingHead)
    # The settings in a recording already contain the prices that were used.
    settings = head.settings if arguments.config is None else priced_settings(load(arguments.config, PlannerSettings))
    found = decide_again(scaling_rule(settings), lines)
    print(msgspec.json.encode(found).decode() if arguments.json else "\n".join(_lines(found)))
    return FAILED if found.different and arguments.config is None else DONE


def _lines(found: "DecidedAgain") -> "Iterator[str]":
    yield f"{found.decisions} decisions and {found.plans} states of plans; {found.different} decisions differ"
    if found.recorded is not None and found.decided is not None:
        yield f"first different decision: number {found.first}"
        for name, each in (("recorded", found.recorded), ("now", found.decided)):
            sizes = ", ".join(f"{pool} {count}" for pool, count in sorted(each.replicas.items()))
            yield f"  {name:9} {sizes}: {each.reason.replace('_', ' ')}: {each.message}"
