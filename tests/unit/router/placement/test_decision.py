"""Costs and decisions, compared with the rules of `fleet.router.placement.decision`."""

import itertools
import random
from collections import Counter

import pytest
from msgspec import structs

from fleet.core.errors import Reason
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import KvPath, Placement, Role
from fleet.router.placement.candidate_table import IneligibleReason, common_path
from fleet.router.placement.decision import DecisionExplanation, PlacementReason
from fleet.router.placement.wait_or_reject import Rejection, WaitForRoom
from fleet.router.policy import PlacementRequest
from fleet.router.settings.router import RouterSettings
from tests.support.builders import BLOCK_TOKENS, a_description
from tests.support.router.candidate_tables import CandidateRow, a_candidate, decide, score

# With these weights, costs are whole numbers.
SETTINGS = RouterSettings(
    remote_prefill_min_tokens=512,
    oversubscribe=1.0,
    policies={"fleet": {"decode_weight": 1.0, "others_weight": 0.0, "stall_weight": 0.0}},
)
BOTH_PATHS = (KvPath.STORE, KvPath.DIRECT)


def placed(
    demand: PlacementRequest, *rows: CandidateRow, settings: RouterSettings = SETTINGS, seed: int = 0
) -> DecisionExplanation:
    outcome = decide(demand, rows, settings, random.Random(seed))
    assert isinstance(outcome, DecisionExplanation), outcome
    return outcome


def refused(demand: PlacementRequest, *rows: CandidateRow) -> Rejection:
    outcome = decide(demand, rows, SETTINGS, random.Random(0))
    assert isinstance(outcome, Rejection), outcome
    return outcome


# Costs.


@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({}, 10 + 10),
        ({"backlog_tokens": 64}, 12 + 10),
        ({"engine_blocks": 4, "new_blocks": 6}, 6 + 6),
        ({"store_blocks": 4}, 10 - 0.75 * 4 + 10),
        ({"engine_blocks": 2, "store_blocks": 4}, 10 - 2 - 3 + 10),
        ({"engine_blocks": 2, "store_blocks": 4, "below_blocks": 3}, 10 - 2 - 3 - 1.5 + 10),
        ({"active_blocks": 7, "new_blocks": 3}, 10 + 10),
        ({"requests": 5}, 10 + 10 + 5),
        ({"backlog_tokens": 16, "requests": 1, "active_blocks": 100}, 10.5 + 110 + 1),
    ],
)
def test_cost_is_counted_in_blocks(fields, cost):
    terms = score(a_candidate(prompt_tokens=320, **fields), 320, SETTINGS)

    assert terms.cost == pytest.approx(cost, abs=1e-9)


def test_slower_tier_hit_ranks_between_hot_and_cold():
    cold, on_disk, in_memory, hot = (
        a_candidate(name, prompt_tokens=320, **{tier: 8} if tier else {})
        for name, tier in (("cold", ""), ("disk", "below_blocks"), ("memory", "store_blocks"), ("hot", "engine_blocks"))
    )

    for worse, better in itertools.pairwise((cold, on_disk, in_memory, hot)):
        assert placed(PlacementRequest(prompt_tokens=320), worse, better).decode == better.worker_id


def test_credit_above_one_never_makes_cost_negative():
    generous = structs.replace(SETTINGS, engine_hit_credit=3.0)
    hot = a_candidate(prompt_tokens=320, engine_blocks=10, backlog_tokens=320, new_blocks=0)

    assert score(hot, 320, generous).cost == 0
    assert score(structs.replace(hot, backlog_tokens=3200), 320, generous).cost == 110 - 30


def test_cost_terms_add_up_to_the_cost():
    terms = score(a_candidate(engine_blocks=1, store_blocks=1, requests=2, backlog_tokens=50), 100, SETTINGS)

    assert terms.parts == {"prefill": (50 + 100) / 32, "credit": -1.75, "others": 0.0, "decode": 4.0, "requests": 2.0}
    assert sum(terms.parts.values()) == terms.cost


