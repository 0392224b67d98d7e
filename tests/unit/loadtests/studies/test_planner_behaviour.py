"""Study of the planner's behaviour: how figures are computed from replays, and what Fleet's planner promises."""

import pytest

from fleet.planner.decisions import DecisionReason
from fleet.sim.planning.replay import ReplayStep
from loadtests.studies.planners import behaviour
from loadtests.studies.planners.behaviour import BehaviourCase, BehaviourRun, plans_until_turned, recovered


def a_step(at, prefill, decode):
    return ReplayStep(
        at=at,
        rate=1.0,
        wanted={"prefill": prefill, "decode": decode},
        ready={},
        held={},
        reason=DecisionReason.WITHIN_BAND,
        message="",
        conditions=(),
        changed=False,
    )


def a_run(case, **figures):
    given = {"attainment": 0.98, "gpu_hours": 10.0, "dollars": 10.0, "turns": 0, "figure": 1.0} | figures
    return BehaviourRun(case=case, **given)


def test_goals_are_kept_again_after_the_last_bad_span():
    kept = [(float(second), not 100 <= second < 190) for second in range(400)]
    assert recovered(kept, 100.0, 400.0) == pytest.approx(190.0, abs=1.0)
    assert recovered([(at, True) for at, _ in kept], 100.0, 400.0) == 100.0
    assert recovered([(at, at % 2 == 0) for at, _ in kept], 100.0, 400.0) == 400.0, "never"


def test_plans_are_counted_until_both_roles_have_turned():
    before = [a_step(0, 5, 2), a_step(5, 5, 2)]
    assert plans_until_turned([*before, a_step(10, 5, 2), a_step(15, 3, 6)], 5.0) == 1
    assert plans_until_turned([*before, a_step(10, 5, 4), a_step(15, 5, 6), a_step(20, 3, 6)], 5.0) == 3
    assert plans_until_turned([*before, a_step(10, 5, 6)], 5.0) == 0, "prefill never shrank"


def test_findings_name_each_missed_promise():
    cases = behaviour.cases((1, 2))
    tables, findings = behaviour.report(
        [
            a_run(
                case,
                turns=2 if case.kind == "constant" and case.rate == 0.9 else 0,
                figure={"step": case.start + 12.0, "end": 305.0}.get(case.kind, 1.0),
                most=2 if case.kind == "step" else 0,
                gpu_hours=12.0 if case.rule == "static_best" else 10.0,
                dollars=8.0 if case.kind == "mix" and not case.pools else 10.0,
            )
            for case in cases
        ]
    )
    assert [finding.met for finding in findings] == [False, False, False, True, True, True, False]
    assert [finding.figure for finding in findings] == pytest.approx([2, 12, 2, 305, 1, 10 / 12, 0.8])
    assert ("constant, 0.9 a second", "turns", "2, 2") in tables[0].rows


def test_constant_load_has_no_turn_in_a_replayed_hour():
    run = behaviour.run(BehaviourCase(kind="constant", seed=1, rate=0.3))
    assert run.turns == 0
    assert run.attainment > 0.99


def test_step_of_five_keeps_goals_soon_after_start_up():
    run = behaviour.run(BehaviourCase(kind="step", seed=1))
    assert run.figure <= run.case.start + behaviour.SLACK
    assert run.most <= 1


def test_end_of_load_frees_all_but_the_floor_in_time():
    run = behaviour.run(BehaviourCase(kind="end", seed=1))
    assert behaviour.COOL_DOWN <= run.figure <= behaviour.COOL_DOWN + behaviour.DRAIN
