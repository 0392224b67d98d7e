"""`fleet sim run`: runs a scenario once, and writes its figures, a row for each request, and a report."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.cli.console.exits import DONE
from fleet.cli.console.progress import ProgressBar
from fleet.cli.simulator.outputs import SimulationOutputs, say
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.sim.results.history import History
    from fleet.sim.results.outcomes import EndedRequest
    from fleet.sim.run import RunResult
    from fleet.sim.scenario import Scenario


def run_one(arguments: argparse.Namespace, scenario: "Scenario") -> int:
    from fleet.sim.report.page import summary  # noqa: PLC0415
    from fleet.sim.results.history import History  # noqa: PLC0415 - help needs none of it
    from fleet.sim.results.request_rows import row_writer  # noqa: PLC0415
    from fleet.sim.run import simulate  # noqa: PLC0415
    from fleet.sim.run_plan import plan, traffic  # noqa: PLC0415
    from fleet.sim.workload.traffic import request_count  # noqa: PLC0415

    if arguments.with_blocks and arguments.requests is None:
        raise ConfigurationRefused("--with-blocks: says what --requests writes; name its FILE")
    folder = arguments.scenario.parent
    planned = plan(scenario, folder)
    sent = traffic(scenario, folder)
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        listeners = []
        if outputs.requests is not None:
            block_tokens = scenario.engine.block_tokens if arguments.with_blocks else None
            writer = row_writer(outputs.requests, arguments.requests.name, scenario.slo, block_tokens)
            listeners.append(files.enter_context(writer))
        history = History(scenario.slo)
        if outputs.report is not None:
            listeners.append(history.add)

        def notify_listeners(ended: "EndedRequest") -> None:
            for listener in listeners:
                listener(ended)

        total = request_count(scenario.workload, folder, seed=scenario.seed) if sys.stderr.isatty() else None
        with ProgressBar(total) as progress:
            run_ = simulate(
                planned,
                sent,
                on_end=notify_listeners if listeners else None,
                progress=(lambda done, seconds: progress(done, f"{done:,} requests, {seconds:,.0f} s simulated"))
                if progress.shown
                else None,
            )
        if outputs.report is not None:
            _write_report(outputs.report, arguments, scenario, run_, history)
        outputs.write_json(run_.outcome)
    say(arguments, run_.outcome, summary(run_.outcome))
    return DONE


def _write_report(
    path: Path, arguments: argparse.Namespace, scenario: "Scenario", run_: "RunResult", history: "History"
) -> None:
    from fleet.sim.experiments.load_curve import LOADS, LoadPoint, load_curve  # noqa: PLC0415
    from fleet.sim.report.page import write_report  # noqa: PLC0415
    from fleet.sim.scenario import waiting_users  # noqa: PLC0415

    points: list[LoadPoint] = []

    def tried(point: LoadPoint) -> None:
        points.append(point)
        progress(len(points), f"at {point.load:g} times the load {point.outcome.attainment:.1%} keep the SLO")

    if not arguments.no_curve:
        with ProgressBar(len(LOADS)) as progress:
            known = LoadPoint(load=1.0, rate=history.rate, users=waiting_users(scenario), outcome=run_.outcome)
            load_curve(scenario, arguments.scenario.parent, known=known, on_point=tried, processes=arguments.processes)
    with path.open("w", encoding="utf-8", errors="replace") as file:  # a file name may not be UTF-8
        write_report(file, arguments.scenario.name, scenario, run_, windows=history.windows(), curve=points)
