"""Tests of the load rule: needs, cool-down, bounds, budgets, pins and missing demand."""

import math

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.planner.decisions import DecisionReason, PlanBudget, PlanConditionType, PlannedPool
from fleet.planner.demand import DemandWindow, WorkerDemand
from fleet.planner.load_rule import LoadRule
from fleet.planner.messages import Observation, PoolName, PoolObservation
from fleet.planner.settings import LoadRuleSettings

DECODE, PREFILL = PoolName("decode"), PoolName("prefill")


def a_pool(name=DECODE, role=Role.DECODE, **fields):
    return PlannedPool(name=name, role=role, **{"least": 1, "most": 5, **fields})


def a_rule(*pools, budget=None):
    settings = LoadRuleSettings(requests_per_replica=4, cool_down_seconds=60)
    return LoadRule(settings, pools or (a_pool(),), budget or PlanBudget())


def seen(**wanted):
    return Observation(tuple(PoolObservation(name=PoolName(name), wanted=n, ready=n) for name, n in wanted.items()))


def a_window(queued=0, stale=(), **running):
    workers = tuple(
        WorkerDemand(worker=f"{pool}-0", pool=PoolName(pool), running=count, waiting=0, kv_used=0.0)
        for pool, count in running.items()
    )
    return DemandWindow(began=Nanos(0), ended=Nanos(SECOND), queued=queued, stale=stale, workers=workers)


@pytest.mark.parametrize(("running", "queued", "wanted"), [(0, 0, 1), (4, 0, 1), (5, 0, 2), (5, 4, 3), (90, 0, 5)])
def test_pool_gets_a_replica_for_each_share_of_requests(running, queued, wanted):
    decision = a_rule().decide(Nanos(0), a_window(queued, decode=running), seen(decode=1))

    assert decision.replicas == {DECODE: wanted}


def test_shrink_waits_for_the_cool_down():
    rule = a_rule()
    rule.decide(Nanos(0), a_window(decode=12), seen(decode=1))

    early = rule.decide(Nanos(59 * SECOND), a_window(), seen(decode=3))
    late = rule.decide(Nanos(61 * SECOND), a_window(), seen(decode=3))

    assert (early.replicas, early.reason) == ({DECODE: 3}, DecisionReason.WITHIN_BAND)
    assert (late.replicas, late.reason) == ({DECODE: 1}, DecisionReason.LOAD_DOWN)


def test_restarted_rule_shrinks_nothing_for_a_cool_down():
    rule = a_rule()

    first, early, late = (
        rule.decide(Nanos(at * SECOND), a_window(), seen(decode=4)).replicas[DECODE] for at in (0, 59, 61)
    )

    assert (first, early, late) == (4, 4, 1)


def test_stale_demand_holds_and_names_the_source():
    decision = a_rule().decide(Nanos(0), a_window(decode=50, stale=("http://a/metrics: silent",)), seen(decode=2))

    assert (decision.replicas, decision.reason) == ({DECODE: 2}, DecisionReason.NO_SIGNAL)
    assert [(each.type, each.field, each.message) for each in decision.conditions] == [
        (PlanConditionType.NO_DEMAND_SIGNAL, "http://a/metrics", "no demand from http://a/metrics: silent")
    ]


def test_model_that_no_router_serves_holds_ready_replicas():
    rule, unserved = a_rule(), structs.replace(a_window(), unserved="no router serves tinny; they serve tiny")

    decisions = [rule.decide(Nanos(at * SECOND), unserved, seen(decode=2)) for at in (0, 90)]

    assert [(each.replicas, each.conditions[0].field) for each in decisions] == [({DECODE: 2}, "model")] * 2


def test_missing_pool_holds_and_is_named():
    decision = a_rule(a_pool(), a_pool(PREFILL, Role.PREFILL)).decide(Nanos(0), a_window(decode=50), seen(decode=2))

    assert decision.replicas == {DECODE: 2}
    (condition,) = decision.conditions
    assert (condition.type, condition.field) == (PlanConditionType.CONNECTOR_FAILED, "pools.prefill")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"oldest_seconds": math.nan}, "demand.oldest_seconds"),
        ({"queued": -1}, "demand.queued"),
        ({"overflow_dollars": math.inf}, "demand.overflow_dollars"),
        ({"ttft": (3, -1)}, "demand.ttft"),
        ({"ended": Nanos(-1)}, "demand.ended"),
    ],
)
def test_impossible_demand_holds_and_names_its_field(fields, field):
    decision = a_rule().decide(Nanos(0), structs.replace(a_window(decode=90), **fields), seen(decode=2))

    assert (decision.replicas, decision.reason) == ({DECODE: 2}, DecisionReason.NO_SIGNAL)
    assert [(each.type, each.field) for each in decision.conditions] == [(PlanConditionType.NO_DEMAND_SIGNAL, field)]