def test_engine_hit_beats_store_hit_beats_none():
    demand = PlacementRequest(prompt_tokens=320)
    engine = a_candidate("engine", prompt_tokens=320, engine_blocks=8)
    store = a_candidate("store", prompt_tokens=320, store_blocks=8)
    cold = a_candidate("cold", prompt_tokens=320)

    assert placed(demand, cold, store, engine).decode == "engine"
    assert placed(demand, cold, store).decode == "store"


def test_equal_workers_get_equal_shares():
    """Place 10,000 requests on four equal workers: each gets a quarter of them, up to five per cent more or less."""
    rows = [a_candidate(f"d{number}") for number in range(4)]
    rng = random.Random(4)

    choices = Counter(decide(PlacementRequest(prompt_tokens=100), rows, SETTINGS, rng).decode for _ in range(10_000))

    assert set(choices) == {f"d{number}" for number in range(4)}
    assert all(abs(count - 2500) <= 125 for count in choices.values()), choices


# Candidates.


def test_ineligible_workers_are_skipped_with_a_reason():
    rows = [
        a_candidate("draining", draining=True),
        a_candidate("failed", failed=True),
        a_candidate("full", requests=16, max_running=16),
        a_candidate("short", max_model_len=100),
        a_candidate("small", kv_blocks=3),
        a_candidate("good", requests=15, max_running=16),
    ]

    decision = placed(PlacementRequest(prompt_tokens=100), *rows)

    assert decision.decode == "good"
    assert dict(decision.unfit) == {
        "draining": IneligibleReason.DRAINING,
        "failed": IneligibleReason.FAILED_BEFORE,
        "full": IneligibleReason.AT_LIMIT,
        "short": IneligibleReason.TOO_SMALL,
        "small": IneligibleReason.TOO_SMALL,
    }


def test_prefill_worker_gets_no_aggregated_request():
    decision = placed(
        PlacementRequest(prompt_tokens=100), a_candidate("p", Role.PREFILL), a_candidate("d", requests=10)
    )

    assert (decision.decode, decision.prefill) == ("d", None)


@pytest.mark.parametrize(
    ("rows", "reason", "field"),
    [
        ([], Reason.NO_WORKER, ""),
        ([a_candidate("p", Role.PREFILL)], Reason.NO_WORKER, ""),
        ([a_candidate("d", draining=True)], Reason.NO_WORKER, ""),
        ([a_candidate("d", failed=True)], Reason.WORKER_LOST, ""),
        ([a_candidate("d", max_model_len=50)], Reason.TOO_LARGE, "prompt"),
    ],
)
def test_each_missing_candidate_has_its_own_rejection(rows, reason, field):
    refusal = refused(PlacementRequest(prompt_tokens=100), *rows)

    assert (refusal.reason, refusal.field) == (reason, field)


def test_request_waits_when_all_able_workers_are_full():
    full = a_candidate("full", requests=16)
    small = a_candidate("small", max_model_len=50)

    waits = decide(PlacementRequest(prompt_tokens=100), [full, small], SETTINGS, random.Random(0))

    assert waits == WaitForRoom(frozenset({WorkerId("full")}))


# The aggregated-or-disaggregated rule.


