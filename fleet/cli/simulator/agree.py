"""`fleet sim agree`: runs one scenario through the production servers and through the simulator, and compares the decisions.

Exit status 0: the decision logs of both are equal; 1: they differ, and the first different lines are shown; 3: the
scenario cannot be run, or a run hangs.
"""

import argparse
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.simulator.outputs import SimulationOutputs, say

SHOWN = 3  # number of lines of each decision log that are shown, from the first difference on


def run(arguments: argparse.Namespace) -> int:
    from fleet.app.agreement.comparison import first_difference, served, simulated  # noqa: PLC0415
    from fleet.config import parse_changes  # noqa: PLC0415 - help needs none of it
    from fleet.sim.run_plan import plan, traffic  # noqa: PLC0415
    from fleet.sim.scenario import read_scenario  # noqa: PLC0415

    changes = parse_changes(arguments.set)
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    scenario, folder = read_scenario(arguments.scenario, changes), arguments.scenario.parent
    planned = plan(scenario, folder)
    there_traffic, here_traffic = traffic(scenario, folder), traffic(scenario, folder)
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        with _quiet():
            there, here = served(planned, there_traffic), simulated(planned, here_traffic)
        number = first_difference(there.lines, here.lines)
        answer: dict[str, Any] = {"agree": number is None, "lines": len(here.lines), "requests": len(here.ended)}
        if number is not None:
            answer["difference"] = {
                "line": number + 1,
                "served": there.lines[number : number + SHOWN],
                "simulated": here.lines[number : number + SHOWN],
            }
        outputs.write_json(answer)
    say(arguments, answer, [_summary(answer)])
    return DONE if number is None else FAILED


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off log messages up to the level WARNING, because the servers would only report faults that the scenario plans."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _summary(answer: dict[str, Any]) -> str:
    counts = f"{answer['requests']:,} requests, {answer['lines']:,} lines of decisions"
    if (difference := answer.get("difference")) is None:
        return f"{counts}: production and simulation agree"
    return "\n".join(
        (
            f"{counts}: production and simulation differ from line {difference['line']:,} on",
            "production:",
            *(f"  {line}" for line in difference["served"]),
            "simulation:",
            *(f"  {line}" for line in difference["simulated"]),
        )
    )
