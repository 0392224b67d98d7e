"""Studies: their scenarios run, their figures are computed rightly, and one study runs as a command up to its exit status."""

import json

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.sim.planning.scenario import read_replay
from fleet.sim.run_plan import plan
from fleet.sim.scenario import read_scenario
from kvstore.eviction.trace_replay import TraceRequest
from loadtests.studies import __main__ as command
from loadtests.studies import mixes, policies, splitwise, tuning
from loadtests.studies.bound import bound_of
from loadtests.studies.contestants import POLICIES, tuned
from loadtests.studies.findings import StudyFinding, StudyReport, StudyTable
from loadtests.studies.runs import FOLDER, Effort, StudyCase, WorkloadPart, capacity, planned_of, read, run

SCENARIOS = sorted(path.name for path in FOLDER.glob("*.toml") if path.name != "tuned.toml")


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_can_be_run(name):
    path = FOLDER / name
    scenario = read_replay(path) if name.startswith("planner-") else read_scenario(path)

    planned = plan(scenario, path.parent)

    assert planned.pools
    if hasattr(scenario.workload, "file"):
        assert (FOLDER / scenario.workload.file).exists()


@pytest.mark.parametrize("traffic", policies.TRAFFIC, ids=lambda each: each.name)
def test_every_contestant_has_valid_parameters(traffic):
    planned = planned_of(read(traffic.scenario, traffic.changes))

    for policy in POLICIES:
        contestant = tuned(policy, traffic.tuned_as, planned)
        assert planned_of(read(traffic.scenario, contestant.changes())).router.policy == policy


def test_every_design_and_cluster_can_be_built():
    for design, (machines, _) in splitwise.DESIGNS.items():
        pools = splitwise.plan_of(design).pools
        assert [pool.workers for pool in pools] == [each.count for each in machines]
    for pools in mixes.CLUSTERS.values():
        assert any(pool.role is not Role.PREFILL for pool in pools)


def test_splitwise_times_are_interpolated_points():
    points = splitwise.points("a100")

    assert points.seconds(1024, 0, 0, 0) == pytest.approx(0.28747)
    assert points.seconds(1536, 0, 0, 0) == pytest.approx((0.28747 + 0.53606) / 2)
    assert points.seconds(0, 0, 128, 0) == pytest.approx(0.04761)
    assert points.seconds(1000, 0, 24, 0) == pytest.approx(1.1 * 0.28747)


CHAIN = (1, 2, 3, 4)


def a_request(at: float, chain=CHAIN, answer: int = 10) -> TraceRequest:
    return TraceRequest(Nanos(round(at * SECOND)), 512 * len(chain), chain, answer)


def test_bound_computes_blocks_once_and_sees_overload():
    planned = planned_of(read("policies-conversation"))
    requests = [a_request(0), a_request(1), a_request(2, chain=(1, 2, 9))]

    bound = bound_of(requests, planned)

    assert bound.hit_rate == pytest.approx((4 * 512 - 1 + 2 * 512) / (11 * 512))
    assert bound.attainment() == 1.0
    assert bound.attainment(speed=1e6) == 0.0
    assert bound.load == pytest.approx(sum(bound.work) / (2 * 16))


def test_request_late_on_idle_worker_is_not_good():
    planned = planned_of(read("policies-conversation"))
    endless = a_request(1, chain=tuple(range(100, 500)))  # 200,000 tokens

    assert bound_of([a_request(0), endless], planned).attainment() == 0.5


def test_no_run_exceeds_bound():
    found = run(StudyCase(scenario="policies-conversation", part=WorkloadPart.FIRST, requests=60, load=1.0))

    assert found.outcome.attainment <= found.bound
    assert found.outcome.hit_rate <= 0.4


def test_halves_of_trace_share_no_request():
    case = StudyCase(scenario="policies-conversation", requests=5)
    first, second = (
        run(StudyCase(scenario=case.scenario, part=part, requests=5))
        for part in (WorkloadPart.FIRST, WorkloadPart.SECOND)
    )

    assert first.outcome.digest != second.outcome.digest


def test_capacity_is_found_within_its_distance():
    for limit in (0.3, 1.0, 7.7):
        found = capacity(lambda load, limit=limit: 1.0 if load <= limit else 0.0)
        assert limit / 1.03 <= found <= limit


def test_policies_get_same_number_of_trials_with_defaults():
    for policy in tuning.GRIDS:
        tried = tuning.trials(policy, 12)
        assert tried[0] == {}
        assert len({json.dumps(each, sort_keys=True) for each in tried}) == 12


def test_study_runs_from_command_to_status(capsys):
    status = command.main(["distserve", "--requests", "60", "--seeds", "1", "--json", "-"])

    told = json.loads(capsys.readouterr().out)
    assert told["study"] == "distserve"
    assert len(told["findings"]) == 2
    assert status in (0, command.FAILED)


def a_report(figure: float) -> StudyReport:
    finding = StudyFinding(claim="it is about one", figure=figure, low=0.9, high=1.1, target="2", met=False)
    return StudyReport(
        study="s", tables=(StudyTable(title="t", columns=("a", "b"), rows=[("x", 1.0)]),), findings=(finding,)
    )


@pytest.mark.parametrize(("figure", "status"), [(1.0, 0), (1.2, 1)])
def test_failed_finding_sets_exit_status(figure, status, monkeypatch, capsys):
    monkeypatch.setitem(command.STUDIES, "wide", ("", lambda effort: a_report(figure)))

    assert command.main(["wide"]) == status
    told = capsys.readouterr().out
    assert ("FAILS" in told) == bool(status)
    assert "target 2: missed" in told


def test_impossible_scenario_prints_one_line(monkeypatch, capsys):
    monkeypatch.setitem(command.STUDIES, "wide", ("", of_no_model))

    assert command.main(["wide"]) == command.REFUSED
    assert capsys.readouterr().err.count("\n") == 1


def of_no_model(_: Effort) -> StudyReport:
    planned_of(read("policies-conversation", {"model": "models/none.json"}))
    raise AssertionError("it was refused")
