"""Built-in policies: their published formulas, and the choices that follow from them."""

import heapq
import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Phase, Role
from fleet.core.work import KvStored
from fleet.router.messages import Arrived, KvChanged, WorkerStepped
from fleet.router.placement.policies.built_in import BUILT_IN, parameters, policy
from fleet.router.placement.policies.pipeline import Softmax
from fleet.router.policy import PlacementRequest
from fleet.router.settings.router import RouterSettings
from kvstore.block import chain
from tests.support.builders import BLOCK_TOKENS, a_prompt, an_arrival, some_progress
from tests.support.router.candidate_tables import a_candidate, candidates_of, decide, score
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

ALONE = {"decode_weight": 1.0, "others_weight": 0.0, "stall_weight": 0.0}  # so that costs are whole numbers
SETTINGS = RouterSettings(policies={"fleet": ALONE})
ASKED = PlacementRequest(prompt_tokens=320)


def costs(name: str, request: PlacementRequest, *rows, phase: Phase = Phase.AGGREGATED, **fields) -> list[float]:
    parts = policy(name, fields).costs(request, candidates_of(rows, SETTINGS), phase)
    return np.sum(list(parts.values()), axis=0).tolist()


def choice(name: str, request: PlacementRequest, *rows, rng: random.Random | None = None, **fields) -> str:
    candidates = candidates_of(rows, SETTINGS)
    place, _ = policy(name, fields).choose(request, candidates, Phase.AGGREGATED, rng or random.Random(0))
    return candidates.worker_ids[place]


# The cost of the default policy.

GOLDEN = [
    ({}, 20.0),
    ({"backlog_tokens": 64}, 22.0),
    ({"backlog_tokens": 16, "requests": 1, "active_blocks": 100}, 121.5),
    ({"requests": 5}, 25.0),
    ({"active_blocks": 7, "new_blocks": 3}, 20.0),
    ({"engine_blocks": 4}, 16.0),
    ({"engine_blocks": 4, "new_blocks": 6}, 12.0),
    ({"engine_blocks": 10, "new_blocks": 0}, 0.0),
    ({"engine_blocks": 10, "backlog_tokens": 320, "new_blocks": 0}, 10.0),
    ({"store_blocks": 4}, 17.0),
    ({"store_blocks": 10}, 12.5),
    ({"below_blocks": 4}, 18.0),
    ({"below_blocks": 10}, 15.0),
    ({"engine_blocks": 2, "store_blocks": 4}, 15.0),
    ({"engine_blocks": 2, "store_blocks": 4, "below_blocks": 3}, 13.5),
    ({"engine_blocks": 1, "store_blocks": 8, "conversion": 0.8}, 13.8),
    ({"below_blocks": 8, "conversion": 0.4}, 16.4),
    ({"coming_blocks": 10, "new_blocks": 0, "backlog_tokens": 320, "active_blocks": 10, "requests": 1}, 11.0),
    ({"coming_blocks": 10, "new_blocks": 0, "active_blocks": 10, "requests": 1}, 11.0),
    ({"coming_blocks": 4, "new_blocks": 6, "backlog_tokens": 640, "active_blocks": 10, "requests": 1}, 39.0),
    (
        {
            "engine_blocks": 3,
            "coming_blocks": 5,
            "new_blocks": 2,
            "backlog_tokens": 200,
            "active_blocks": 12,
            "requests": 2,
        },
        19.25,
    ),
    ({"engine_blocks": 10, "requests": 16}, 27.25),
    ({"engine_blocks": 10, "requests": 19}, 34.0),
    ({"engine_blocks": 10, "requests": 23}, 43.0),
    ({"engine_blocks": 10, "requests": 31}, 51.0),
    ({"engine_blocks": 10, "requests": 15}, 25.0),
    ({"prefill_speed": 2}, 15.0),
    ({"decode_speed": 2}, 15.0),
    ({"prefill_speed": 2, "decode_speed": 4, "backlog_tokens": 640, "requests": 3}, 18.25),
    ({"prefill_speed": 2, "store_blocks": 8}, 13.0),
    ({"prefill_speed": 5, "store_blocks": 8}, 12.0),
    ({"prefill_speed": 0.5, "below_blocks": 8}, 18.0),
    ({"prefill_speed": 4, "below_blocks": 8, "engine_blocks": 2}, 12.0),
    ({"prompt": 1, "new_blocks": 1}, 1.03125),
    ({"prompt": 33}, 3.03125),
    ({"prompt": 1000, "engine_blocks": 31, "new_blocks": 1}, 1.25),
    ({"prefill": True}, 10.0),
    ({"prefill": True, "backlog_tokens": 6400, "requests": 2, "engine_blocks": 5}, 207.0),
    ({"prefill": True, "active_blocks": 50, "store_blocks": 6}, 5.5),
    ({"prefill": True, "prefill_speed": 3, "backlog_tokens": 96}, 4.333333333333333),
]
"""Costs that were computed by hand by the docstring of `fleet.router.placement.policies.pipeline`: blocks of 32 tokens, batch of 16."""


