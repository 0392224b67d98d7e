"""Study of planners: Fleet's rule and thirteen baselines size the pools of the same simulated clusters.

Each rule gets three loads: a random day, recorded chats whose rate doubles, and recorded coding agents. Replicas start in 4, 85 or
135 s, and metrics come at once or 15 s late. `behaviour` adds further loads, which stay constant, jump, end or change their lengths. The
parameters of each rule come from the same number of trials (`tuning`), on other seeds and other parts of the traces.
"""

import tomllib
from collections.abc import Sequence
from functools import cache
from typing import Any

from msgspec import Struct

from fleet.sim.experiments.confidence_interval import ConfidenceInterval, confidence_interval
from fleet.sim.planning.outcome import ReplayOutcome
from fleet.sim.planning.replay import Replay
from fleet.sim.planning.rule_registry import RULES, rule_settings
from fleet.sim.planning.scenario import read_replay
from loadtests.studies.findings import Cell, StudyFinding, StudyReport, StudyTable
from loadtests.studies.planners import behaviour
from loadtests.studies.runs import FOLDER, Effort, spread

TUNED = FOLDER / "planners" / "tuned.toml"
"""Parameters of each rule for each load, as the tuning found them."""

SAMPLED = {"workload.sample": 0.9}
"""The seed of a recorded load selects this share of its rows, so that seeds differ."""

LOADS: dict[str, dict[str, Any]] = {
    "day": {},
    "conversation": {**SAMPLED, "workload.part": [0.5, 1.0]},
    "agentic": SAMPLED,
}
"""Loads of the report: the names of the scenarios `planner-NAME.toml`, each with its changes."""

STARTS = (4, 85, 135)
DELAYS = (0, 15)
MAIN = (85, 15)
"""Start-up and metric delay, in seconds, for which all rules run with all seeds."""

HINDSIGHT = ("static_peak", "static_best", "oracle")
"""Rules that know the future: they find their plan by replays of the same requests.

These rules do not depend on the delay of metrics, and run with the first seed only.
"""

KNOW_THE_LOAD = (*HINDSIGHT, "melange")
"""Rules that know the load of the reported figures: those of `HINDSIGHT`, and melange, whose parameters come from this load."""

EVERYWHERE = ("fleet", "hpa", "llmd_slo", "sageserve", "tokenscale")
"""Rules that run with all start-ups and delays."""


class PlannerCase(Struct, frozen=True, kw_only=True):
    """One replay of the study."""

    load: str
    rule: str
    start: int = MAIN[0]
    delay: int = MAIN[1]
    seed: int = 1
    requests: int = 0
    """Maximum number of requests; 0: all."""


class PlannerRun(Struct, frozen=True, kw_only=True):
    """Figures of a replay."""

    case: PlannerCase
    outcome: ReplayOutcome


def study(effort: Effort) -> StudyReport:
    cases = _cases(effort)
    runs = list(spread(run, cases, effort.processes))
    tables = [*(_main_table(load, runs) for load in LOADS), _delays_table(runs)]
    findings = [finding for load in LOADS for finding in _findings(load, runs)]
    if not effort.requests:  # with a limit of requests, these loads would end before they change
        more = behaviour.study(effort)
        tables, findings = [*tables, *more[0]], [*findings, *more[1]]
    return StudyReport(study="planner", tables=tuple(tables), findings=tuple(findings))


def run(case: PlannerCase) -> PlannerRun:
    """Replay one case. Processes of a pool may call this function."""
    changes = {**LOADS[case.load], "seed": case.seed}
    outcome = replayed(case, changes, tuned(case.load, case.rule))
    return PlannerRun(case=case, outcome=outcome)


def replayed(case: PlannerCase, changes: dict[str, Any], parameters: dict[str, Any]) -> ReplayOutcome:
    """Replay a case with changes of its scenario and parameters of its rule."""
    path = FOLDER / f"planner-{case.load}.toml"
    pools = read_replay(path).planner.pools
    made = changes | {"planner.metric_delay_seconds": case.delay}
    made |= {f"planner.pools.{name}.start_seconds": case.start for name in pools}
    if case.requests:
        made["workload.requests"] = case.requests
    scenario = read_replay(path, made)
    return Replay(scenario, FOLDER).run_rule(case.rule, rule_settings(case.rule, parameters)).outcome


@cache
def _all_tuned() -> dict[str, Any]:
    return tomllib.loads(TUNED.read_text(encoding="utf-8")) if TUNED.exists() else {}


def tuned(load: str, rule: str) -> dict[str, Any]:
    """Return the parameters of a rule that the tuning found for a load."""
    found: dict[str, Any] = _all_tuned().get(load, {}).get(rule, {})
    return found