@pytest.mark.parametrize(
    ("prompt", "hit_blocks", "hit", "prefill_load"),
    list(itertools.product((100, 511, 512, 513, 1000, 4000), (0, 1, 15, 16, 31), ("engine", "store"), (0, 15, 16))),
)
def test_split_decision_equals_the_stated_rule(prompt, hit_blocks, hit, prefill_load):
    hit_blocks = min(hit_blocks, prompt // BLOCK_TOKENS)
    decode = a_candidate("d", prompt_tokens=prompt, max_model_len=8192, **{f"{hit}_blocks": hit_blocks})
    prefill = a_candidate("p", Role.PREFILL, prompt_tokens=prompt, max_model_len=8192, requests=prefill_load)
    uncached = max(1, prompt - hit_blocks * BLOCK_TOKENS)

    decision = placed(PlacementRequest(prompt_tokens=prompt), decode, prefill)

    assert decision.uncached_tokens == uncached
    if uncached < 512:
        assert (decision.prefill, decision.why) == (None, PlacementReason.SHORT_UNCACHED_PROMPT)
    elif prefill_load >= 16:
        assert (decision.prefill, decision.why) == (None, PlacementReason.PREFILL_WORKERS_BUSY)
    else:
        assert (decision.prefill, decision.kv_path, decision.why) == (
            "p",
            KvPath.STORE,
            PlacementReason.PROMPT_LONG_UNCACHED,
        )


LONG = PlacementRequest(prompt_tokens=1000)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ([], PlacementReason.NO_PREFILL_WORKER),
        ([a_candidate("d2", requests=9)], PlacementReason.NO_PREFILL_WORKER),
        ([a_candidate("p", Role.PREFILL, draining=True)], PlacementReason.NO_PREFILL_WORKER),
        ([a_candidate("p", Role.PREFILL, failed=True)], PlacementReason.PREFILL_LOST),
        ([a_candidate("p", Role.PREFILL, fingerprint="other")], PlacementReason.NO_COMPATIBLE_PAIR),
        ([a_candidate("p", Role.PREFILL, store_id=StoreId("another"))], PlacementReason.NO_COMPATIBLE_PAIR),
        ([a_candidate("p", Role.PREFILL, kv_paths=(KvPath.DIRECT,))], PlacementReason.NO_COMPATIBLE_PAIR),
        ([a_candidate("p", Role.PREFILL, requests=16)], PlacementReason.PREFILL_WORKERS_BUSY),
        ([a_candidate("p", Role.PREFILL)], PlacementReason.PROMPT_LONG_UNCACHED),
        ([a_candidate("b", Role.BOTH, prompt_tokens=1000, requests=9)], PlacementReason.PROMPT_LONG_UNCACHED),
    ],
)
def test_long_prompt_goes_to_a_pair_unless_forbidden(others, why):
    decision = placed(LONG, a_candidate("d", prompt_tokens=1000), *others)

    assert decision.why is why
    assert (decision.prefill is not None) == (why is PlacementReason.PROMPT_LONG_UNCACHED)


def test_both_role_workers_pair_only_on_demand():
    rows = [a_candidate("b1", Role.BOTH), a_candidate("b2", Role.BOTH, requests=5)]

    assert placed(LONG, *rows).why is PlacementReason.NO_PREFILL_WORKER
    demand = placed(structs.replace(LONG, placement=Placement.DISAGGREGATED), *rows)
    assert (demand.decode, demand.prefill) == ("b1", "b2")


def test_prefill_worker_with_least_work_is_chosen():
    decode = a_candidate("d", prompt_tokens=1000)
    busy = a_candidate("busy", Role.PREFILL, backlog_tokens=3000)
    warm = a_candidate("warm", Role.PREFILL, backlog_tokens=500, engine_blocks=20)
    cold = a_candidate("cold", Role.PREFILL)

    decision = placed(LONG, decode, busy, warm, cold)

    assert decision.prefill == "warm"
    assert decision.prefill_tokens == 1000 - 20 * BLOCK_TOKENS
    assert [terms.worker_id for terms in decision.prefill_candidates] == ["busy", "warm", "cold"]


# Demands of clients.


def test_client_demand_decides_and_is_the_reason():
    short = PlacementRequest(prompt_tokens=10, placement=Placement.DISAGGREGATED)
    rows = (a_candidate("d"), a_candidate("p", Role.PREFILL))

    pair = placed(short, *rows)
    alone = placed(structs.replace(LONG, placement=Placement.AGGREGATED), *rows)

    assert (pair.prefill, pair.why) == ("p", PlacementReason.ASKED_BY_CLIENT)
    assert (alone.prefill, alone.why) == (None, PlacementReason.ASKED_BY_CLIENT)


