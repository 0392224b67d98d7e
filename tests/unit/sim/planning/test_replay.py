"""Replay of scaling rules: what a rule gets as input, what its plans do, and what the replay counts."""

from itertools import pairwise

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.planner.decisions import DecisionReason, PlanDecision
from fleet.planner.messages import PoolName
from fleet.sim.planning.replay import direction_changes
from fleet.sim.planning.rule_context import ScheduledReplicas
from tests.support.sim.replays import a_replay

BOTH = PoolName("both")


class Scripted:
    """A rule that wants these numbers of replicas from these seconds on, and keeps its inputs."""

    def __init__(self, wanted: dict[int, int], interval: int = 5, numbers: dict[str, float] | None = None) -> None:
        self.interval = Nanos(interval * SECOND)
        self.wanted = wanted
        self.numbers = numbers or {}
        self.told = []

    def decide(self, now, demand, seen):
        self.told.append((now, demand, seen))
        count = [replicas for second, replicas in sorted(self.wanted.items()) if second * SECOND <= now][-1]
        return PlanDecision(at=now, replicas={BOTH: count}, reason=DecisionReason.LOAD_UP, numbers=self.numbers)


def static(count: int) -> ScheduledReplicas:
    return ScheduledReplicas([(Nanos(0), {BOTH: count})], Nanos(60 * SECOND))


def test_fixed_pool_costs_its_gpus_for_the_span_of_figures(tmp_path):
    result = a_replay(tmp_path).run("static", static(3))

    begin, end = result.span
    assert begin == 30
    assert result.outcome.gpu_hours == pytest.approx(3 * (end - begin) / 3600, abs=1e-3)
    assert (result.outcome.direction_changes, result.outcome.most_replicas, result.outcome.plans) == (0, 3, 0)
    assert 700 < result.outcome.requests < 900, "requests of the warm-up do not count"


def test_phases_without_requests_are_refused(tmp_path):
    changes = {"workload.arrivals": "phases", "workload.phases": [{"seconds": 60, "rate": 0}]}
    with pytest.raises(ConfigurationRefused, match=r"^workload\.phases: no request arrives"):
        a_replay(tmp_path, changes)


def test_faults_in_a_replay_are_refused(tmp_path):
    fault = {"kind": "worker", "worker": "both-0", "at_seconds": 60}
    with pytest.raises(ConfigurationRefused, match=r"faults: a replay has none"):
        a_replay(tmp_path, {"faults": [fault]})


def test_planned_growth_serves_after_take_up_and_start(tmp_path):
    rule = Scripted({0: 2, 100: 5})
    result = a_replay(tmp_path).run("scripted", rule)

    ready = {step.at: step.ready["both"] for step in result.steps}
    assert ready[105] == 2, "the plan of 100 s is being carried out"
    assert ready[110] == 5
    begin, end = result.span
    hours = (2 * (100.5 - begin) + 5 * (end - 100.5)) / 3600
    assert result.outcome.gpu_hours == pytest.approx(hours, abs=2e-3), "GPUs count while replicas start"
    assert result.outcome.plans == 1


def test_shrinking_holds_gpus_until_streams_have_ended(tmp_path):
    result = a_replay(tmp_path).run("scripted", Scripted({0: 8, 150: 2}, interval=1))

    held = {step.at: step.held["both"] for step in result.steps}
    assert held[152] > 2, "replicas drain"
    assert held[200] == 2
    assert result.outcome.refused == 0


def test_delayed_metrics_reach_the_rule_only_after_their_delay(tmp_path):
    rule = Scripted({0: 4})
    a_replay(tmp_path, {"planner.metric_delay_seconds": 15}).run("scripted", rule)

    windows = [(now, demand) for now, demand, _ in rule.told if demand.ended > demand.began]
    assert windows
    assert all(demand.ended <= now - 15 * SECOND for now, demand in windows)
    assert all(before.ended == after.began for (_, before), (_, after) in pairwise(windows))