def test_worker_with_impossible_load_holds_and_is_named():
    decision = a_rule().decide(Nanos(0), a_window(decode=-4), seen(decode=2))

    assert (decision.replicas, decision.reason) == ({DECODE: 2}, DecisionReason.NO_SIGNAL)
    assert decision.conditions[0].field == "demand.workers.decode-0.running"


def test_clock_that_went_back_holds_once():
    rule = a_rule()
    rule.decide(Nanos(100 * SECOND), a_window(decode=4), seen(decode=2))

    back = rule.decide(Nanos(50 * SECOND), a_window(decode=90), seen(decode=2))
    after = rule.decide(Nanos(51 * SECOND), a_window(decode=90), seen(decode=2))

    assert (back.replicas, back.reason) == ({DECODE: 2}, DecisionReason.NO_SIGNAL)
    assert back.conditions[0].field == "now"
    assert after.replicas == {DECODE: 5}


def test_pool_with_negative_replicas_holds_and_is_named():
    lie = Observation((PoolObservation(name=DECODE, wanted=2, ready=-3),))

    decision = a_rule().decide(Nanos(0), a_window(decode=90), lie)

    assert decision.replicas == {DECODE: 2}
    assert [(each.type, each.field) for each in decision.conditions] == [
        (PlanConditionType.CONNECTOR_FAILED, "pools.decode")
    ]


def test_budget_limits_growth_and_is_named():
    pools = (a_pool(gpu="h100", gpus=2), a_pool(PREFILL, Role.PREFILL, gpu="h100"))
    rule = a_rule(*pools, budget=PlanBudget(gpus=6))

    decision = rule.decide(Nanos(0), a_window(decode=16, prefill=16), seen(decode=1, prefill=1))

    assert decision.replicas == {DECODE: 2, PREFILL: 2}
    assert {each.field for each in decision.conditions} == {"budget.gpus"}


def test_budget_that_equals_the_price_of_the_replicas_suffices():
    """In floating point, the sum of three prices is more than 7.47."""
    rule = a_rule(a_pool(gpu="h100", dollars_per_hour=2.49), budget=PlanBudget(dollars_per_hour=7.47))

    decision = rule.decide(Nanos(0), a_window(decode=12), seen(decode=1))

    assert (decision.replicas, decision.conditions) == ({DECODE: 3}, ())


def test_draining_replicas_count_for_the_budget():
    rule = a_rule(a_pool(gpu="h100"), budget=PlanBudget(gpus=4))
    draining = Observation((PoolObservation(name=DECODE, wanted=1, ready=1, draining=2),))

    assert rule.decide(Nanos(0), a_window(decode=16), draining).replicas == {DECODE: 2}


def test_pinned_pool_keeps_its_number():
    pinned = Observation((PoolObservation(name=DECODE, wanted=2, ready=2, pinned="a person did"),))

    assert a_rule().decide(Nanos(0), a_window(decode=50), pinned).replicas == {DECODE: 2}


def test_budget_reserves_the_replicas_of_pinned_pools_first():
    pools = (a_pool(gpu="h100"), a_pool(PREFILL, Role.PREFILL, gpu="h100"))
    pinned = PoolObservation(name=PREFILL, wanted=3, ready=3, pinned="a person did")
    observed = Observation((PoolObservation(name=DECODE, wanted=1, ready=1), pinned))

    decision = a_rule(*pools, budget=PlanBudget(gpus=5)).decide(Nanos(0), a_window(decode=16, prefill=4), observed)

    assert decision.replicas == {DECODE: 2, PREFILL: 3}


@pytest.mark.parametrize("budget", [PlanBudget(gpus=6), PlanBudget(dollars_per_hour=12.0)])
def test_growth_waits_until_replicas_of_another_pool_drained(budget):
    pools = (
        a_pool(gpu="h100", dollars_per_hour=2.0),
        a_pool(PREFILL, Role.PREFILL, gpu="h100", dollars_per_hour=2.0),
    )
    rule, load = a_rule(*pools, budget=budget), a_window(decode=16, prefill=16)
    draining = PoolObservation(name=PREFILL, wanted=2, ready=2, draining=3)

    before = rule.decide(Nanos(0), load, seen(decode=1, prefill=5))
    meanwhile = rule.decide(
        Nanos(SECOND), load, Observation((PoolObservation(name=DECODE, wanted=1, ready=1), draining))
    )
    after = rule.decide(Nanos(2 * SECOND), load, seen(decode=1, prefill=2))

    assert before.replicas == {DECODE: 1, PREFILL: 2}
    assert meanwhile.replicas == {DECODE: 1, PREFILL: 2}
    assert meanwhile.message == "the budget has no room for the replicas that are needed"
    assert after.replicas == {DECODE: 4, PREFILL: 2}
    assert [each.type for each in before.conditions] == [PlanConditionType.BUDGET_EXHAUSTED] * 2