def test_low_decode_weight_keeps_shared_prefix_together():
    """Compare a worker that has the prompt and two requests that use it with an idle worker without the prompt: the first is better."""
    settings = RouterSettings()
    cold = score(a_candidate(prompt_tokens=2048), 2048, settings)
    warm = score(
        a_candidate(prompt_tokens=2048, engine_blocks=60, active_blocks=64, new_blocks=4, requests=2), 2048, settings
    )
    assert cold.cost == pytest.approx(64 + 19.2)
    assert warm.cost == pytest.approx(64 - 60 + 4 * 0.3 * 2 + 68 * 0.3 + 2)


PRICES = [  # workers, computing workers, requests on this worker; price of its work
    (1, 0, 0, 0.0),
    (1, 1, 0, 1.0),
    (4, 0, 0, 0.0),
    (4, 2, 0, 2 / 3),
    (4, 4, 0, 4.0),
    (16, 8, 0, 8 / 9),
    (16, 16, 0, 16.0),
    (4, 2, 5, 2 / 3 + 1.5),
]


@pytest.mark.parametrize(("workers", "busy", "requests", "price"), PRICES)
def test_price_of_work_grows_with_computing_workers(workers, busy, requests, price):
    """Check item 4 of `fleet.router.placement.policies.pipeline` with a prompt of ten blocks, six of which must be computed."""
    rows = [
        a_candidate(
            f"w{place}", prompt_tokens=320, engine_blocks=4, backlog_tokens=32 * (place < busy), requests=requests
        )
        for place in range(workers)
    ]
    parts = policy("fleet", {}).costs(ASKED, candidates_of(rows, SETTINGS), Phase.AGGREGATED)

    assert parts["others"].tolist() == pytest.approx([6 * price] * workers)


def test_busy_cluster_waits_for_prefix_and_idle_one_recomputes():
    """Choose between a worker with 8 of 10 blocks cached and 12 blocks to compute first, and one without either."""
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=8, backlog_tokens=32 * 12)
    cold = a_candidate("cold", prompt_tokens=320)
    others = [a_candidate(f"busy{place}", prompt_tokens=320, backlog_tokens=32 * 100) for place in range(6)]

    assert choice("fleet", ASKED, warm, cold) == "cold"
    assert choice("fleet", ASKED, warm, cold, *others) == "warm"
    assert choice("fleet", ASKED, warm, cold, *others, others_weight=0.0) == "cold"


def test_prefill_goes_where_it_delays_fewer_streams():
    """Choose between workers that have equally much to compute, but different numbers of running requests."""
    few = a_candidate("few", prompt_tokens=320, requests=1)
    many = a_candidate("many", prompt_tokens=320, requests=8)
    apart = {"running_request_blocks": 0.0, "decode_weight": 0.0}

    assert choice("fleet", ASKED, many, few, **apart) == "few"
    (alone, crowded) = costs("fleet", ASKED, few, many, **apart)
    assert crowded - alone == pytest.approx(10 * 0.3 * 7)


