"""`fleet sim`: the production router on simulated GPUs.

Rules: `run` runs a scenario, `sweep` runs many, `capacity` searches the highest rate that keeps an SLO. All print JSON to `--json FILE` (- for standard
output), else a summary. A scenario that cannot be run is refused before anything is written.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from fleet.cli.exits import DONE
from fleet.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.sim.results import Ended
    from fleet.sim.scenario import Scenario
    from fleet.sim.sweep import Row


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_ = actions.add_parser("run", help="run a scenario", description="Run a scenario in virtual time.")
    _common(run_)
    run_.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with plots")
    run_.add_argument("--requests", type=Path, metavar="FILE", help="write a JSON line for each request that is over")
    sweep = actions.add_parser(
        "sweep",
        help="run scenarios with all combinations of some values",
        description="Run scenarios with all combinations of some values, on all cores.",
    )
    sweep.add_argument("scenario", type=Path, nargs="+", help="TOML files")
    sweep.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="PATH=V1,V2",
        help="values of a field, as in router.policy=fleet,dynamo",
    )
    sweep.add_argument(
        "--seeds", type=_seeds, default=(1,), metavar="A:B", help="each with the seeds A to B (default: 1)"
    )
    sweep.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="at a time (default: cores)"
    )
    sweep.add_argument("--json", metavar="FILE", help="write a list of outcomes there; - for standard output")
    capacity = actions.add_parser(
        "capacity",
        help="find the highest rate that keeps the SLO",
        description="Find the highest rate of arrivals at which so large a share of requests keeps the SLO.",
    )
    _common(capacity)
    capacity.add_argument("--attainment", type=float, default=0.9, metavar="SHARE", help="to be kept (default: 0.9)")


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, help="TOML file: see docs/simulator.md")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, as in router.policy=random"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the scenario's")
    parser.add_argument("--json", metavar="FILE", help="write the outcome there; - for standard output")


def _seeds(text: str) -> tuple[int, ...]:
    first, colon, last = text.partition(":")
    if not first.isdecimal() or not (last.isdecimal() or not colon):
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, or two as in 1:5")
    seeds = tuple(range(int(first), int(last or first) + 1))
    if not 0 < len(seeds) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} are {len(seeds)} seeds; 1 to 1000 are possible")
    return seeds


def run(arguments: argparse.Namespace) -> int:
    from fleet.config import changes_of  # noqa: PLC0415 - help needs none of it
    from fleet.sim.scenario import read_scenario  # noqa: PLC0415

    if arguments.action == "sweep":
        return _sweep(arguments)
    changes = changes_of(arguments.set)
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    scenario = read_scenario(arguments.scenario, changes)
    if arguments.action == "capacity":
        return _capacity(arguments, scenario)
    return _run(arguments, scenario)


def _run(arguments: argparse.Namespace, scenario: "Scenario") -> int:
    from fleet.sim.report import summary, write_report  # noqa: PLC0415
    from fleet.sim.run import simulate  # noqa: PLC0415
    from fleet.sim.scenario import plan  # noqa: PLC0415
    from fleet.sim.workloads import requests_of  # noqa: PLC0415

    folder = arguments.scenario.parent
    planned = plan(scenario, folder)
    requests = requests_of(scenario.workload, folder, block_tokens=scenario.engine.block_tokens, seed=scenario.seed)
    with contextlib.ExitStack() as files:
        told = None
        if arguments.requests is not None:
            told = _row_writer(files.enter_context(_created(arguments.requests, "--requests")))
        run_ = simulate(planned, requests, told=told, progress=_progress if sys.stderr.isatty() else None)
    if sys.stderr.isatty():
        print(end="\r\x1b[K", file=sys.stderr)
    if arguments.report is not None:
        with _created(arguments.report, "--report") as file:
            write_report(file, arguments.scenario.name, scenario, run_)
    _print(arguments, run_.outcome, summary(run_.outcome))
    return DONE


def _capacity(arguments: argparse.Namespace, scenario: "Scenario") -> int:
    from fleet.sim.capacity import capacity  # noqa: PLC0415

    if not 0 < arguments.attainment < 1:
        raise ConfigurationRefused(f"--attainment: {arguments.attainment:g} is not between 0 and 1")
    found = capacity(scenario, arguments.scenario.parent, arguments.attainment, tried=_tried)
    line = f"{found.rate:.3f} requests a second ({found.rate_per_gpu:.4f} a GPU) keep the SLO for {arguments.attainment:.0%}"
    _print(arguments, found, [line])
    return DONE


def _sweep(arguments: argparse.Namespace) -> int:
    from fleet.config import value_of  # noqa: PLC0415
    from fleet.sim.sweep import cases, run_all  # noqa: PLC0415

    over = {path: values.split(",") for path, _, values in (each.partition("=") for each in arguments.over)}
    if not all(over) or not all(all(values) for values in over.values()):
        raise ConfigurationRefused("--over: is not PATH=V1,V2, as in router.policy=fleet,dynamo")
    if arguments.processes < 1:
        raise ConfigurationRefused(f"--processes: {arguments.processes} must be at least 1")
    made = cases(
        arguments.scenario,
        {path: [value_of(each) for each in values] for path, values in over.items()},
        arguments.seeds,
    )
    rows = []
    for number, row in enumerate(run_all(made, arguments.processes), 1):
        rows.append(row)
        print(f"{number}/{len(made)} {_label(row)}", file=sys.stderr, flush=True)
    _print(arguments, rows, [_line(row) for row in rows])
    return DONE


def _label(row: "Row") -> str:
    changes = " ".join(f"{path}={value}" for path, value in row.changes.items())
    return " ".join(filter(None, (Path(row.scenario).stem, changes, f"seed={row.seed}")))


def _line(row: "Row") -> str:
    outcome = row.outcome
    return (
        f"{_label(row):<60} attainment {outcome.attainment:6.1%}  goodput {outcome.goodput_rps:8.3f}  "
        f"ttft p90 {outcome.ttft_ms['p90']:9.1f}  tpot p90 {outcome.tpot_ms['p90']:7.1f}  hits {outcome.hit_rate:6.1%}  "
        f"imbalance {outcome.imbalance:5.2f}  $/Mtok {outcome.cost_per_million_tokens:.3f}"
    )


def _print(arguments: argparse.Namespace, outcome: object, lines: Sequence[str]) -> None:
    if arguments.json is None:
        print("\n".join(lines))
        return
    content = msgspec.json.encode(outcome).decode() + "\n"
    if arguments.json == "-":
        print(end=content)
    else:
        with _created(Path(arguments.json), "--json") as file:
            file.write(content)


def _created(path: Path, option: str) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationRefused(f"{option}: {path}: {error.strerror}") from error


def _row_writer(file: TextIO) -> "Callable[[Ended], None]":
    encode = msgspec.json.Encoder().encode

    def write(ended: "Ended") -> None:
        file.write(encode(ended).decode() + "\n")

    return write


def _progress(finished: int, simulated_seconds: float) -> None:
    print(end=f"\r{finished:,} requests, {simulated_seconds:,.0f} s simulated", file=sys.stderr, flush=True)


def _tried(rate: float, attainment: float) -> None:
    print(f"{rate:.3f} requests a second: {attainment:.1%} keep the SLO", file=sys.stderr, flush=True)
