"""Behaviour of Fleet's planner under loads that stay constant, jump, end or change their lengths, and with two GPU types.

The pools, goals and prices are those of `planner-steps.toml` and `planner-mix.toml`; the planner has its defaults. The router has its own
defaults, too, so it refuses requests that would wait for more than 10 s.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from fleet.core.clock import SECOND
from fleet.hardware.latency.open_loop import RequestShape
from fleet.planner.sizing.capacity import OfferedLoad, StepCapacity
from fleet.sim.planning.replay import Replay, ReplayResult, ReplayStep
from fleet.sim.planning.rule_registry import rule_settings
from fleet.sim.planning.rules.fleet import pool_engine
from fleet.sim.planning.scenario import read_replay
from fleet.sim.results.outcomes import EndedRequest
from loadtests.studies.findings import Cell, StudyFinding, StudyTable
from loadtests.studies.runs import FOLDER, Effort, spread

GOAL = 0.97
CONSTANT = (0.1, 0.3, 0.9, 2.0, 4.0)
"""Requests per second of the constant loads."""

STEP_AT, STEP_ENDS = 1800.0, 3000.0
LOW, HIGH = 1.0, 5.0
STARTS = (4, 85, 135)
SPAN = 30.0
"""Length in seconds of each span of arrivals in which the goals must be kept (`recovered`)."""

SLACK = 10.0
"""Seconds within which the goals must be kept again after new replicas have started."""

COOL_DOWN, DRAIN = 300.0, 120.0
LENGTHS = (
    {"seconds": 1500, "rate": 4.5, "prompt_tokens": 12000, "output_tokens": 300},
    {"seconds": 1200, "rate": 3.0, "prompt_tokens": 3000, "output_tokens": 2000},
)
TURNED_AT = 1500.0
"""Instant, in seconds, at which the load changes from long prompts to long answers."""

HOMOGENEOUS: dict[str, dict[str, Any]] = {
    "four L40S": {"planner.pools.large.least": 0, "planner.pools.large.most": 0},
    "two B200": {
        "planner.pools.small.least": 0,
        "planner.pools.small.most": 0,
        "planner.pools.large.least": 1,
    },
}
"""Changes of `planner-mix.toml` that leave replicas of only one GPU type."""


class BehaviourCase(Struct, frozen=True, kw_only=True):
    """One replay: the kind of its load, and its parameters."""

    kind: str
    seed: int
    start: int = 85
    rate: float = 0.0
    rule: str = "fleet"
    pools: str = ""
    """Name in `HOMOGENEOUS`; empty: replicas of both GPU types."""


class BehaviourRun(Struct, frozen=True, kw_only=True):
    """Measured figures of one case."""

    case: BehaviourCase
    attainment: float
    gpu_hours: float
    dollars: float
    turns: int
    figure: float = 0.0
    """For the kind `step`: seconds until the goals were kept again. For `end`: seconds until the pools had their least sizes. For `lengths`:
    number of plans until the ratio of the pools had followed the lengths."""

    most: int = 0
    """Only for steps: the largest number of replicas by which a pool exceeded its need while replicas started."""


def run(case: BehaviourCase) -> BehaviourRun:
    """Replay one case. Processes of a pool may call this function."""
    match case.kind:
        case "constant":
            return _constant(case)
        case "step":
            return _step(case)
        case "end":
            return _end(case)
        case "lengths":
            return _lengths(case)
        case "mix":
            return _mix(case)
        case _:
            raise AssertionError(case.kind)


def cases(seeds: Sequence[int]) -> list[BehaviourCase]:
    """Return all cases, for each of the seeds."""
    found = []
    for seed in seeds:
        found += [BehaviourCase(kind="constant", seed=seed, rate=rate) for rate in CONSTANT]
        found += [BehaviourCase(kind="step", seed=seed, start=start) for start in STARTS]
        found.append(BehaviourCase(kind="end", seed=seed))
        found.append(BehaviourCase(kind="lengths", seed=seed))
        found += [BehaviourCase(kind="mix", seed=seed, pools=pools) for pools in ("", *HOMOGENEOUS)]
    found.append(BehaviourCase(kind="lengths", seed=seeds[0], rule="static_best"))
    return found


def study(effort: Effort) -> tuple[list[StudyTable], list[StudyFinding]]:
    """Run all cases, and return tables and findings."""
    return report(list(spread(run, cases(effort.seeds), effort.processes)))


def report(runs: Sequence[BehaviourRun]) -> tuple[list[StudyTable], list[StudyFinding]]:
    """Make the tables and the findings from the figures of all runs."""
    constant, steps, ends, lengths, mixes = (
        [each for each in runs if each.case.kind == kind] for kind in ("constant", "step", "end", "lengths", "mix")
    )
    rows: list[tuple[Cell, ...]] = []
    for rate in CONSTANT:
        turns = _all(each.turns for each in constant if each.case.rate == rate)
        rows.append((f"constant, {rate:g} a second", "turns", turns))
    for start in STARTS:
        after = [each for each in steps if each.case.start == start]
        rows.append(
            (
                f"five times the load, start-up {start} s",
                "seconds until goals are kept",
                _all(each.figure for each in after),
            )
        )
        rows.append(
            (
                f"five times the load, start-up {start} s",
                "most replicas above the need",
                _all(each.most for each in after),
            )
        )
    rows.append(("end of the load", "seconds until the floor", _all(each.figure for each in ends)))
    followed = [each for each in lengths if each.case.rule == "fleet"]
    [fixed] = [each for each in lengths if each.case.rule != "fleet"]
    rows.append(("lengths change", "plans until the ratio follows", _all(each.figure for each in followed)))
    for name, of in (("Fleet", followed), ("best fixed numbers", [fixed])):
        rows.append((f"lengths change, {name}", "in time, %", _all(100 * each.attainment for each in of)))
        rows.append((f"lengths change, {name}", "GPU-hours", _all(each.gpu_hours for each in of)))
    for pools in ("", *HOMOGENEOUS):
        of = [each for each in mixes if each.case.pools == pools]
        rows.append((f"two GPU types: {pools or 'both'}", "in time, %", _all(100 * each.attainment for each in of)))
        rows.append((f"two GPU types: {pools or 'both'}", "dollars", _all(each.dollars for each in of)))
    table = StudyTable(
        title="Behaviour of Fleet's planner, one figure for each seed", columns=("load", "figure", "seeds"), rows=rows
    )
    late = max(each.figure - each.case.start for each in steps)
    above = max(each.most for each in steps)
    floor = max(each.figure for each in ends)
    ours = _mean(each.gpu_hours for each in followed)
    mixed = _mean(each.dollars for each in mixes if not each.case.pools)
    one = min(_mean(each.dollars for each in mixes if each.case.pools == pools) for pools in HOMOGENEOUS)
    return [table], [
        _finding("constant load: most turns in an hour", max(each.turns for each in constant), 0, "0"),
        _finding("step: seconds after the start-up until goals are kept", late, SLACK, f"at most {SLACK:g}"),
        _finding("step: most replicas above the need while some start", above, 1, "at most 1"),
        _finding("end of load: seconds until the floor", floor, COOL_DOWN + DRAIN, f"at most {COOL_DOWN + DRAIN:g}"),
        StudyFinding(
            claim="lengths: plans until the ratio follows",
            figure=float(max(each.figure for each in followed)),
            target="1",
            met=all(each.figure == 1 for each in followed),
        ),
        _finding("lengths: GPU-hours over those of the best fixed numbers", ours / fixed.gpu_hours, 1, "at most 1"),
        _finding("mix: dollars over those of the best single kind", mixed / one, 0.7, "at most 0.7"),
    ]


def _constant(case: BehaviourCase) -> BehaviourRun:
    load = [{"seconds": 5400, "rate": case.rate}]
    replay = _replay("steps", case, {"workload.phases": load, "planner.warm_up_seconds": 1800})
    return _figures(case, _decided(replay))


def _step(case: BehaviourCase) -> BehaviourRun:
    load = [{"seconds": STEP_AT, "rate": LOW}, {"seconds": STEP_ENDS - STEP_AT, "rate": HIGH}]
    replay = _replay("steps", case, {"workload.phases": load})
    ended: list[EndedRequest] = []
    result = replay.run("fleet", rule_settings("fleet").open(replay.context()), on_end=ended.append)
    starting = [step.wanted for step in result.steps if STEP_AT < step.at <= STEP_AT + case.start + SLACK]
    needed = needs(replay, HIGH)
    most = max(wanted[name] - need for wanted in starting for name, need in needed.items())
    slo = replay.scenario.slo
    kept = [(each.arrival / SECOND, not each.refused and slo.kept_by(each)) for each in ended]
    return _figures(case, result, figure=recovered(kept, STEP_AT, STEP_ENDS) - STEP_AT, most=most)


def _end(case: BehaviourCase) -> BehaviourRun:
    load = [
        {"seconds": STEP_AT, "rate": HIGH},
        {"seconds": COOL_DOWN + DRAIN + 300.0, "rate": 0.0},
        {"seconds": 60, "rate": 0.5},
    ]
    result = _decided(_replay("steps", case, {"workload.phases": load}))
    floor = next(step.at for step in result.steps if step.at > STEP_AT and set(step.held.values()) == {1})
    return _figures(case, result, figure=floor - STEP_AT)


def _lengths(case: BehaviourCase) -> BehaviourRun:
    changes = {"workload.phases": list(LENGTHS), "planner.warm_up_seconds": 600}
    result = _decided(_replay("steps", case, changes), case.rule)
    return _figures(case, result, figure=plans_until_turned(result.steps, TURNED_AT))


def _mix(case: BehaviourCase) -> BehaviourRun:
    return _figures(case, _decided(_replay("mix", case, HOMOGENEOUS.get(case.pools, {}))))


def _replay(name: str, case: BehaviourCase, changes: dict[str, Any]) -> Replay:
    path = FOLDER / f"planner-{name}.toml"
    starts = {f"planner.pools.{pool}.start_seconds": case.start for pool in read_replay(path).planner.pools}
    return Replay(read_replay(path, changes | starts | {"seed": case.seed}), FOLDER)


def _decided(replay: Replay, rule: str = "fleet") -> ReplayResult:
    return replay.run_rule(rule, rule_settings(rule))


def _figures(case: BehaviourCase, result: ReplayResult, figure: float = 0.0, most: int = 0) -> BehaviourRun:
    outcome = result.outcome
    return BehaviourRun(
        case=case,
        attainment=outcome.attainment,
        gpu_hours=outcome.gpu_hours,
        dollars=outcome.dollars,
        turns=outcome.direction_changes,
        figure=figure,
        most=most,
    )


def needs(replay: Replay, rate: float) -> dict[str, int]:
    """Return the fewest replicas of each pool that can serve the scenario's requests at this rate, by the engines' step model."""
    context = replay.context()
    model = StepCapacity({name: pool_engine(profile) for name, profile in context.profiles.items()})
    requests = context.future
    prompts = [each.prompt_tokens for each in requests]
    mean = sum(prompts) / len(prompts)
    load = OfferedLoad(
        shape=RequestShape(
            prompt_tokens=mean, answer_tokens=sum(each.output_tokens for each in requests) / len(requests)
        ),
        prompt_spread=sum(each * each for each in prompts) / len(prompts) / mean**2 - 1.0,
    )
    return {
        str(pool.name): next(
            count for count in range(1, pool.most + 1) if model.highest_rate(pool, load, context.goals, count) >= rate
        )
        for pool in context.pools
    }


def recovered(kept: Sequence[tuple[float, bool]], since: float, until: float) -> float:
    """Return the instant from which on each span of `SPAN` seconds keeps the goals; `until` if there is no such instant.

    Args:
        kept: Arrival of each request in seconds, and whether it kept the goals.
        since: First instant that is tried.
        until: End of the load.
    """
    arrivals = sorted(each for each in kept if since <= each[0] < until)
    at = since
    while at + SPAN <= until:
        spans: dict[int, list[bool]] = {}
        for arrival, good in arrivals:
            if arrival >= at:
                spans.setdefault(int((arrival - at) / SPAN), []).append(good)
        if all(sum(span) >= GOAL * len(span) for span in spans.values()):
            return at
        at += 0.5
    return until


def plans_until_turned(steps: Sequence[ReplayStep], since: float) -> int:
    """Return the number of plans after `since` until decode has more, and prefill fewer replicas than at `since`; 0 if they never do."""
    before = [step for step in steps if step.at <= since][-1]
    plans = 0
    for earlier, step in pairwise([before, *(each for each in steps if each.at > since)]):
        plans += step.wanted != earlier.wanted
        if step.wanted["decode"] > before.wanted["decode"] and step.wanted["prefill"] < before.wanted["prefill"]:
            return plans
    return 0


def _finding(claim: str, figure: float, most: float, target: str) -> StudyFinding:
    return StudyFinding(claim=claim, figure=float(figure), target=target, met=figure <= most)


def _all(figures: Iterable[float]) -> str:
    return ", ".join(f"{each:.4g}" for each in figures)


def _mean(figures: Iterable[float]) -> float:
    found = list(figures)
    return sum(found) / len(found)
