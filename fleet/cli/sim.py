"""`fleet sim`: runs the production router on simulated GPUs.

Rules:

1. `run` runs one scenario, with one seed or several. `compare` runs two scenarios and compares them. `sweep` runs many
   scenarios. `capacity` finds the highest load at which enough requests keep the SLO.
2. The other sub-commands are tests. `faults` runs the machines under randomly drawn faults, without a
   scenario. `replay` gives the recording of a router to the router machine again, and compares the commands. `agree`
   runs a scenario through the production servers as well, and compares the decisions.
3. All sub-commands write JSON to `--json FILE` (- is standard output). Without this option they print a summary.
4. A scenario that cannot be run is refused before anything is written. A file is written completely or not at all.
"""

import argparse
import os
import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.cli.console.exits import DONE
from fleet.cli.console.stopping import raise_interrupt_on
from fleet.cli.simulator import agree as sim_agree
from fleet.cli.simulator import faults as sim_faults
from fleet.cli.simulator import many as sim_many
from fleet.cli.simulator import replay as sim_replay
from fleet.cli.simulator import run as sim_run
from fleet.cli.simulator.outputs import SimulationOutputs, say
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.sim.experiments.capacity import CapacityPoint
    from fleet.sim.scenario import Scenario

COMPARED_SEEDS = tuple(range(1, 6))
MOST_DIGITS = 40  # maximum number of characters of a seed or a range of seeds


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_ = actions.add_parser("run", help="run a scenario", description="Run a scenario in virtual time.")
    _scenario(run_)
    run_.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with plots")
    run_.add_argument(
        "--no-curve", action="store_true", help="report without the attainment curve, which needs runs at other loads"
    )
    run_.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help="write a row for each ended request: Parquet to FILE.parquet, else JSON lines",
    )
    run_.add_argument("--with-blocks", action="store_true", help="with --requests: also write block names")
    run_.add_argument(
        "--seeds", type=_seeds, metavar="A:B", help="run with each of the seeds A to B; print means and intervals"
    )
    _spread(run_)
    compare = actions.add_parser(
        "compare",
        help="run two scenarios side by side",
        description="Run two scenarios with the same seeds, and say how they differ and how sure that is.",
    )
    compare.add_argument("a", type=Path, help="TOML file: see docs/simulator.md")
    compare.add_argument("b", type=Path, help="TOML file to compare with; may be the same")
    _set(compare)
    compare.add_argument(
        "--set-b", action="append", default=[], metavar="PATH=VALUE", help="change a field of the second scenario only"
    )
    compare.add_argument(
        "--seeds", type=_seeds, default=COMPARED_SEEDS, metavar="A:B", help="seeds of the pairs (default: 1:5)"
    )
    _spread(compare)
    _json(compare)
    sweep = actions.add_parser(
        "sweep",
        help="run scenarios with all combinations of the given values",
        description="Run scenarios with all combinations of some values, on all cores or on a Ray cluster.",
    )
    sweep.add_argument("scenario", type=scenario_file, nargs="+", help="TOML files, or names of studies in the wheel")
    _set(sweep)
    sweep.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="PATH=V1,V2",
        help="values of a field, such as router.policy=fleet,dynamo",
    )
    sweep.add_argument(
        "--best",
        choices=("cost", "energy"),
        help="rank the cases that keep the SLO by dollars or energy per good request",
    )
    sweep.add_argument(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="required attainment with --best (default: 0.9)"
    )
    sweep.add_argument(
        "--seeds", type=_seeds, default=(1,), metavar="A:B", help="run each case with the seeds A to B (default: 1)"
    )
    _spread(sweep)
    _json(sweep)
    capacity = actions.add_parser(
        "capacity",
        help="find the highest load that keeps the SLO",
        description="Find the highest rate of arrivals, or number of users, at which so large a share of requests keeps the SLO.",
    )
    _scenario(capacity)
    capacity.add_argument(
        "--attainment", type=float, default=0.9, metavar="SHARE", help="required attainment (default: 0.9)"
    )
    capacity.add_argument(
        "--points", type=int, default=0, metavar="N", help="run N more loads for the attainment curve"
    )
    _processes(capacity)
    replay = actions.add_parser(
        "replay",
        help="run the recording of a live router through the router's machine again",
        description="Let the router's machine hear a live router's recording again, and say whether it decides the same.",
    )
    sim_replay.configure(replay)
    faults = actions.add_parser(
        "faults",
        help="run production's machines under drawn faults, and check every promise",
        description="Run production's machines under drawn faults in virtual time, and check that every promise is kept.",
    )
    sim_faults.configure(faults)
    agree = actions.add_parser(
        "agree",
        help="compare the decisions of a scenario with those of the production servers",
        description="Run a scenario through production's servers in virtual time and through the simulation, and compare all decisions.",
    )
    _scenario(agree)