@pytest.mark.parametrize(("fields", "cost"), GOLDEN)
def test_fleet_cost_equals_the_reference_table(fields, cost):
    fields = dict(fields)
    prompt = fields.pop("prompt", 320)
    phase = Phase.PREFILL if fields.pop("prefill", False) else Phase.AGGREGATED
    standing = a_candidate(prompt_tokens=prompt, **fields)

    terms = score(standing, prompt, SETTINGS, phase=phase)
    alone = candidates_of([standing], SETTINGS)
    hot_path = policy("fleet", ALONE).scorers[0][2].costs(PlacementRequest(prompt_tokens=prompt), alone, phase)

    assert terms.cost == pytest.approx(cost, abs=1e-9)
    assert hot_path[0] == pytest.approx(cost, abs=1e-9), "what is explained is what was decided on"


def test_credit_above_one_reduces_backlog_down_to_zero():
    hot = a_candidate(prompt_tokens=320, engine_blocks=10, new_blocks=0, backlog_tokens=320)
    generous = RouterSettings(engine_hit_credit=3.0)

    assert score(hot, 320, generous).cost == 0
    assert (
        score(a_candidate(prompt_tokens=320, engine_blocks=10, new_blocks=0, backlog_tokens=3200), 320, generous).cost
        == 80
    )


def test_explained_terms_match_the_decision_for_any_weights():
    rng = random.Random(5)
    for _ in range(50):
        rows = [
            a_candidate(
                f"w{number}",
                prompt_tokens=2048,
                backlog_tokens=rng.choice([0, 100, 4096]),
                active_blocks=rng.randrange(50),
                requests=rng.randrange(30),
                engine_blocks=rng.choice([0, 0, rng.randrange(64)]),
                coming_blocks=rng.choice([0, 0, rng.randrange(32)]),
                store_blocks=rng.choice([0, rng.randrange(32)]),
                conversion=rng.choice([0, 0.3]),
                prefill_speed=rng.choice([1.0, 1.0, 3.0]),
            )
            for number in range(12)
        ]
        request = PlacementRequest(prompt_tokens=2048, bound=WorkerId("w3"))
        candidates = candidates_of(rows, SETTINGS)
        decided = policy("fleet", {}).scorers[0][2].costs(request, candidates, Phase.AGGREGATED)

        assert costs("fleet", request, *rows) == pytest.approx(decided.tolist(), abs=1e-9)


def test_fetch_credit_is_limited_to_the_saved_time():
    """Compare two workers with blocks in the store: one computes a block faster than the store transfers it, and gets no credit."""
    fast = a_candidate("fast", prompt_tokens=320, prefill_speed=5.0, store_blocks=8)
    slow = a_candidate("slow", prompt_tokens=320, store_blocks=8)

    assert score(fast, 320, SETTINGS).parts["credit"] == 0
    assert score(slow, 320, SETTINGS).parts["credit"] == -6


@pytest.mark.parametrize("backlog", [0, 640])
def test_faster_tier_of_a_hit_wins_by_default(backlog):
    tiers = ("", "below_blocks", "store_blocks", "engine_blocks")
    rows = [
        a_candidate(f"w{tier}", prompt_tokens=320, backlog_tokens=backlog, **{tier: 8} if tier else {})
        for tier in tiers
    ]

    cold, below, memory, hot = costs("fleet", ASKED, *rows)
    assert cold > below > memory > hot
    assert choice("fleet", ASKED, *rows) == "wengine_blocks"


def test_twice_as_fast_worker_takes_twice_the_backlog():
    fast = a_candidate("fast", backlog_tokens=1000, prefill_speed=2.0)
    slow = a_candidate("slow", backlog_tokens=500)

    assert choice("fleet", ASKED, slow, fast) == "fast"
    assert choice("fleet", ASKED, a_candidate("slow", backlog_tokens=100), fast, **ALONE) == "slow"


