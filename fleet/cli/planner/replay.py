"""`fleet plan replay`: replays a load with several scaling rules, and compares their cost and how well they keep the goals."""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.cli.console.exits import DONE
from fleet.cli.simulator.outputs import SimulationOutputs, say
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet.sim.planning.replay import ReplayResult
    from fleet.sim.planning.scenario import ReplayScenario
    from fleet.sim.results.outcomes import Slo


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, help="TOML file with a section [planner]: see docs/simulator.md")
    parser.add_argument(
        "--rules", default="", metavar="R1,R2", help="rules to compare (default: the one that the scenario names)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change a field, such as planner.metric_delay_seconds=0",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="seed instead of the scenario's")
    parser.add_argument(
        "--json",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write the figures there, one object for each rule; - for standard output",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with the course of each rule")


def run(arguments: argparse.Namespace) -> int:
    from fleet.config import parse_changes  # noqa: PLC0415 - help needs none of it
    from fleet.sim.planning.replay import Replay  # noqa: PLC0415
    from fleet.sim.planning.rule_registry import RULES, rule_settings  # noqa: PLC0415
    from fleet.sim.planning.scenario import read_replay  # noqa: PLC0415
    from fleet.sim.report.planner_page import write_planner_report  # noqa: PLC0415

    changes = parse_changes(arguments.set)
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    scenario = read_replay(arguments.scenario, changes)
    names = [name.strip() for name in (arguments.rules or scenario.planner.rule).split(",")]
    if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise ConfigurationRefused(f"--rules: {twice!r} is named twice")
    parameters = scenario.planner.parameters
    where = "--rules" if arguments.rules else f"{arguments.scenario}: planner.rule"
    tables = {f"{arguments.scenario}: planner.parameters.{name}": name for name in parameters}
    for place, name in [*((where, name) for name in names), *tables.items()]:
        if name not in RULES:
            raise ConfigurationRefused(f"{place}: {name!r} is not one of {', '.join(RULES)}")
    rules = {name: rule_settings(name, parameters.get(name)) for name in names}
    replay = Replay(scenario, arguments.scenario.parent)
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        results = [replay.run_rule(name, settings) for name, settings in rules.items()]
        outcomes = [each.outcome for each in results]
        if outputs.report is not None:
            with outputs.report.open("w", encoding="utf-8", errors="replace") as file:
                write_planner_report(file, arguments.scenario.name, scenario, results, replay.replica_prices)
        outputs.write_json(outcomes)
    say(arguments, outcomes, [_goals(scenario), *(line for each in results for line in _lines(each, scenario.slo))])
    return DONE


def _goals(scenario: "ReplayScenario") -> str:
    slo = scenario.slo
    whole = "" if slo.e2e_ms is None else f", and the whole answer within {slo.e2e_ms:g} ms"
    return (
        f"goals ([slo]): the first token within {slo.ttft_ms:g} ms, further ones within {slo.tpot_ms:g} ms each{whole}"
    )


def _lines(result: "ReplayResult", slo: "Slo") -> "Iterator[str]":
    """Yield the line of a rule, and a line for each goal that no request has reached."""
    yield _line(result)
    for field, lowest in (("ttft_ms", result.outcome.lowest_ttft_ms), ("tpot_ms", result.outcome.lowest_tpot_ms)):
        goal: float = getattr(slo, field)
        if lowest is not None and lowest > goal:
            yield f"{'':15} slo.{field}: no request reached {goal:g} ms; the lowest was {lowest:.4g} ms"


def _line(result: "ReplayResult") -> str:
    figures = result.outcome
    error = "" if figures.predicted_error is None else f", load forecast within {figures.predicted_error:.1%}"
    return (
        f"{figures.rule:<15} {figures.attainment:7.2%} in time, {figures.gpu_hours:8.2f} GPU-hours, ${figures.dollars:,.2f}, "
        f"{figures.direction_changes} turns, at most {figures.most_replicas} replicas{error}"
    )