@pytest.mark.parametrize(
    ("rows", "demand", "reason", "field"),
    [
        (
            [a_candidate("d")],
            PlacementRequest(prompt_tokens=10, placement=Placement.DISAGGREGATED),
            Reason.NO_WORKER,
            "placement",
        ),
        (
            [a_candidate("d"), a_candidate("p", Role.PREFILL, fingerprint="other")],
            PlacementRequest(prompt_tokens=10, placement=Placement.DISAGGREGATED),
            Reason.KV_MISMATCH,
            "placement",
        ),
        (
            [a_candidate("d"), a_candidate("p", Role.PREFILL)],
            PlacementRequest(prompt_tokens=10, placement=Placement.DISAGGREGATED, kv_path=KvPath.DIRECT),
            Reason.KV_MISMATCH,
            "kv_path",
        ),
        (
            [a_candidate("d"), a_candidate("p", Role.PREFILL)],
            PlacementRequest(prompt_tokens=1000, kv_path=KvPath.DIRECT),
            Reason.KV_MISMATCH,
            "kv_path",
        ),
    ],
)
def test_impossible_demand_is_rejected_with_its_field(rows, demand, reason, field):
    refusal = refused(demand, *rows)

    assert (refusal.reason, refusal.field) == (reason, field)


def test_demanded_pair_waits_for_busy_prefill_workers():
    demand = PlacementRequest(prompt_tokens=10, placement=Placement.DISAGGREGATED)
    rows = [a_candidate("d"), a_candidate("p", Role.PREFILL, requests=16)]

    assert decide(demand, rows, SETTINGS, random.Random(0)) == WaitForRoom()


def test_demanded_pair_skips_workers_without_partner():
    demand = PlacementRequest(prompt_tokens=10, placement=Placement.DISAGGREGATED)
    lonely = a_candidate("lonely", fingerprint="other")
    paired = a_candidate("paired", requests=9)

    decision = placed(demand, lonely, paired, a_candidate("p", Role.PREFILL))

    assert decision.decode == "paired"
    assert dict(decision.unfit) == {WorkerId("lonely"): IneligibleReason.NO_PAIR}


# KV paths.


@pytest.mark.parametrize(
    ("prefer_direct", "demand", "prefill_paths", "decode_paths", "path"),
    [
        (False, None, BOTH_PATHS, BOTH_PATHS, KvPath.STORE),
        (True, None, BOTH_PATHS, BOTH_PATHS, KvPath.DIRECT),
        (True, None, (KvPath.STORE,), BOTH_PATHS, KvPath.STORE),
        (False, None, (KvPath.DIRECT,), BOTH_PATHS, KvPath.DIRECT),
        (False, KvPath.DIRECT, BOTH_PATHS, BOTH_PATHS, KvPath.DIRECT),
        (True, KvPath.STORE, BOTH_PATHS, BOTH_PATHS, KvPath.STORE),
        (False, KvPath.DIRECT, (KvPath.STORE,), BOTH_PATHS, None),
        (False, None, (KvPath.STORE,), (KvPath.DIRECT,), None),
        (False, None, (), (), None),
    ],
)
def test_pair_uses_the_preferred_common_kv_path(prefer_direct, demand, prefill_paths, decode_paths, path):
    settings = RouterSettings(prefer_direct=prefer_direct)
    prefill = a_description(kv_paths=prefill_paths)
    decode = a_description(kv_paths=decode_paths)

    assert common_path(prefill, decode, demand, settings) is path


def test_workers_of_two_generations_do_not_pair():
    old = structs.replace(a_description(kv_paths=BOTH_PATHS), generation="old")
    new = structs.replace(old, generation="new")

    assert common_path(old, old, None, RouterSettings()) is not None
    assert common_path(old, new, None, RouterSettings()) is None


def test_workers_without_a_store_have_no_store_path():
    lone = a_description(store_id=None)

    assert common_path(lone, lone, None, SETTINGS) is None


def test_different_fingerprints_never_pair():
    prefill = a_description(fingerprint="a", kv_paths=BOTH_PATHS)

    assert common_path(prefill, a_description(fingerprint="b", kv_paths=BOTH_PATHS), None, SETTINGS) is None