def test_first_token_goal_goes_before_lower_cost():
    hot = a_candidate("hot", engine_blocks=10, backlog_tokens=0, token_seconds=1.0)
    quick = a_candidate("quick", backlog_tokens=64, token_seconds=0.001)

    assert choice("fleet", PlacementRequest(prompt_tokens=320), hot, quick) == "hot"
    assert choice("fleet", PlacementRequest(prompt_tokens=320), hot, quick, ttft_goal_seconds=0.5) == "quick"
    assert choice("fleet", PlacementRequest(prompt_tokens=320, seconds_left=0.5), hot, quick) == "quick"
    assert choice("fleet", PlacementRequest(prompt_tokens=320, seconds_left=0.1), hot, quick) == "hot", (
        "nobody keeps it"
    )


def test_session_and_temperature_apply_in_choice_and_costs():
    here, there = a_candidate("here", requests=1), a_candidate("there")
    assert choice("fleet", ASKED, here, there, **ALONE) == "there"
    bound = PlacementRequest(prompt_tokens=320, session="s", bound=WorkerId("here"))
    assert choice("fleet", bound, here, there, **ALONE, session_blocks=1.5) == "here"

    rng = random.Random(3)
    drawn = {choice("fleet", ASKED, here, there, rng=rng, **ALONE, temperature=1.0) for _ in range(50)}
    assert drawn == {"here", "there"}


# Dynamo.


@pytest.mark.parametrize(
    ("fields", "parameters", "cost"),
    [
        ({}, {}, 20),
        ({"backlog_tokens": 64}, {}, 22),
        ({"requests": 5}, {}, 20),
        ({"requests": 5}, {"decode_active_request_weight": 2.0}, 30),
        ({"engine_blocks": 4}, {}, 16),
        ({"store_blocks": 4}, {}, 17),
        ({"below_blocks": 4}, {}, 19),
        ({"engine_blocks": 2, "store_blocks": 4, "below_blocks": 4}, {}, 10 - 2 - 3 - 1 + 10),
        ({"engine_blocks": 10, "new_blocks": 0}, {"overlap_score_credit": 2.0}, 0),
        ({"engine_blocks": 10, "new_blocks": 0, "backlog_tokens": 640}, {"overlap_score_credit": 2.0}, 10),
        ({"engine_blocks": 4}, {"prefill_load_scale": 0.5}, 3 + 10),
        ({"coming_blocks": 8}, {}, 20),
    ],
)
def test_dynamo_cost_matches_its_formula(fields, parameters, cost):
    (found,) = costs("dynamo", ASKED, a_candidate(prompt_tokens=320, **fields), **parameters)

    assert found == pytest.approx(cost, abs=1e-9)


def test_dynamo_prefill_cost_has_no_decode_term():
    busy = a_candidate("busy", prompt_tokens=320, backlog_tokens=64, engine_blocks=4, active_blocks=100, requests=3)

    assert costs("dynamo", ASKED, busy, phase=Phase.PREFILL) == [2 + 10 - 4]


def test_dynamo_credit_decays_with_excess_backlog():
    hot = a_candidate("hot", prompt_tokens=320, engine_blocks=10, backlog_tokens=32 * 10 + 64)
    idle = a_candidate("idle", prompt_tokens=320, backlog_tokens=64)

    found = costs("dynamo", ASKED, hot, idle, overlap_score_credit_decay=1.0)

    assert found == pytest.approx([(384 + 320) / 32 - 10 / (1 + 10 / 10) + 10, (64 + 320) / 32 + 10])


# Choices.


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_softmax_draws_with_its_published_probabilities(temperature):
    """Compare the frequencies by a chi-square test with 5 degrees of freedom: one correct run in a thousand exceeds 20.5."""
    values = np.array([3.0, 4.0, 5.0, 5.0, 9.0, 13.0])
    weights = [math.exp(-(value - 3) / (10 * temperature)) for value in values]
    expected = [20_000 * weight / sum(weights) for weight in weights]
    rng = random.Random(1)
    drawn = Counter(Softmax(temperature=temperature).pick(values, ASKED, None, rng) for _ in range(20_000))

    assert sum((drawn[place] - count) ** 2 / count for place, count in enumerate(expected)) < 20.5


