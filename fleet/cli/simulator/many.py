"""`fleet sim` with many runs: several seeds, two scenarios side by side, and sweeps over fields."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.cli.console.exits import DONE
from fleet.cli.console.progress import ProgressBar
from fleet.cli.simulator.outputs import SimulationOutputs, say
from fleet.core.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.sim.experiments.comparison import Comparison, FigureDifference
    from fleet.sim.experiments.confidence_interval import ConfidenceInterval
    from fleet.sim.experiments.objectives import RankedScenario, SweepObjective
    from fleet.sim.experiments.sweep import SweepCase, SweepRow


def run_seeds(arguments: argparse.Namespace, changes: dict[str, Any]) -> int:
    from fleet.sim.experiments.comparison import means  # noqa: PLC0415
    from fleet.sim.experiments.sweep import cases  # noqa: PLC0415

    for option in ("report", "requests", "seed"):
        if getattr(arguments, option) is not None:
            raise ConfigurationRefused(f"--{option}: is of one run; leave out --seeds")
    _check_seeds(changes)
    made = cases([arguments.scenario], {}, arguments.seeds, changes)
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        outcomes = [row.outcome for row in _rows(arguments, made)]
        figures = means(outcomes)
        answer = {"seeds": arguments.seeds, "figures": figures, "runs": outcomes}
        outputs.write_json(answer)
    say(arguments, answer, [f"{name:<26} {_mean(figure)}" for name, figure in figures.items()])
    return DONE


def compare_two(arguments: argparse.Namespace, changes: dict[str, Any]) -> int:
    from fleet.config import merge_changes, parse_changes  # noqa: PLC0415
    from fleet.sim.experiments.comparison import compare  # noqa: PLC0415
    from fleet.sim.experiments.sweep import cases  # noqa: PLC0415
    from fleet.sim.scenario import read_scenario  # noqa: PLC0415

    _check_seeds(changes)
    later = parse_changes(arguments.set_b, "--set-b")
    _check_seeds(later, "--set-b")
    changes_b = merge_changes(changes, later)
    a, b = read_scenario(arguments.a, changes), read_scenario(arguments.b, changes_b)
    made = [*cases([arguments.a], {}, arguments.seeds, changes), *cases([arguments.b], {}, arguments.seeds, changes_b)]
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        outcomes = [row.outcome for row in _rows(arguments, made)]
        half = len(arguments.seeds)
        compared = compare(
            (str(arguments.a), str(arguments.b)),
            arguments.seeds,
            list(zip(outcomes[:half], outcomes[half:], strict=True)),
            same_requests=(a.workload, a.engine.block_tokens) == (b.workload, b.engine.block_tokens)
            and arguments.a.parent.resolve() == arguments.b.parent.resolve(),
        )
        outputs.write_json(compared)
    say(arguments, compared, _comparison(compared))
    return DONE


def sweep(arguments: argparse.Namespace, changes: dict[str, Any]) -> int:
    from fleet.sim.experiments.objectives import SweepObjective, ranked  # noqa: PLC0415
    from fleet.sim.experiments.sweep import cases  # noqa: PLC0415

    _check_seeds(changes)
    over = _values_of(arguments.over)
    _check_seeds(over, "--over")
    made = cases(arguments.scenario, over, arguments.seeds, changes)
    with ExitStack() as files:
        outputs = SimulationOutputs(arguments, files)
        rows = _rows(arguments, made)
        answer: Any = rows
        lines = [_line(row) for row in rows]
        if arguments.best is not None:
            objective = SweepObjective(arguments.best)
            order = ranked(rows, objective, arguments.attainment)
            answer = {"objective": objective, "attainment": arguments.attainment, "ranked": order, "rows": rows}
            lines += ["", *(_place(number, each, objective) for number, each in enumerate(order, 1))]
        outputs.write_json(answer)
    say(arguments, answer, lines)
    return DONE


def _values_of(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Parse options such as ``path=v1,v2``, and return the list of values by path.

    Raises:
        ConfigurationRefused: An option has another form, or two options have the same path.
    """
    from fleet.config import parse_value  # noqa: PLC0415

    over: dict[str, list[Any]] = {}
    for assignment in assignments:
        path, _, value_text = assignment.partition("=")
        values = value_text.split(",")
        if not all(path.split(".")) or not all(values):
            raise ConfigurationRefused(f"--over: {assignment!r} is not PATH=V1,V2, as in router.policy=fleet,dynamo")
        if path in over:
            raise ConfigurationRefused(f"--over: {path} is there twice; name all its values in one")
        over[path] = [parse_value(each) for each in values]
    return over


