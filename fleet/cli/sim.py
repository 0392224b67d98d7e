"""`fleet sim`: the production router on simulated GPUs.

Rules: `run` runs a scenario, `compare` two of them side by side, `sweep` many, `capacity` searches the highest load that keeps an
SLO. All print JSON to `--json FILE` (- for standard output), else a summary. A scenario that cannot be run is refused before
anything is written, and a file is written as a whole or not at all.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fleet.cli import sim_agree, sim_replay
from fleet.cli.exits import DONE
from fleet.cli.progress import Progress
from fleet.errors import ConfigurationRefused

if TYPE_CHECKING:
    from fleet.sim.capacity import Point
    from fleet.sim.compare import Comparison, Difference
    from fleet.sim.history import History
    from fleet.sim.intervals import Interval
    from fleet.sim.results import Ended
    from fleet.sim.run import Run
    from fleet.sim.scenario import Scenario
    from fleet.sim.sweep import Case, Row

COMPARED_SEEDS = tuple(range(1, 6))
MOST_DIGITS = 40  # of seeds


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_ = actions.add_parser("run", help="run a scenario", description="Run a scenario in virtual time.")
    _scenario(run_)
    run_.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with plots")
    run_.add_argument(
        "--no-curve", action="store_true", help="no runs at other loads for the report's curve of attainment"
    )
    run_.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help="write a row for each request that is over: Parquet to FILE.parquet, else JSON lines",
    )
    run_.add_argument("--with-blocks", action="store_true", help="with --requests: the names of their blocks as well")
    run_.add_argument(
        "--seeds", type=_seeds, metavar="A:B", help="a run with each of the seeds A to B; prints means and intervals"
    )
    _spread(run_)
    compare = actions.add_parser(
        "compare",
        help="run two scenarios side by side",
        description="Run two scenarios with the same seeds, and say how they differ and how sure that is.",
    )
    compare.add_argument("a", type=Path, help="TOML file: see docs/simulator.md")
    compare.add_argument("b", type=Path, help="TOML file that is compared with it; may be the same")
    _set(compare)
    compare.add_argument(
        "--set-b", action="append", default=[], metavar="PATH=VALUE", help="change a field of the second one alone"
    )
    compare.add_argument(
        "--seeds", type=_seeds, default=COMPARED_SEEDS, metavar="A:B", help="of the pairs (default: 1:5)"
    )
    _spread(compare)
    _json(compare)
    sweep = actions.add_parser(
        "sweep",
        help="run scenarios with all combinations of some values",
        description="Run scenarios with all combinations of some values, on all cores or on a Ray cluster.",
    )
    sweep.add_argument("scenario", type=Path, nargs="+", help="TOML files")
    _set(sweep)
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
    _spread(sweep)
    _json(sweep)
    capacity = actions.add_parser(
        "capacity",
        help="find the highest load that keeps the SLO",
        description="Find the highest rate of arrivals, or number of users, at which so large a share of requests keeps the SLO.",
    )
    _scenario(capacity)
    capacity.add_argument("--attainment", type=float, default=0.9, metavar="SHARE", help="to be kept (default: 0.9)")
    capacity.add_argument(
        "--points", type=int, default=0, metavar="N", help="try N loads more, for the curve of attainment"
    )
    replay = actions.add_parser(
        "replay",
        help="let the router's machine hear a live router's recording again",
        description="Let the router's machine hear a live router's recording again, and say whether it decides the same.",
    )
    sim_replay.configure(replay)
    agree = actions.add_parser(
        "agree",
        help="compare the decisions of a scenario with those of production's servers",
        description="Run a scenario through production's servers in virtual time and through the simulation, and compare all decisions.",
    )
    _scenario(agree)


def _scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, help="TOML file: see docs/simulator.md")
    _set(parser)
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the scenario's")
    _json(parser)


def _set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, as in router.policy=random"
    )


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the outcome there; - for standard output")


def _spread(parser: argparse.ArgumentParser) -> None:
    """Where many runs go."""
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="at a time (default: cores)"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="run on that Ray cluster instead, as in auto or host:6379")


def _seeds(text: str) -> tuple[int, ...]:
    first, colon, last = text.partition(":")
    if len(text) > MOST_DIGITS or not first.isdecimal() or not (last.isdecimal() or not colon):
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed, or two as in 1:5")
    number = int(last or first) + 1 - int(first)
    if not 0 < number <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} are {number} seeds; 1 to 1000 are possible")
    return tuple(range(int(first), int(first) + number))


def run(arguments: argparse.Namespace) -> int:
    from fleet.config import changes_of  # noqa: PLC0415 - help needs none of it
    from fleet.sim.scenario import read_scenario  # noqa: PLC0415

    if arguments.action == "replay":
        return sim_replay.run(arguments)
    if arguments.action == "agree":
        return sim_agree.run(arguments)
    if getattr(arguments, "processes", 1) < 1:
        raise ConfigurationRefused(f"--processes: {arguments.processes} must be at least 1")
    changes = changes_of(arguments.set)
    match arguments.action:
        case "sweep":
            return _sweep(arguments, changes)
        case "compare":
            return _compare(arguments, changes)
        case "run" if arguments.seeds is not None:
            return _run_seeds(arguments, changes)
    if arguments.seed is not None:
        changes["seed"] = arguments.seed
    scenario = read_scenario(arguments.scenario, changes)
    return _capacity(arguments, scenario) if arguments.action == "capacity" else _run(arguments, scenario)


def _run(arguments: argparse.Namespace, scenario: "Scenario") -> int:
    from fleet.sim.history import History  # noqa: PLC0415
    from fleet.sim.report import summary  # noqa: PLC0415
    from fleet.sim.rows import row_writer  # noqa: PLC0415
    from fleet.sim.run import simulate  # noqa: PLC0415
    from fleet.sim.scenario import plan, traffic  # noqa: PLC0415
    from fleet.sim.workloads import number_of  # noqa: PLC0415

    if arguments.with_blocks and arguments.requests is None:
        raise ConfigurationRefused("--with-blocks: says what --requests writes; name its FILE")
    folder = arguments.scenario.parent
    planned = plan(scenario, folder)
    sent = traffic(scenario, folder)
    with ExitStack() as files:
        outputs = _Outputs(arguments, files)
        listeners = []
        if outputs.requests is not None:
            block_tokens = scenario.engine.block_tokens if arguments.with_blocks else None
            writer = row_writer(outputs.requests, arguments.requests.name, scenario.slo, block_tokens)
            listeners.append(files.enter_context(writer))
        history = History(scenario.slo)
        if outputs.report is not None:
            listeners.append(history.add)

        def told(ended: "Ended") -> None:
            for listener in listeners:
                listener(ended)

        total = number_of(scenario.workload, folder, seed=scenario.seed) if sys.stderr.isatty() else None
        with Progress(total) as progress:
            run_ = simulate(
                planned,
                sent,
                told=told if listeners else None,
                progress=(lambda done, seconds: progress(done, f"{done:,} requests, {seconds:,.0f} s simulated"))
                if progress.shown
                else None,
            )
        if outputs.report is not None:
            _write_report(outputs.report, arguments, scenario, run_, history)
        outputs.write_json(run_.outcome)
    _say(arguments, run_.outcome, summary(run_.outcome))
    return DONE


def _write_report(
    path: Path, arguments: argparse.Namespace, scenario: "Scenario", run_: "Run", history: "History"
) -> None:
    from fleet.sim.load_curve import LOADS, LoadPoint, load_curve  # noqa: PLC0415
    from fleet.sim.report import write_report  # noqa: PLC0415
    from fleet.sim.scenario import waiting_users  # noqa: PLC0415

    points: list[LoadPoint] = []

    def tried(point: LoadPoint) -> None:
        points.append(point)
        progress(len(points), f"at {point.load:g} times the load {point.outcome.attainment:.1%} keep the SLO")

    if not arguments.no_curve:
        with Progress(len(LOADS)) as progress:
            known = LoadPoint(load=1.0, rate=history.rate, users=waiting_users(scenario), outcome=run_.outcome)
            load_curve(scenario, arguments.scenario.parent, known=known, tried=tried)
    with path.open("w", encoding="utf-8", errors="replace") as file:  # a file's name may be any bytes
        write_report(file, arguments.scenario.name, scenario, run_, windows=history.windows(), curve=points)


def _run_seeds(arguments: argparse.Namespace, changes: dict[str, Any]) -> int:
    from fleet.sim.compare import means  # noqa: PLC0415
    from fleet.sim.sweep import cases  # noqa: PLC0415

    for option in ("report", "requests", "seed"):
        if getattr(arguments, option) is not None:
            raise ConfigurationRefused(f"--{option}: is of one run; leave out --seeds")
    made = cases([arguments.scenario], {}, arguments.seeds, changes)
    with ExitStack() as files:
        outputs = _Outputs(arguments, files)
        outcomes = [row.outcome for row in _rows(arguments, made)]
        figures = means(outcomes)
        answer = {"seeds": arguments.seeds, "figures": figures, "runs": outcomes}
        outputs.write_json(answer)
    _say(arguments, answer, [f"{name:<26} {_mean(figure)}" for name, figure in figures.items()])
    return DONE


def _compare(arguments: argparse.Namespace, changes: dict[str, Any]) -> int:
    from fleet.config import changes_of  # noqa: PLC0415
    from fleet.sim.compare import compare  # noqa: PLC0415
    from fleet.sim.scenario import read_scenario  # noqa: PLC0415
    from fleet.sim.sweep import cases  # noqa: PLC0415

    changes_b = {**changes, **changes_of(arguments.set_b)}
    a, b = read_scenario(arguments.a, changes), read_scenario(arguments.b, changes_b)
    made = [*cases([arguments.a], {}, arguments.seeds, changes), *cases([arguments.b], {}, arguments.seeds, changes_b)]
    with ExitStack() as files:
        outputs = _Outputs(arguments, files)
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
    _say(arguments, compared, _comparison(compared))
    return DONE


def _capacity(arguments: argparse.Namespace, scenario: "Scenario") -> int:
    from fleet.sim.capacity import capacity  # noqa: PLC0415

    if not 0 < arguments.attainment < 1:
        raise ConfigurationRefused(f"--attainment: {arguments.attainment:g} is not between 0 and 1")
    if not 0 <= arguments.points <= 1000:
        raise ConfigurationRefused(f"--points: {arguments.points} is not between 0 and 1000")
    with ExitStack() as files:
        outputs = _Outputs(arguments, files)
        found = capacity(
            scenario, arguments.scenario.parent, arguments.attainment, points=arguments.points, tried=_tried
        )
        outputs.write_json(found)
    users = f", of {found.users:,} users," if found.users else ""
    line = (
        f"{found.rate:.3f} requests a second{users} ({found.rate_per_gpu:.4f} a GPU) keep the SLO for "
        f"{arguments.attainment:.0%}"
    )
    _say(arguments, found, [*(_point(point) for point in found.curve), line])
    return DONE


def _sweep(arguments: argparse.Namespace, changes: dict[str, Any]) -> int:
    from fleet.config import value_of  # noqa: PLC0415
    from fleet.sim.sweep import cases  # noqa: PLC0415

    over = {path: values.split(",") for path, _, values in (each.partition("=") for each in arguments.over)}
    if not all(over) or not all(all(values) for values in over.values()):
        raise ConfigurationRefused("--over: is not PATH=V1,V2, as in router.policy=fleet,dynamo")
    made = cases(
        arguments.scenario,
        {path: [value_of(each) for each in values] for path, values in over.items()},
        arguments.seeds,
        changes,
    )
    with ExitStack() as files:
        outputs = _Outputs(arguments, files)
        rows = _rows(arguments, made)
        outputs.write_json(rows)
    _say(arguments, rows, [_line(row) for row in rows])
    return DONE


class _Outputs:
    """Files that were asked for, begun before anything runs: what cannot be written is refused at once."""

    def __init__(self, arguments: argparse.Namespace, files: ExitStack):
        from fleet.sim.files import whole_file  # noqa: PLC0415

        named: dict[Path, str] = {}

        def begun(option: str) -> Path | None:
            path = getattr(arguments, option, None)
            if path in {None, "-"}:
                return None
            if (other := named.setdefault(Path(path).absolute(), option)) != option:
                raise ConfigurationRefused(f"--{option}: {path} is the file of --{other} as well")
            return files.enter_context(whole_file(Path(path), f"--{option}"))

        self.requests, self.report, self._json = begun("requests"), begun("report"), begun("json")

    def write_json(self, answer: object) -> None:
        if self._json is not None:
            self._json.write_bytes(msgspec.json.encode(answer) + b"\n")


def _rows(arguments: argparse.Namespace, made: Sequence["Case"]) -> list["Row"]:
    """All runs, on the cores or the cluster that were asked for."""
    from fleet.sim.sweep import run_all  # noqa: PLC0415

    rows = []
    with Progress(len(made)) as progress:
        for number, row in enumerate(run_all(made, arguments.processes, ray=arguments.ray), 1):
            rows.append(row)
            if progress.shown:
                progress(number, f"{number}/{len(made)} {_label(row)}")
            else:
                progress.line(f"{number}/{len(made)} {_label(row)}")
    return rows


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


def _comparison(compared: "Comparison") -> list[str]:
    """A table."""
    width = max(len(figure.name) for figure in compared.figures)
    head = f"{'':<{width}} {'a':>12} {'b':>12} {'b - a':>12} {'':>8}  95 % of the mean difference"
    lines = [f"a: {compared.a}", f"b: {compared.b}", f"{len(compared.seeds)} pairs of seeds", head]
    lines += [_compared(figure, width) for figure in compared.figures]
    if not compared.same_requests:
        lines.append("their workloads differ: so do the requests of a pair")
    return lines


def _compared(figure: "Difference", width: int) -> str:
    mean, low, high = figure.difference.mean, figure.difference.low, figure.difference.high
    relative = f"{mean / figure.a:+.1%}" if figure.a else ""
    sure = "one pair says nothing of it" if low is None or high is None else f"{_figure(low)} to {_figure(high)}"
    return (
        f"{figure.name:<{width}} {_figure(figure.a):>12} {_figure(figure.b):>12} {_figure(mean):>12} {relative:>8}  "
        f"{sure:<26} {figure.verdict}"
    ).rstrip()


def _mean(figure: "Interval") -> str:
    if figure.low is None or figure.high is None:
        return _figure(figure.mean)
    return f"{_figure(figure.mean):>12}  {_figure(figure.low)} to {_figure(figure.high)}"


def _figure(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _say(arguments: argparse.Namespace, answer: object, lines: Sequence[str]) -> None:
    if arguments.json == "-":
        print(msgspec.json.encode(answer).decode())
    elif arguments.json is None:
        print("\n".join(lines))


def _tried(point: "Point") -> None:
    print(_point(point), file=sys.stderr, flush=True)


def _point(point: "Point") -> str:
    load = f"{point.users:,} users, " if point.users else ""
    return f"{load}{point.rate:.3f} requests a second: {point.attainment:.1%} keep the SLO"