def test_zero_temperature_takes_lowest_and_draws_ties():
    rng = random.Random(2)
    assert {Softmax().pick(np.array([2.0, 1.0, 3.0]), ASKED, None, rng) for _ in range(100)} == {1}
    for temperature in (0.0, 1.0):
        drawn = Counter(Softmax(temperature=temperature).pick(np.ones(4), ASKED, None, rng) for _ in range(10_000))
        assert all(abs(drawn[place] - 2500) <= 125 for place in range(4)), drawn


def test_underflowing_temperature_takes_the_lowest():
    assert Softmax(temperature=5e-324).pick(np.array([0.2, 0.1, 0.3]), ASKED, None, random.Random(0)) == 1


def test_round_robin_takes_turns_across_joins_and_leaves():
    turns = policy("round_robin", {})

    def pick(*names: str) -> str:
        candidates = candidates_of([a_candidate(name) for name in names], SETTINGS)
        return names[turns.choose(ASKED, candidates, Phase.AGGREGATED, random.Random(0))[0]]

    assert [pick("a", "b", "c") for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    assert [pick("b", "c") for _ in range(2)] == ["b", "c"]
    assert [pick("a", "b", "c", "d") for _ in range(4)] == ["d", "a", "b", "c"]


def test_random_policy_is_uniform():
    chosen = policy("random", {})
    candidates = candidates_of([a_candidate(f"d{number}", requests=number) for number in range(4)], SETTINGS)
    rng = random.Random(3)

    drawn = Counter(chosen.choose(ASKED, candidates, Phase.AGGREGATED, rng)[0] for _ in range(10_000))

    assert all(abs(drawn[place] - 2500) <= 125 for place in range(4)), drawn


def test_two_choices_takes_less_loaded_of_uniform_pair():
    """Draw from four workers: the least loaded one is in three of six pairs, the next one wins two, and the most loaded one none."""
    chosen = policy("p2c", {})
    loads = (2, 3, 0, 1)
    candidates = candidates_of([a_candidate(f"d{load}", requests=load) for load in loads], SETTINGS)
    rng = random.Random(4)

    places = (chosen.choose(ASKED, candidates, Phase.AGGREGATED, rng)[0] for _ in range(12_000))
    drawn = Counter(loads[place] for place in places)

    assert [abs(drawn[load] - count) < 250 for load, count in enumerate((6000, 4000, 2000))] == [True] * 3
    assert drawn[3] == 0


def test_least_loaded_ignores_cached_blocks():
    assert (
        choice("least_loaded", ASKED, a_candidate("hot", requests=2, engine_blocks=9), a_candidate("cold", requests=1))
        == "cold"
    )


def test_consistent_hash_keeps_keys_within_load_bound():
    names = [f"w{number}" for number in range(8)]
    keys = [random.Random(number).getrandbits(64) for number in range(400)]

    def owners(topology) -> dict[int, str]:
        ring = policy("consistent_hash", {})
        candidates = candidates_of([a_candidate(name) for name in topology], SETTINGS)
        return {
            key: topology[
                ring.choose(
                    PlacementRequest(prompt_tokens=9, first_key=key), candidates, Phase.AGGREGATED, random.Random(0)
                )[0]
            ]
            for key in keys
        }

    before, after = owners(names), owners(names[:-1])
    moved = [key for key in keys if before[key] != after[key]]

    assert {before[key] for key in moved} == {"w7"}, "only what the lost worker had moves"
    counts = Counter(before.values())
    assert len(counts) == 8
    ring, everybody = policy("consistent_hash", {}), candidates_of([a_candidate(name) for name in names], SETTINGS)
    candidates = everybody.only(np.array([6, 0, 1, 2, 3, 4, 5]))  # all but w7, as if it had no room
    chosen = {
        key: candidates.worker_ids[
            ring.choose(
                PlacementRequest(prompt_tokens=9, first_key=key), candidates, Phase.AGGREGATED, random.Random(0)
            )[0]
        ]
        for key in keys
    }
    assert chosen == after, "who is no candidate now is passed over as if it had left"
    # With bounded loads, even a single key fills no worker beyond 1.25 times the average.
    ring, requests = policy("consistent_hash", {"load_factor": 1.25}), [0] * 8
    for _ in range(80):
        rows = [a_candidate(name, requests=count) for name, count in zip(names, requests, strict=True)]
        place, _ = ring.choose(
            PlacementRequest(prompt_tokens=9, first_key=7),
            candidates_of(rows, SETTINGS),
            Phase.AGGREGATED,
            random.Random(0),
        )
        requests[place] += 1
    assert max(requests) <= math.ceil(1.25 * 80 / 8)


def test_sticky_keeps_the_session_while_worker_has_room():
    bound = PlacementRequest(prompt_tokens=320, session="s", bound=WorkerId("busy"))

    assert choice("sticky", bound, a_candidate("idle"), a_candidate("busy", requests=9)) == "busy"
    assert choice("sticky", bound, a_candidate("idle"), a_candidate("other", requests=9)) == "idle"


def test_mooncake_fetches_a_much_longer_match():
    """Check Mooncake's Algorithm 1 (FAST '25): 0.1 ms of prefill and 0.01 ms of transfer per token, no attention term, threshold 4."""
    parameters = {
        "balancing_threshold": 4.0,
        "prefill_seconds_per_token": 1e-4,
        "transfer_seconds_per_token": 1e-5,
        "quadratic_seconds": 0.0,
    }
    best = a_candidate("best", prompt_tokens=320, engine_blocks=8, backlog_tokens=1000)
    near = a_candidate("near", prompt_tokens=320, engine_blocks=3)  # 8 / 3 is below 4: computes
    far = a_candidate("far", prompt_tokens=320, engine_blocks=2, backlog_tokens=1000)  # 8 / 2 is not: fetches
    cold = a_candidate("cold", prompt_tokens=320)  # fetches

    found = costs("mooncake", ASKED, best, near, far, cold, **parameters)

    assert found == pytest.approx([0.1 + 64e-4, 224e-4, 0.1 + 192e-5 + 64e-4, 256e-5 + 64e-4])
    assert choice("mooncake", ASKED, best, near, far, cold, **parameters) == "cold"


def test_llm_d_scores_match_their_formulas():
    """Compare costs with the sum of weight x (1 - score); the weights are 2 (queue), 2 (KV utilisation) and 3 (prefix)."""
    queued = a_candidate("queued", prompt_tokens=320, requests=20, max_running=16, engine_blocks=10, active_blocks=512)
    half = a_candidate("half", prompt_tokens=320, requests=18, max_running=16, engine_blocks=5, active_blocks=256)
    free = a_candidate("free", prompt_tokens=320)

    found = costs("llm_d", ASKED, queued, half, free)

    assert found == pytest.approx([2 * 1 + 2 * 0.5 + 0, 2 * 0.5 + 2 * 0.25 + 3 * 0.5, 3])


@pytest.mark.parametrize("name", BUILT_IN.policies)
def test_every_policy_places_and_explains_every_request(name):
    router = RouterMachineDriver(("d1", Role.DECODE), ("d2", Role.BOTH), ("p1", Role.PREFILL), policy=name)
    for number in range(20):
        request_id = f"r{number}"
        work = the(
            Dispatch,
            router.send(an_arrival(request_id=request_id, tokens=100 * (number + 1), session=f"s{number % 3}")),
        )
        (placed,) = router.machine.explain(RequestId(request_id)).placements
        assert work.worker_id in (placed.decode, placed.prefill)
        assert placed.policy == name
        for terms in placed.candidates + placed.prefill_candidates:
            assert math.isfinite(terms.cost)
            assert sum(terms.parts.values()) == pytest.approx(terms.cost, abs=1e-9)
    router.machine.check()


# Hot prefixes and siblings.


def placements(router: RouterMachineDriver, *, prefix: int, requests: int, own: int = 64) -> list[tuple[str, int]]:
    """Place requests that begin alike and arrive at once; return for each its worker, and the prompt tokens to compute."""
    found = []
    for number in range(requests):
        tail = a_prompt(own, first=100_000 * (number + 1))
        request_id = f"r{number}"
        work = the(Dispatch, router.send(an_arrival(request_id=request_id, tokens=a_prompt(prefix) + tail)))
        (placed,) = router.machine.explain(RequestId(request_id)).placements
        found.append((work.worker_id, placed.prefill_tokens))
    return found


@pytest.mark.parametrize(("requests", "full_prefills"), [(2, 1), (8, 1), (16, 1), (32, 2), (64, 4)])
def test_simultaneous_siblings_compute_their_prompt_few_times(requests, full_prefills):
    """Place siblings on sixteen idle workers before any cache has reported; few of them may compute the whole prompt."""
    router = RouterMachineDriver(*((f"w{number}", Role.BOTH) for number in range(16)))

    found = placements(router, prefix=1024, requests=requests, own=0)

    assert sum(tokens > 512 for _, tokens in found) <= full_prefills
    assert max(Counter(worker for worker, _ in found).values()) <= 20, "and no batch is filled far beyond its size"


def test_hot_prefix_spreads_with_the_number_of_requests():
    """Send 4 to 64 requests with one hot prefix at once: more workers get it, and almost all requests still find it cached."""
    reach, hit_rates = [], []
    for requests in (4, 16, 32, 64):
        router = RouterMachineDriver(*((f"w{number}", Role.BOTH) for number in range(8)))
        hashes = tuple(chain(a_prompt(1024), BLOCK_TOKENS))
        router.send(KvChanged(worker_id=WorkerId("w0"), events=(KvStored(hashes),)))
        found = placements(router, prefix=1024, requests=requests, own=32)
        reach.append(len({worker for worker, _ in found}))
        hit_rates.append(sum(tokens < 512 for _, tokens in found) / requests)

    assert reach[0] == 1
    assert reach == sorted(reach)
    assert reach[-1] >= 4
    assert all(
        rate >= 1 - workers / requests
        for rate, workers, requests in zip(hit_rates, reach, (4, 16, 32, 64), strict=True)
    )


def spread_at(rate: float) -> tuple[int, float]:
    """Send requests with one prefix for ten seconds; return the number of workers that got requests, and the share of cache hits.

    There are eight workers with batches of 16; at first, one of them has the prefix. A worker computes 5,000 tokens a second, one
    prompt after the other, and an answer takes a second.
    """
    router = RouterMachineDriver(*((f"w{number}", Role.BOTH) for number in range(8)))
    machine, start = router.machine, router.now
    stored = (KvStored(tuple(chain(a_prompt(1024), BLOCK_TOKENS))),)
    machine.handle(KvChanged(worker_id=WorkerId("w0"), events=stored), start)
    order = itertools.count()
    due: list[tuple[float, int, Arrived | Dispatch, Finish | None]] = []
    for number in range(int(10 * rate)):
        prompt = a_prompt(1024) + a_prompt(32, first=100_000 * (number + 1))
        arrival = an_arrival(request_id=f"r{number}", tokens=prompt, sampling=Sampling(max_tokens=8))
        heapq.heappush(due, (number / rate, next(order), arrival, None))
    idle_from: Counter[str] = Counter()
    found = []
    while due:
        seconds, _, what, finish = heapq.heappop(due)
        now = Nanos(start + round(seconds * SECOND))
        if isinstance(what, Arrived):
            commands = machine.handle(what, now)
        else:
            progress = some_progress(7, request_id=what.start.request_id, finish=finish)
            commands = machine.handle(KvChanged(worker_id=what.worker_id, events=stored), now)
            commands += machine.handle(WorkerStepped(worker_id=what.worker_id, progress=(progress,)), now)
        for work in commands:
            if isinstance(work, Dispatch):
                (placed,) = machine.explain(RequestId(work.start.request_id.partition("#")[0])).placements
                found.append((work.worker_id, placed.prefill_tokens < 512))
                first = max(idle_from[work.worker_id], seconds) + placed.prefill_tokens / 5000
                idle_from[work.worker_id] = first
                heapq.heappush(due, (first, next(order), work, None))
                heapq.heappush(due, (first + 1, next(order), work, Finish.STOP))
    machine.check()
    return len({worker_id for worker_id, _ in found}), sum(hit for _, hit in found) / len(found)


def test_hot_prefix_spreads_as_needed_and_keeps_hits():
    """Raise the rate: a worker serves about 16 requests a second, so each further 16 need one more worker and one more prefill."""
    measured = {rate: spread_at(rate) for rate in (1, 8, 16, 32, 64, 96)}

    workers = [count for count, _ in measured.values()]
    assert workers == sorted(workers)
    assert workers[:2] == [1, 1]
    for rate, (count, hit_rate) in measured.items():
        assert rate / 20 <= count <= 1 + rate / 8, measured
        assert hit_rate >= 1 - (count - 1) / (10 * rate), measured


def test_cold_requests_avoid_the_worker_with_a_hot_prefix():
    router = RouterMachineDriver(*((f"w{number}", Role.BOTH) for number in range(4)))
    placements(router, prefix=1024, requests=8)

    work = the(Dispatch, router.send(an_arrival(request_id="cold", tokens=a_prompt(1024, first=50_000_000))))

    assert router.booked(work.worker_id)[0] == 1


# Settings.


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("best", {}, "router.policy: 'best' is not one of fleet, round_robin"),
        ("dynamo", {"temperature": 1}, "router.policies.dynamo: Object contains unknown field `temperature`"),
        ("dynamo", {"router_temperature": -1.0}, "router.policies.dynamo: temperature: must be 0 or more"),
        ("consistent_hash", {"load_factor": 0.5}, "router.policies.consistent_hash: load_factor: must be 1 or more"),
        ("composed", {"scorers": [{"name": "luck"}]}, "router.policies.composed.scorers: 'luck' is not one of fleet"),
    ],
)
def test_invalid_policy_is_refused_with_the_setting(name, fields, message):
    with pytest.raises(ConfigurationRefused) as refused:
        policy(name, fields)

    assert str(refused.value).startswith(message)