def _check_seeds(changed: Mapping[str, object], option: str = "--set") -> None:
    """Raise an error if the changes set a seed, because the seeds of many runs come from `--seeds`."""
    if any(path.partition(".")[0] == "seed" for path in changed):
        raise ConfigurationRefused(f"{option}: seed: many runs take theirs from --seeds A:B")


def _rows(arguments: argparse.Namespace, made: Sequence["SweepCase"]) -> list["SweepRow"]:
    """Run all cases on the cores of this machine or on the Ray cluster, and return their rows."""
    from fleet.sim.experiments.sweep import run_all  # noqa: PLC0415

    rows = []
    with ProgressBar(len(made)) as progress:
        for number, row in enumerate(run_all(made, arguments.processes, ray=arguments.ray), 1):
            rows.append(row)
            if progress.shown:
                progress(number, f"{number}/{len(made)} {_label(row)}")
            else:
                progress.line(f"{number}/{len(made)} {_label(row)}")
    return rows


def _place(number: int, each: "RankedScenario", objective: "SweepObjective") -> str:
    changes = " ".join(f"{path}={value}" for path, value in each.changes.items())
    label = " ".join(filter(None, (Path(each.scenario).stem, changes)))
    unit = {"cost": "$ a thousand good requests", "energy": "kJ a good request"}[objective]
    figure = "none is good" if each.figure is None else f"{each.figure:,.3f} {unit}"
    missed = "" if each.keeps else "  misses the SLO"
    return f"{number:>3}. {label:<56} {figure}, attainment {each.attainment:.1%}{missed}"


def _label(row: "SweepRow") -> str:
    changes = " ".join(f"{path}={value}" for path, value in row.changes.items())
    return " ".join(filter(None, (Path(row.scenario).stem, changes, f"seed={row.seed}")))


def _line(row: "SweepRow") -> str:
    outcome = row.outcome
    return (
        f"{_label(row):<60} attainment {outcome.attainment:6.1%}  goodput {outcome.goodput_rps:8.3f}  "
        f"ttft p90 {outcome.ttft_ms['p90']:9.1f}  tpot p90 {outcome.tpot_ms['p90']:7.1f}  hits {outcome.hit_rate:6.1%}  "
        f"imbalance {outcome.imbalance:5.2f}  $/Mtok {outcome.cost_per_million_tokens:.3f}"
    )


def _comparison(compared: "Comparison") -> list[str]:
    """Return the comparison as the lines of a table."""
    width = max(len(figure.name) for figure in compared.figures)
    head = f"{'':<{width}} {'a':>12} {'b':>12} {'b - a':>12} {'':>8}  95 % of the mean difference"
    lines = [f"a: {compared.a}", f"b: {compared.b}", f"{len(compared.seeds)} pairs of seeds", head]
    lines += [_compared(figure, width) for figure in compared.figures]
    if not compared.same_requests:
        lines.append("their workloads differ: so do the requests of a pair")
    return lines


def _compared(figure: "FigureDifference", width: int) -> str:
    mean, low, high = figure.difference.mean, figure.difference.low, figure.difference.high
    relative = f"{mean / figure.a:+.1%}" if figure.a else ""
    sure = "one pair says nothing of it" if low is None or high is None else f"{_figure(low)} to {_figure(high)}"
    return (
        f"{figure.name:<{width}} {_figure(figure.a):>12} {_figure(figure.b):>12} {_figure(mean):>12} {relative:>8}  "
        f"{sure:<26} {figure.verdict}"
    ).rstrip()


def _mean(figure: "ConfidenceInterval") -> str:
    if figure.low is None or figure.high is None:
        return _figure(figure.mean)
    return f"{_figure(figure.mean):>12}  {_figure(figure.low)} to {_figure(figure.high)}"


def _figure(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
