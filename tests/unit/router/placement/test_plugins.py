"""Policy plug-ins: found by name, and replaced by the default policy when they fail."""

import random
import threading
import time
from importlib.metadata import EntryPoint, EntryPoints

import numpy as np
import pytest
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import RequestId
from fleet.core.roles import Phase, Role
from fleet.router.machine import RouterMachine
from fleet.router.placement import plugins as router_policies
from fleet.router.placement.plugins import GuardedPolicy, open_policy, policy_catalogue
from fleet.router.placement.policies.built_in import BUILT_IN, policy
from fleet.router.placement.policies.pipeline import Pipeline
from fleet.router.policy import PlacementRequest
from fleet.router.settings.router import RouterSettings
from tests.support.builders import a_joined_worker, an_arrival
from tests.support.router.candidate_tables import a_candidate, candidates_of
from tests.support.router.machine_driver import START, Dispatch, the

ASKED = PlacementRequest(prompt_tokens=100)


class Last(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scorer that prefers the worker that joined last, by a bonus."""

    bonus: float = 1.0

    def costs(self, request, candidates, phase, /):
        return -self.bonus * np.arange(len(candidates), dtype=np.float64)


class LastPolicy(Last, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def policy(self):
        return Pipeline("last", scorers=[("last", 1.0, self)])


NO_STRUCT = object()


def found(monkeypatch, **values: str) -> None:
    """Pretend that a package with these entry points is installed."""
    points = EntryPoints(
        EntryPoint(name=name, value=value, group=f"fleet.{group}")
        for group in ("policies", "scorers")
        for name, value in values.items()
        if value.endswith("Policy") == (group == "policies") or value.endswith(("NO_STRUCT", "missing"))
    )
    monkeypatch.setattr(router_policies, "entry_points", lambda group: points.select(group=group))


class Misbehaving:
    """A policy whose behaviour the test sets."""

    name = "misbehaving"

    def __init__(self, act, itemise=None):
        self.act = act
        self.itemise = itemise or raising

    def choose(self, request, candidates, phase, rng, /):
        return self.act(candidates), self

    def costs(self, request, candidates, phase, /):
        return self.itemise(candidates)


def raising(candidates):
    raise RuntimeError("a bug")


class BrokenPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plug-in whose policy always fails."""

    def policy(self):
        return Misbehaving(raising)


def greedy(candidates):
    candidates.columns[:] = 1e9
    return 1


STANDINGS = [a_candidate("d1"), a_candidate("d2", requests=3)]


def guarded(act, budget_seconds: float = 1.0, itemise=None) -> GuardedPolicy:
    return GuardedPolicy(Misbehaving(act, itemise), policy("fleet", {}), budget_seconds)


def choose(chosen: GuardedPolicy) -> str:
    candidates = candidates_of(STANDINGS, RouterSettings())
    place, _ = chosen.choose(ASKED, candidates, Phase.AGGREGATED, random.Random(0))
    return candidates.worker_ids[place]


def test_built_in_policies_need_no_entry_point(monkeypatch):
    found(monkeypatch)

    assert policy_catalogue().policies == BUILT_IN.policies


def test_installed_policy_is_used_and_explained(monkeypatch):
    found(monkeypatch, last=f"{__name__}:LastPolicy")
    settings = RouterSettings(policy="last", policies={"last": {"bonus": 2.0}}, policy_budget_ms=5000)
    machine = RouterMachine(settings, random.Random(0), open_policy(settings))
    for name in ("d1", "d2", "d3"):
        machine.handle(a_joined_worker(name, Role.BOTH), START)

    assert the(Dispatch, machine.handle(an_arrival(), START)).worker_id == "d3"
    (placed,) = machine.explain(RequestId("r1")).placements
    assert (placed.policy, [terms.cost for terms in placed.candidates]) == ("last", [0, -2, -4])
    assert machine.snapshot().counters.policy_fallbacks == 0


def test_installed_scorer_can_be_composed(monkeypatch):
    found(monkeypatch, last=f"{__name__}:Last")
    parts = {"scorers": [{"name": "last", "weight": 3.0, "parameters": {"bonus": 2.0}}, {"name": "requests"}]}
    settings = RouterSettings(policy="composed", policies={"composed": parts}, policy_budget_ms=5000)

    chosen = open_policy(settings)

    assert isinstance(chosen, GuardedPolicy)
    assert choose(chosen) == "d2"


def test_built_in_policies_are_not_guarded(monkeypatch):
    found(monkeypatch)
    composed = {"composed": {"scorers": [{"name": "prefix"}]}}

    assert not isinstance(open_policy(RouterSettings()), GuardedPolicy)
    assert not isinstance(open_policy(RouterSettings(policy="composed", policies=composed)), GuardedPolicy)


def test_built_in_name_keeps_its_meaning(monkeypatch):
    found(monkeypatch, dynamo=f"{__name__}:LastPolicy")

    assert policy_catalogue().policies["dynamo"] is BUILT_IN.policies["dynamo"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "d1"),
        ({"engine_hit_credit": 0.0}, "d2"),
        ({"policies": {"fleet": {"running_request_blocks": 100.0}}}, "d2"),
    ],
    ids=["cached blocks decide", "cached blocks do not count", "running requests cost much"],
)
def test_fallback_decides_by_the_operators_parameters(monkeypatch, fields, expected):
    found(monkeypatch, broken=f"{__name__}:BrokenPolicy")
    settings = RouterSettings(policy="broken", policy_budget_ms=5000, **fields)
    candidates = candidates_of([a_candidate("d1", engine_blocks=5, requests=1), a_candidate("d2")], settings)

    place, _ = open_policy(settings).choose(ASKED, candidates, Phase.AGGREGATED, random.Random(0))

    assert candidates.worker_ids[place] == expected


