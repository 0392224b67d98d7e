"""Tests of the status of a ServingPlan."""

from msgspec import structs

from fleet.planner.decisions import DecisionReason, PlanCondition, PlanConditionType
from fleet.planner.messages import PlanId, PoolGapReason, PoolName, PoolObservation
from fleet.planner.records import PlannerStatus, PlanRecord, PlanState
from fleet.planner.settings import PlannerMode
from operators.api.disagg_deployment import ScalingMode
from operators.planner.status import is_news, obeyed_status, refused_status
from operators.planner.translation import PlanNotObeyed

MODES = {"prefill": ScalingMode.STATIC, "decode": ScalingMode.PLANNER}
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def a_pool(name, wanted, ready=None, **fields):
    return PoolObservation(name=PoolName(name), wanted=wanted, ready=wanted if ready is None else ready, **fields)


def seen(**fields):
    state = {
        "planner": "planner-0",
        "model": "llama",
        "mode": PlannerMode.ACTIVE,
        "leads": True,
        "rule": "fleet",
        "at_ms": 1,
        "reason": DecisionReason.WITHIN_BAND,
        "replicas": {PoolName("prefill"): 1, PoolName("decode"): 2},
        "pools": (a_pool("prefill", 1, pinned="scaling.mode is Static"), a_pool("decode", 2)),
    }
    return PlannerStatus(**state | fields)


def said(status):
    return {each.type: (each.status, each.reason) for each in status.conditions}


def told(state, before=()):
    return obeyed_status(state, MODES, before, 3, NOW)


def a_condition(kind, message="so it is", field="it"):
    return PlanCondition(type=kind, field=field, message=message)


def a_record(state):
    return PlanRecord(
        id=PlanId("plan-1"),
        at_ms=1,
        planner="planner-0",
        mode=PlannerMode.ACTIVE,
        state=state,
        reason=DecisionReason.LOAD_UP,
        message="",
        before={PoolName("decode"): 1},
        replicas={PoolName("decode"): 2},
    )


def test_settled_plan_has_every_condition_at_its_generation():
    status = told(seen(demand={"ttft_seconds": 0.25, "tpot_seconds": None}))

    assert said(status)["Settled"] == ("True", "Settled")
    assert {each.observed_generation for each in status.conditions} == {3} == {status.observed_generation}
    others = {str(kind): ("False", "Clear") for kind in PlanConditionType}
    assert said(status) == others | {"Settled": ("True", "Settled"), "TargetFound": ("True", "Found")}
    assert [(each.role, each.replicas) for each in status.recommendations] == [("decode", 2)]
    assert (status.ttft_ms, status.tpot_ms) == (250, 0)


def test_only_planned_roles_are_pinned():
    assert said(told(seen()))["Pinned"] == ("False", "Clear")
    unmade = seen(pools=(a_pool("decode", 2, pinned="the operator has not made its RoleScaler yet"),))
    assert said(told(unmade))["Pinned"] == ("False", "Clear")
    pinned = seen(pools=(a_pool("prefill", 1), a_pool("decode", 2, pinned="pinned: kubectl has set it to 2")))

    [condition] = [each for each in told(pinned).conditions if each.type == "Pinned"]
    assert (condition.status, condition.message) == ("True", "decode: kubectl has set it to 2")


def test_pin_is_reported_without_a_demand_signal():
    silent = seen(
        reason=DecisionReason.NO_SIGNAL,
        conditions=(a_condition(PlanConditionType.NO_DEMAND_SIGNAL, "router-0: has not reported for 7 s"),),
        pools=(a_pool("decode", 2, pinned="pinned: hpa has set it to 2"),),
    )
    status = told(silent)

    assert said(status)["NoDemandSignal"] == ("True", "NoDemandSignal")
    assert said(status)["Pinned"][0] == "True"
    for kind in ("GoalOutOfReach", "BudgetExhausted", "ModelDrift"):
        assert said(status)[kind] == ("Unknown", "NoDemandSignal"), "nothing is decided, so nobody knows"


def test_settled_says_what_is_missing():
    cases = {
        "Off": seen(mode=PlannerMode.OFF),
        "NoDecision": seen(reason=None, replicas={}, pools=()),
        "PlanUnderWay": seen(plans=(a_record(PlanState.UNDER_WAY),)),
        "Shadow": seen(mode=PlannerMode.SHADOW, replicas={PoolName("decode"): 3}),
        "NotApplied": seen(replicas={PoolName("decode"): 3}),
        "ReplicasNotReady": seen(pools=(a_pool("decode", 2, 1, why=PoolGapReason.UNDER_WAY),)),
    }
    for reason, state in cases.items():
        status, found = said(told(state))["Settled"]
        assert (found, status != "True") == (reason, True)


def test_condition_keeps_its_time_while_its_status_is_the_same():
    before = told(seen()).conditions
    after = obeyed_status(seen(mode=PlannerMode.OFF), MODES, before, 4, LATER).conditions
    times = {each.type: each.last_transition_time for each in after}

    assert (times["TargetFound"], times["Settled"]) == (NOW, LATER)


def test_numbers_in_texts_are_no_news():
    def silent(message):
        return told(seen(conditions=(a_condition(PlanConditionType.NO_DEMAND_SIGNAL, message),)))

    first = silent("router-0: has not reported for 7 s")
    assert not is_news(first, silent("router-0: has not reported for 12.5 s"))
    assert is_news(first, silent("router-0: has not reported for 7 s (UNAVAILABLE)"))
    assert is_news(first, told(seen()))
    assert is_news(first, structs.replace(first, observed_generation=4))
    assert is_news(None, first)


def test_refused_plan_says_why():
    missing = refused_status(PlanNotObeyed("NoTarget", "there is none", target_found=False), (), 1, "planner-0", NOW)
    wrong = refused_status(PlanNotObeyed("SpecificationRefused", "spec.roles: …"), (), 1, "planner-0", NOW)

    assert said(missing) == {"TargetFound": ("False", "NoTarget"), "Settled": ("False", "NoTarget")}
    assert said(wrong) == {"TargetFound": ("True", "Found"), "Settled": ("False", "SpecificationRefused")}