def _cases(effort: Effort) -> list[PlannerCase]:
    cases = []
    for load in LOADS:
        for rule in RULES:
            seeds = effort.seeds[:1] if rule in HINDSIGHT else effort.seeds
            cases += [PlannerCase(load=load, rule=rule, seed=seed, requests=effort.requests) for seed in seeds]
        cases += [
            PlannerCase(load=load, rule=rule, start=start, delay=delay, seed=seed, requests=effort.requests)
            for start in STARTS
            for delay in DELAYS
            for rule in EVERYWHERE
            for seed in (effort.seeds if rule == "fleet" else effort.seeds[:1])
            if (start, delay) != MAIN
        ]
    return cases


def _of(runs: Sequence[PlannerRun], load: str, rule: str, start: int, delay: int) -> list[ReplayOutcome]:
    wanted = (load, rule, start, delay)
    return [
        each.outcome for each in runs if (each.case.load, each.case.rule, each.case.start, each.case.delay) == wanted
    ]


def _main_table(load: str, runs: Sequence[PlannerRun]) -> StudyTable:
    [peak] = _of(runs, load, "static_peak", *MAIN)
    [oracle] = _of(runs, load, "oracle", *MAIN)
    rows: list[tuple[Cell, ...]] = []
    for rule in RULES:
        outcomes = _of(runs, load, rule, *MAIN)
        hours = confidence_interval([each.gpu_hours for each in outcomes])
        errors = [each.predicted_error for each in outcomes if each.predicted_error is not None]
        rows.append(
            (
                rule,
                _shown(confidence_interval([100 * each.attainment for each in outcomes])),
                100 * min(each.worst_attainment for each in outcomes),
                _shown(hours),
                100 * (1 - hours.mean / peak.gpu_hours),
                hours.mean / oracle.gpu_hours,
                sum(each.direction_changes for each in outcomes) / len(outcomes),
                max(each.most_replicas for each in outcomes),
                f"{100 * sum(errors) / len(errors):.0f}" if errors else "",
            )
        )
    return StudyTable(
        title=f"{load}: start-up {MAIN[0]} s, metrics {MAIN[1]} s late",
        columns=(
            "rule",
            "in time, %",
            "worst 5 min, %",
            "GPU-hours",
            "less than peak, %",
            "of oracle",
            "turns",
            "most replicas",
            "forecast error, %",
        ),
        rows=rows,
    )


def _shown(interval: ConfidenceInterval) -> str:
    half = "" if interval.high is None else f" ± {interval.high - interval.mean:.1f}"
    return f"{interval.mean:.1f}{half}"


def _delays_table(runs: Sequence[PlannerRun]) -> StudyTable:
    rows: list[tuple[Cell, ...]] = []
    for load in LOADS:
        for rule in EVERYWHERE:
            cells = []
            for start in STARTS:
                for delay in DELAYS:
                    outcomes = _of(runs, load, rule, start, delay)
                    attainment = sum(each.attainment for each in outcomes) / len(outcomes)
                    hours = sum(each.gpu_hours for each in outcomes) / len(outcomes)
                    cells.append(f"{100 * attainment:.1f} % {hours:.1f} h")
            rows.append((f"{load} {rule}", *cells))
    columns = tuple(f"{start} s, {delay} s late" for start in STARTS for delay in DELAYS)
    return StudyTable(
        title="Requests in time and GPU-hours by start-up and delay of metrics, means of the seeds",
        columns=("load and rule", *columns),
        rows=rows,
    )


def _findings(load: str, runs: Sequence[PlannerRun]) -> list[StudyFinding]:
    fleet = _of(runs, load, "fleet", *MAIN)
    [peak] = _of(runs, load, "static_peak", *MAIN)
    [oracle] = _of(runs, load, "oracle", *MAIN)
    attainment = sum(each.attainment for each in fleet) / len(fleet)
    hours = sum(each.gpu_hours for each in fleet) / len(fleet)
    saved = 1 - hours / peak.gpu_hours
    cheaper = [
        rule
        for rule in RULES
        if rule not in {"fleet", *KNOW_THE_LOAD}
        and (outcomes := _of(runs, load, rule, *MAIN))
        and sum(each.attainment for each in outcomes) / len(outcomes) >= min(0.97, attainment)
        and sum(each.gpu_hours for each in outcomes) / len(outcomes) < hours
    ]
    return [
        StudyFinding(
            claim=f"{load}: attainment of Fleet", figure=attainment, target="at least 0.97", met=attainment >= 0.97
        ),
        StudyFinding(
            claim=f"{load}: share of the GPU-hours of static peak that Fleet saves",
            figure=saved,
            target="at least 0.35",
            met=saved >= 0.35,
        ),
        StudyFinding(
            claim=f"{load}: GPU-hours of Fleet over the oracle's",
            figure=hours / oracle.gpu_hours,
            target="at most 1.1",
            met=hours <= 1.1 * oracle.gpu_hours,
        ),
        StudyFinding(
            claim=f"{load}: baselines that do not know the load and are cheaper at 97 %: {', '.join(cheaper) or 'none'}",
            figure=float(len(cheaper)),
            target="0",
            met=not cheaper,
        ),
    ]