def scenario_file(given: str) -> Path:
    """Return the file of a scenario: the file at this path, or else the study of this name that the wheel has installed."""
    path = Path(given)
    study = Path(sysconfig.get_path("data"), "share", "fleet", "studies", f"{given}.toml")
    return study if not path.exists() and study.exists() else path


def _scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "scenario", type=scenario_file, help="TOML file (docs/simulator.md), or name of a study in the wheel"
    )
    _set(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="seed instead of the scenario's")
    _json(parser)


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, such as router.policy=random"
    )


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the result there; - for standard output")


def _spread(parser: argparse.ArgumentParser) -> None:
    """Add the options of sub-commands that do many runs."""
    _processes(parser)
    parser.add_argument("--ray", metavar="ADDRESS", help="run on that Ray cluster instead, such as auto or host:6379")


def _processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at a time (default: number of cores)",
    )


def _seeds(text: str) -> tuple[int, ...]:
    first, colon, last = text.partition(":")
    if len(text) > MOST_DIGITS or not first.isdecimal() or not (last.isdecimal() or not colon):
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, or two as in 1:5")
    number = int(last or first) + 1 - int(first)
    if not 0 < number <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} are {number} seeds; 1 to 1000 are possible")
    return tuple(range(int(first), int(first) + number))


def run(arguments: argparse.Namespace) -> int:
    with raise_interrupt_on():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from fleet.config import parse_changes  # noqa: PLC0415 - help needs none of it
    from fleet.sim.scenario import read_scenario  # noqa: PLC0415

    if arguments.action == "replay":
        return sim_replay.run(arguments)
    if arguments.action == "faults":
        return sim_faults.run(arguments)
    if arguments.action == "agree":
        return sim_agree.run(arguments)
    if not 0 < getattr(arguments, "attainment", 0.5) < 1:
        raise ConfigurationRefused(f"--attainment: {arguments.attainment:g} is not between 0 and 1")
    if getattr(arguments, "processes", 1) < 1:
        raise ConfigurationRefused(f"--processes: {arguments.processes} must be at least 1")
    changes = parse_changes(arguments.set)
    match arguments.action:
        case "sweep":
            return sim_many.sweep(arguments, changes)
        case "compare":
            return sim_many.compare_two(arguments, changes)
        case "run" if arguments.seeds is not None:
            return sim_many.run_seeds(arguments, changes)
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    scenario = read_scenario(arguments.scenario, changes)
    return _capacity(arguments, scenario) if arguments.action == "capacity" else sim_run.run_one(arguments, scenario)


def _capacity(arguments: argparse.Namespace, scenario: "Scenario") -> int:
    from fleet.sim.experiments.capacity import capacity  # noqa: PLC0415

    if not 0 <= arguments.points <= 1000:
        raise ConfigurationRefused(f"--points: {arguments.points} is not between 0 and 1000")
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        found = capacity(
            scenario,
            arguments.scenario.parent,
            arguments.attainment,
            points=arguments.points,
            processes=arguments.processes,
            on_point=_point_line,
        )
        outputs.write_json(found)
    users = f", of {found.users:,} users," if found.users else ""
    line = (
        f"{found.rate:.3f} requests a second{users} ({found.rate_per_gpu:.4f} a GPU) keep the SLO for "
        f"{arguments.attainment:.0%}"
    )
    say(arguments, found, [*(_point_json(point) for point in found.curve), line])
    return DONE


def _point_line(point: "CapacityPoint") -> None:
    print(_point_json(point), file=sys.stderr, flush=True)


def _point_json(point: "CapacityPoint") -> str:
    load = f"{point.users:,} users, " if point.users else ""
    return f"{load}{point.rate:.3f} requests a second: {point.attainment:.1%} keep the SLO"
