"""`fleet plan decide`: repeats the decisions in a planner's recording, with the same settings or with others."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.cli.console.exits import DONE, FAILED
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet.planner.settings import PlannerSettings
    from fleet.recording.planner_decisions import DecidedAgain


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="file that `record` in a planner's settings names")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings whose rule, goals and pools decide instead of the recorded ones: a file of `fleet serve planner`, or"
        " a topology of `fleet up` with a section [planner]",
    )
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON instead of lines for people"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Return FAILED if decisions with the recorded settings differ from the recorded decisions.

    With other settings, return DONE even if decisions differ.
    """
    import msgspec  # noqa: PLC0415 - help needs none of it

    from fleet.app.planner import scaling_rule  # noqa: PLC0415
    from fleet.recording.planner_decisions import PlannerRecordingHead, decide_again, read_recording  # noqa: PLC0415

    lines = read_recording(arguments.recording)
    head = next(lines)
    assert isinstance(head, PlannerRecordingHead)
    # The settings in a recording already contain the prices that were used.
    settings = head.settings if arguments.config is None else _other_settings(arguments.config, head.settings)
    found = decide_again(scaling_rule(settings), lines)
    print(msgspec.json.encode(found).decode() if arguments.json else "\n".join(_lines(found)))
    return FAILED if found.different and arguments.config is None else DONE


def _other_settings(file: Path, recorded: "PlannerSettings") -> "PlannerSettings":
    """Read the settings of a planner, with their prices: its own file, or a topology with a section about the planner.

    Raises:
        ConfigurationRefused: The file cannot be used, or it has a pool that was not recorded.
    """
    from fleet.app.planner import priced_settings  # noqa: PLC0415
    from fleet.cli.planner.topology_planner import topology_planner  # noqa: PLC0415
    from fleet.config import load, read_file  # noqa: PLC0415
    from fleet.planner.settings import LinearEngineSettings, PlannerSettings  # noqa: PLC0415

    raw = read_file(file)
    settings = None
    if "planner" in raw:
        simulated = all(isinstance(engine, LinearEngineSettings) for engine in recorded.engines.values())
        settings = topology_planner(file, raw, recorded.model, simulated=simulated)
    settings = settings or priced_settings(load(file, PlannerSettings, content=raw))
    names = [pool.name for pool in recorded.pools]
    for pool in settings.pools:
        if pool.name not in names:
            raise ConfigurationRefused(
                f"{file}: pools: {pool.name!r} is not a pool of the recording, which has {', '.join(names)}"
            )
    return settings


def _lines(found: "DecidedAgain") -> "Iterator[str]":
    yield f"{found.decisions} decisions and {found.plans} states of plans; {found.different} decisions differ"
    if found.recorded is not None and found.decided is not None:
        yield f"first different decision: number {found.first}"
        for name, each in (("recorded", found.recorded), ("now", found.decided)):
            sizes = ", ".join(f"{pool} {count}" for pool, count in sorted(each.replicas.items()))
            yield f"  {name:9} {sizes}: {each.reason.replace('_', ' ')}: {each.message}"