def test_invalid_parameters_of_the_fallback_are_refused(monkeypatch):
    found(monkeypatch, broken=f"{__name__}:BrokenPolicy")

    with pytest.raises(ConfigurationRefused, match=r"router\.policies\.fleet: .*magic"):
        open_policy(RouterSettings(policy="broken", policies={"fleet": {"magic": 1}}))


@pytest.mark.parametrize("value", [f"{__name__}:NO_STRUCT", f"{__name__}:missing"])
def test_invalid_entry_point_is_refused_by_name(monkeypatch, value):
    found(monkeypatch, bad=value)

    with pytest.raises(ConfigurationRefused, match=r"entry point bad of fleet\.policies"):
        open_policy(RouterSettings())


@pytest.mark.parametrize(
    ("act", "cause"),
    [(raising, "raised"), (lambda _: 2, "nobody"), (lambda _: -1, "nobody"), (lambda _: "d1", "nobody")],
)
def test_failing_policy_is_replaced_and_counted(act, cause):
    chosen = guarded(act)

    assert [choose(chosen) for _ in range(3)] == ["d1"] * 3
    assert chosen.fallbacks == {cause: 3}


def test_hanging_policy_costs_its_budget_once():
    release = threading.Event()
    hangs = guarded(lambda _: release.wait() and 1, budget_seconds=0.02)

    assert [choose(hangs) for _ in range(50)] == ["d1"] * 50
    # The router waits for the hanging policy only once, not fifty times.
    assert hangs.fallbacks == {"late": 1, "busy": 49}

    release.set()
    deadline = time.monotonic() + 60
    while choose(hangs) != "d2":
        assert time.monotonic() < deadline


def test_policy_gets_copies_of_the_data():
    candidates = candidates_of(STANDINGS, RouterSettings())
    before = candidates.columns.copy()

    guarded(greedy).choose(ASKED, candidates, Phase.AGGREGATED, random.Random(0))

    assert (candidates.columns == before).all()


def test_machine_counts_fallback_decisions():
    machine = RouterMachine(RouterSettings(), random.Random(0), guarded(raising))
    machine.handle(a_joined_worker("d1", Role.BOTH), START)

    machine.handle(an_arrival(), START)

    (placed,) = machine.explain(RequestId("r1")).placements
    assert placed.policy == "fleet"
    assert machine.snapshot().counters.policy_fallbacks == 1


@pytest.mark.parametrize(
    "itemise",
    [
        raising,
        lambda _: {"short": np.zeros(0)},
        lambda _: {"scalar": 1.0},
        lambda _: {"nan": np.array([np.nan])},
        lambda _: {"words": ["cheap"]},
        lambda _: 7,
    ],
    ids=["raises", "too few", "no array", "no number", "words", "nothing to name"],
)
def test_missing_cost_terms_leave_the_explanation(itemise):
    machine = RouterMachine(RouterSettings(), random.Random(0), guarded(lambda _: 0, itemise=itemise))
    machine.handle(a_joined_worker("d1", Role.BOTH), START)
    machine.handle(an_arrival(), START)

    (placed,) = machine.explain(RequestId("r1")).placements

    assert (placed.policy, placed.decode, placed.candidates[0].parts) == ("misbehaving", "d1", {})


def test_late_cost_terms_delay_by_the_budget_only():
    """Explain decisions with a policy whose cost terms never come: each explanation waits only for the time budget."""
    release = threading.Event()
    machine = RouterMachine(
        RouterSettings(), random.Random(0), guarded(lambda _: 0, 0.02, itemise=lambda _: release.wait() and {})
    )
    machine.handle(a_joined_worker("d1", Role.BOTH), START)
    machine.handle(an_arrival(), START)

    for _ in range(20):
        machine.explain(RequestId("r1"))  # without the budget, this would wait for ever
    release.set()


def test_numpy_index_names_a_candidate():
    chosen = guarded(lambda candidates: np.argmax(candidates.columns[0] * 0 + np.arange(len(candidates))))

    assert choose(chosen) == "d2"
    assert not chosen.fallbacks


def test_non_finite_costs_are_replaced_and_counted():
    class Nowhere(Struct, frozen=True):
        def costs(self, request, candidates, phase, /):
            return np.full(len(candidates), np.nan)

    chosen = GuardedPolicy(Pipeline("nowhere", scorers=[("nowhere", 1.0, Nowhere())]), policy("fleet", {}), 1.0)

    assert choose(chosen) == "d1"
    assert chosen.fallbacks == {"raised": 1}
