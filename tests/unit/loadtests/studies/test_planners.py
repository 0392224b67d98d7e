"""Study of planners: how tables and findings are made from the figures of the replays."""

import pytest

from fleet.sim.planning.outcome import ReplayOutcome
from fleet.sim.planning.rule_registry import RULES, rule_settings
from loadtests.studies.planners import comparison, tuning
from loadtests.studies.runs import Effort

HOURS = {"static_peak": 100.0, "oracle": 50.0, "fleet": 54.0, "hpa": 52.0, "kpa": 20.0}
ATTAINMENT = {"kpa": 0.8}


def a_run(case):
    outcome = ReplayOutcome(
        rule=case.rule,
        attainment=ATTAINMENT.get(case.rule, 0.98),
        worst_attainment=0.9,
        gpu_hours=HOURS.get(case.rule, 70.0) + case.seed - 2,
        dollars=1.0,
        direction_changes=3,
        most_replicas=5,
        predicted_error=0.1 if case.rule == "fleet" else None,
        requests=1000,
        refused=0,
        plans=4,
        cached_share=0.0,
    )
    return comparison.PlannerRun(case=case, outcome=outcome)


def test_findings_compare_fleet_with_peak_oracle_and_baselines(monkeypatch):
    monkeypatch.setattr(comparison, "run", a_run)
    monkeypatch.setattr(comparison.behaviour, "study", lambda effort: ([], []))
    monkeypatch.setitem(HOURS, "static_peak", 101.0)  # rules with hindsight run with the first seed only
    monkeypatch.setitem(HOURS, "oracle", 51.0)

    report = comparison.study(Effort(seeds=(1, 2, 3)))

    day = {finding.claim: finding for finding in report.findings if finding.claim.startswith("day")}
    figures = [round(finding.figure, 3) for finding in day.values()]
    assert figures == [0.98, 0.46, 1.08, 1.0]
    assert [finding.met for finding in day.values()] == [True, True, True, False]
    assert list(day)[3].endswith(": hpa"), "kpa is cheaper, but misses the goal"
    table = report.tables[0]
    fleet = next(row for row in table.rows if row[0] == "fleet")
    assert [row[0] for row in table.rows] == list(RULES)
    assert fleet[3] == "54.0 ± 2.5"


@pytest.mark.parametrize("rule", tuning.TRIALS)
def test_every_rule_has_as_many_valid_trials(rule):
    trials = tuning.TRIALS[rule]

    assert len(trials) == 4
    for parameters in trials:
        rule_settings(rule, parameters)


def test_all_rules_without_search_are_tuned():
    assert set(tuning.TRIALS) == set(RULES) - {"static_peak", "static_best", "oracle"}
    assert all(comparison.LOADS[load] != changes or load == "day" for load, changes in tuning.LOADS.items())


def test_tuned_parameters_are_among_the_trials_of_each_rule():
    for load in comparison.LOADS:
        for rule, trials in tuning.TRIALS.items():
            assert comparison.tuned(load, rule) in trials, (load, rule)