def test_gap_of_metrics_is_stale_and_loses_no_request(tmp_path):
    rule, whole = Scripted({0: 6}), Scripted({0: 6})
    gaps = {"planner.gap_every_seconds": 100.0, "planner.gap_seconds": 30.0}
    a_replay(tmp_path, gaps).run("scripted", rule)
    a_replay(tmp_path).run("scripted", whole)

    stale = [now // SECOND for now, demand, _ in rule.told if demand.stale]
    assert {100, 125, 200, 225} <= set(stale)
    assert not {95, 130, 195, 230} & set(stale)
    known = {demand.ended: demand.arrivals for _, demand, _ in whole.told}
    [after] = [demand for now, demand, _ in rule.told if now == 130 * SECOND]
    assert (after.began, after.ended) == (95 * SECOND, 130 * SECOND)
    assert after.arrivals == sum(count for ended, count in known.items() if after.began < ended <= after.ended)


def test_windows_add_up_to_what_happened(tmp_path):
    rule = Scripted({0: 6})
    replay = a_replay(tmp_path, {"planner.warm_up_seconds": 0})
    result = replay.run("scripted", rule)

    windows = [demand for _, demand, _ in rule.told]
    arrived = sum(demand.arrivals for demand in windows)
    assert result.outcome.requests - 1 <= arrived <= result.outcome.requests, "the last one comes with the last instant"
    context = replay.context()
    prompts = sum(each.prompt_tokens for each in context.future)
    assert prompts * 0.99 < sum(demand.prompt_tokens for demand in windows) <= prompts
    assert sum(sum(demand.ttft) for demand in windows) >= sum(demand.finished for demand in windows) > 0.9 * arrived
    assert {worker.pool for demand in windows for worker in demand.workers} == {BOTH}


def test_late_and_abandoned_requests_are_missed(tmp_path):
    patient = a_replay(tmp_path).run("static", static(2)).outcome
    leaving = a_replay(tmp_path, {"clients.deadline_seconds": 10}).run("static", static(2)).outcome

    assert patient.refused == 0
    assert patient.attainment < 0.9, "two replicas do not suffice at the peak"
    assert leaving.refused > 0
    assert leaving.attainment <= 1 - leaving.refused / leaving.requests
    assert patient.worst_attainment < patient.attainment


def test_abandoned_requests_are_no_demand(tmp_path):
    rule = Scripted({0: 1})
    changes = {"clients.deadline_seconds": 35, "planner.warm_up_seconds": 0, "workload.requests": 1800}
    result = a_replay(tmp_path, changes).run("scripted", rule)

    windows = [demand for _, demand, _ in rule.told]
    abandoned = sum(demand.abandoned for demand in windows)
    assert abandoned > 100
    assert sum(demand.arrivals for demand in windows) <= result.outcome.requests - abandoned


def test_requests_that_end_within_their_answer_are_finished(tmp_path):
    rule = Scripted({0: 1})
    result = a_replay(tmp_path, {"clients.deadline_seconds": 10, "planner.warm_up_seconds": 0}).run("scripted", rule)

    ends = [demand.finished + demand.abandoned + demand.refused for _, demand, _ in rule.told]
    assert sum(ends) >= 0.98 * result.outcome.requests, "of most requests the deadline passes during their answer"


def test_mean_prompt_of_a_window_leaves_out_abandoned_requests(tmp_path):
    def mean_prompt(changes):
        rule = Scripted({0: 1})
        a_replay(tmp_path, {"planner.warm_up_seconds": 0, **changes}).run("scripted", rule)
        windows = [demand for _, demand, _ in rule.told]
        return sum(demand.prompt_tokens for demand in windows) / sum(demand.arrivals for demand in windows)

    assert mean_prompt({"clients.deadline_seconds": 10}) == pytest.approx(mean_prompt({}), rel=0.1)


def test_same_seed_gives_the_same_figures(tmp_path):
    first, second = (a_replay(tmp_path).run("static", static(3)).outcome for _ in range(2))
    other = a_replay(tmp_path, {"seed": 2}).run("static", static(3)).outcome

    assert first == second
    assert other != first


def test_forecasts_are_judged_by_the_rate_that_came(tmp_path):
    # The rate swings between 0.75 and 5.25 around its mean of 3 requests a second.
    mean, far = (
        a_replay(tmp_path).run("scripted", Scripted({0: 6}, numbers={"forecast": rate})).outcome.predicted_error
        for rate in (3.0, 30.0)
    )
    none = a_replay(tmp_path).run("static", static(6)).outcome.predicted_error

    assert 0.3 < mean < 0.7
    assert far > 5
    assert none is None


@pytest.mark.parametrize(
    ("numbers", "changes"),
    [([2, 3, 5, 5, 8], 0), ([2, 3, 2], 1), ([4, 3, 3, 4, 3], 2), ([1], 0), ([], 0)],
)
def test_direction_changes_count_turns_of_a_series(numbers, changes):
    assert direction_changes(numbers) == changes