def test_only_parameters_of_the_chosen_policy_count():
    settings = RouterSettings(
        policy="dynamo", policies={"dynamo": {"router_temperature": 1.0}, "fleet": {"nonsense": 1}}
    )

    assert policy(settings.policy, parameters(settings)).name == "dynamo"


def test_composed_policy_is_the_weighted_sum_of_its_parts():
    fields = {
        "scorers": [{"name": "requests", "weight": 2.0}, {"name": "prefix", "weight": 3.0}],
        "filters": [{"name": "session"}],
        "picker": {"name": "softmax", "parameters": {"temperature": 0.0}},
    }
    rows = [a_candidate("a", prompt_tokens=320, requests=1, engine_blocks=10), a_candidate("b", prompt_tokens=320)]

    assert costs("composed", ASKED, *rows, **fields) == pytest.approx([2, 3])
    assert choice("composed", ASKED, *rows, **fields) == "a"
    assert choice("composed", PlacementRequest(prompt_tokens=320, bound=WorkerId("b")), *rows, **fields) == "b"


def test_worker_order_does_not_matter_without_ties():
    rows = [a_candidate(f"d{number}", requests=number) for number in range(4)]

    for order in itertools.permutations(rows):
        assert decide(ASKED, order, SETTINGS, random.Random(0)).decode == "d0"
