"""Policies of other routers that decide case by case or remember their choices, compared with figures from their publications."""

import random

import numpy as np
import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import Phase
from fleet.router.placement.policies.built_in import policy
from fleet.router.placement.policies.published import preble_window
from fleet.router.policy import PlacementRequest
from fleet.router.settings.router import RouterSettings
from tests.support.router.candidate_tables import a_candidate, candidates_of

SETTINGS = RouterSettings()
ASKED = PlacementRequest(prompt_tokens=320)


class Router:
    """One policy that chooses again and again, and remembers its choices."""

    def __init__(self, name: str, **parameters):
        self.policy = policy(name, parameters)

    def pick(self, *rows, request: PlacementRequest = ASKED) -> str:
        candidates = candidates_of(rows, SETTINGS)
        place, _ = self.policy.choose(request, candidates, Phase.AGGREGATED, random.Random(0))
        return candidates.worker_ids[place]


# AIBrix.


def test_aibrix_takes_longest_match_of_calm_workers():
    """Use workers with 0, 2 and 4 requests: the mean is 2 and the deviation 1.63, so a worker with more than 3.63 is left out."""
    idle = a_candidate("idle", prompt_tokens=320, engine_blocks=1)
    calm = a_candidate("calm", prompt_tokens=320, engine_blocks=5, requests=2)
    busy = a_candidate("busy", prompt_tokens=320, engine_blocks=9, requests=4)

    assert Router("aibrix").pick(idle, calm, busy) == "calm"
    assert Router("aibrix", deviations=2.0).pick(idle, calm, busy) == "busy"


def test_aibrix_takes_fewest_requests_when_unbalanced():
    full = a_candidate("full", prompt_tokens=320, engine_blocks=10, requests=9)
    empty = a_candidate("empty", prompt_tokens=320)
    some = a_candidate("some", prompt_tokens=320, engine_blocks=10, requests=1)
    more = a_candidate("more", prompt_tokens=320, engine_blocks=10, requests=1)

    assert Router("aibrix").pick(full, empty) == "empty"
    assert Router("aibrix", imbalance=9).pick(full, some, more, empty) in ("some", "more")
    assert (
        Router("aibrix").pick(a_candidate("one", requests=1, engine_blocks=3), a_candidate("none", engine_blocks=3))
        == "none"
    )


# SMG.


@pytest.mark.parametrize(
    ("most", "least", "chosen"),
    [(33, 1, "warm"), (34, 1, "idle"), (40, 7, "idle"), (400, 367, "warm"), (440, 399, "idle")],
)
def test_smg_takes_fewest_requests_when_unbalanced(most, least, chosen):
    """Use numbers of requests around the limits: loads are unbalanced if they differ by more than 32 and by a factor above 1.1."""
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=10, requests=most, max_running=1000)
    idle = a_candidate("idle", prompt_tokens=320, requests=least, max_running=1000)

    assert Router("smg").pick(warm, idle) == chosen


def test_smg_takes_long_match_or_the_smallest_tree():
    most = a_candidate("most", prompt_tokens=320, engine_blocks=6)
    half = a_candidate("half", prompt_tokens=320, engine_blocks=5)
    cold = a_candidate("cold", prompt_tokens=320)
    router = Router("smg")

    assert router.pick(cold, most) == "most"  # it now has four more blocks
    assert router.pick(half, a_candidate("most", prompt_tokens=320)) == "half"  # it now has five more
    assert router.pick(half, a_candidate("most", prompt_tokens=320)) == "most"  # it now has ten more
    assert router.pick(a_candidate("half", prompt_tokens=320), a_candidate("most", prompt_tokens=320), cold) == "cold"


def test_smg_keeps_trees_of_workers_that_are_no_candidates():
    router = Router("smg")
    workers = [a_candidate(f"w{number}", prompt_tokens=320) for number in range(100)]
    for worker in workers:
        router.pick(worker)  # all others are full

    assert router.pick(*workers, a_candidate("cold", prompt_tokens=320)) == "cold"


# Infera.


def test_infera_cost_matches_its_formula():
    router = Router("infera", weight=2.0)
    first = a_candidate("first", prompt_tokens=320, engine_blocks=4, active_blocks=7)
    second = a_candidate("second", prompt_tokens=320, active_blocks=40)

    assert router.pick(first, second) == "first"
    parts = router.policy.costs(ASKED, candidates_of([first, second], SETTINGS), Phase.AGGREGATED)

    assert parts["missed"].tolist() == [12, 20]
    assert parts["active"].tolist() == [7, 40]
    assert parts["recent"].tolist() == [6, 0]
    assert router.pick(first, second) == "first"
    parts = router.policy.costs(ASKED, candidates_of([first, second], SETTINGS), Phase.PREFILL)
    assert parts["recent"].tolist() == pytest.approx([6 * 0.97 + 6, 0])
    assert parts["missed"].tolist() == [120, 200], "prefill workers weigh 20"


def test_infera_spreads_sequential_requests_without_load():
    router = Router("infera")
    cold = [a_candidate(f"w{place}", prompt_tokens=320) for place in range(4)]

    picked = [router.pick(*cold) for _ in range(8)]

    assert sorted(picked[:4]) == ["w0", "w1", "w2", "w3"]
    assert picked[4:] == picked[:4], "whose misses have faded most"


def test_infera_forgets_faded_misses():
    router = Router("infera")
    router.pick(a_candidate("gone", prompt_tokens=320))
    for _ in range(400):
        router.pick(a_candidate("here", prompt_tokens=320, engine_blocks=10))

    assert set(router.policy.recent) == {"here"}


# Preble.

TIMES = {"prefill_seconds_per_token": 0.001, "quadratic_seconds": 0.0, "decode_seconds_per_token": 0.01}


def a_question(
    prompt_tokens: int = 320, *, key: int = 0, seconds: float = 0.0, answer_tokens: int = 1
) -> PlacementRequest:
    return PlacementRequest(
        prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, first_key=key, now=Nanos(int(seconds * SECOND))
    )


def parts(router: Router, *rows, request: PlacementRequest) -> dict[str, list[float]]:
    found = router.policy.costs(request, candidates_of(rows, SETTINGS), Phase.AGGREGATED)
    return {name: costs.tolist() for name, costs in found.items()}


@pytest.mark.parametrize(("blocks", "chosen"), [(5, "idle"), (6, "warm")])
def test_preble_exploits_a_mostly_cached_prompt(blocks, chosen):
    """Use a worker with 3.2 s of work that has most of the prompt: with six of ten blocks it is chosen, with five it is not."""
    router = Router("preble", **TIMES)
    router.pick(a_candidate("warm", prompt_tokens=3200), request=a_question(3200))
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=blocks)

    assert router.pick(warm, a_candidate("idle", prompt_tokens=320), request=a_question()) == chosen


def test_preble_exploits_longest_match_then_least_load():
    router = Router("preble", **TIMES)
    router.pick(a_candidate("busy", prompt_tokens=320), request=a_question())
    busy, calm, less = (
        a_candidate(name, prompt_tokens=320, engine_blocks=blocks)
        for name, blocks in (("busy", 9), ("calm", 9), ("less", 8))
    )

    assert router.pick(busy, calm, less, request=a_question()) == "calm"
    assert router.pick(busy, less, request=a_question()) == "busy"


def test_preble_load_sums_prefill_and_decode_in_the_window():
    """Place 320 tokens, 64 of them cached, with an answer of 10 tokens: the load is 0.256 + 0.1 s, and forgotten after three minutes."""
    router = Router("preble", **TIMES)
    half = a_candidate("half", prompt_tokens=320, engine_blocks=2)
    cold = a_candidate("cold", prompt_tokens=320)
    router.pick(half, request=a_question(answer_tokens=10))

    soon = parts(router, half, cold, request=a_question(seconds=179))
    assert soon["load"] == pytest.approx([0.356, 0])
    assert soon["prefill"] == pytest.approx([0.256, 0.320])
    assert soon["evicted"] == [0, 0]

    router.pick(cold, request=a_question(seconds=181))
    later = parts(router, half, cold, request=a_question(seconds=181))
    assert later["load"] == pytest.approx([0, 0.330])
    assert set(router.policy.window.recent) == {"cold"}


def test_preble_explore_cost_includes_attention():
    router = Router("preble", **TIMES | {"quadratic_seconds": 1e-6})
    near = a_candidate("near", prompt_tokens=320, engine_blocks=5)

    found = parts(router, near, a_candidate("cold", prompt_tokens=320), request=a_question())

    assert found["prefill"] == pytest.approx([0.160 + 1e-6 * (320**2 - 160**2), 0.320 + 1e-6 * 320**2])


def test_preble_eviction_weighs_by_sharing_requests():
    """Fill a worker of 20 blocks half with a prompt that three of four requests had: its eviction costs 320 ms x 3/4."""
    router = Router("preble", **TIMES)
    full = a_candidate("full", prompt_tokens=320, kv_blocks=20)
    router.pick(full, request=a_question(key=7))
    warm = a_candidate("full", prompt_tokens=320, kv_blocks=20, engine_blocks=10)
    router.pick(warm, request=a_question(key=7))
    router.pick(warm, request=a_question(key=7))
    router.pick(full, request=a_question(key=8))

    assert parts(router, full, request=a_question(320, key=9))["evicted"] == pytest.approx([0.24])
    assert parts(router, full, request=a_question(640, key=9))["evicted"] == pytest.approx([0.24 + 0.08])
    roomy = a_candidate("full", prompt_tokens=320, kv_blocks=30)
    assert parts(router, roomy, request=a_question(320, key=9))["evicted"] == [0]


def test_preble_evicts_least_recently_used_nodes_first():
    router = Router("preble", **TIMES)
    full = a_candidate("full", prompt_tokens=320, kv_blocks=20)
    warm = a_candidate("full", prompt_tokens=320, kv_blocks=20, engine_blocks=10)
    for key, standing in ((7, full), (8, full), (7, warm), (9, full)):
        router.pick(standing, request=a_question(key=key))

    assert list(router.policy.window.recent["full"].nodes) == [7, 9], "8 had to go"


def test_preble_rebalances_to_the_least_loaded_worker():
    """Send 50 requests per worker to `warm`, which then has more than 1.5 times the least load: the next ones go to `cold`.

    Then `warm` has a load of 1 s, and each request adds 0.33 s to `cold`.
    """
    router = Router("preble", **TIMES)
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=10)
    cold = a_candidate("cold", prompt_tokens=320)

    assert {router.pick(warm, cold, request=a_question()) for _ in range(100)} == {"warm"}
    assert [router.pick(warm, cold, request=a_question()) for _ in range(4)] == ["cold", "cold", "cold", "warm"]


def test_preble_exploits_by_cost_instead_of_load():
    """Compare `tight` (load 0.33 s, and a prompt of 320 ms would be evicted) with `roomy` (load 0.42 s, nothing is evicted)."""
    router = Router("preble", **TIMES)
    tight = a_candidate("tight", prompt_tokens=640, kv_blocks=15, engine_blocks=11)
    roomy = a_candidate("roomy", prompt_tokens=640, kv_blocks=90, engine_blocks=11)
    router.pick(a_candidate("tight", kv_blocks=15), request=a_question(key=7))
    router.pick(a_candidate("roomy", kv_blocks=90), request=a_question(key=7, answer_tokens=10))

    assert router.pick(tight, roomy, request=a_question(640, key=9)) == "roomy"
    assert router.pick(tight, request=a_question(640, key=9)) == "tight"


def test_preble_eviction_counts_only_that_workers_requests():
    """Give `full` and `busy` different requests: at `full`, one of two had key 7 (320 ms x 1/2); at `busy`, two of three (x 2/3)."""
    router = Router("preble", **TIMES)
    full = a_candidate("full", prompt_tokens=320, kv_blocks=20)
    busy = a_candidate("busy", prompt_tokens=320, kv_blocks=20)
    for standing, keys in ((full, (7, 8)), (busy, (7, 8))):
        for key in keys:
            router.pick(standing, request=a_question(key=key))
    router.pick(a_candidate("busy", prompt_tokens=320, kv_blocks=20, engine_blocks=10), request=a_question(key=7))

    assert parts(router, full, request=a_question(key=9))["evicted"] == pytest.approx([0.320 / 2])
    assert parts(router, busy, request=a_question(key=9))["evicted"] == pytest.approx([0.320 / 3]), "8 is older there"
    assert parts(router, busy, request=a_question(640, key=9))["evicted"] == pytest.approx([0.320 / 3 + 0.320 * 2 / 3])


def test_preble_evicts_unused_nodes_for_free():
    router = Router("preble", **TIMES)
    full = a_candidate("full", prompt_tokens=320, kv_blocks=20)
    router.pick(full, request=a_question())
    router.pick(full, request=a_question(seconds=100))

    assert parts(router, full, request=a_question(640))["evicted"] == pytest.approx([0.16 + 0.16])
    router.pick(a_candidate("other"), request=a_question(seconds=181))
    assert parts(router, full, request=a_question(320))["evicted"] == [0], "the leaf of three minutes ago"
    assert parts(router, full, request=a_question(640))["evicted"] == pytest.approx([0.32])


def a_queue(ahead: int, **fields) -> Router:
    """Place two requests with key 7 and 32 tokens to compute at `warm`: the first behind no other tokens, the second behind `ahead`."""
    router = Router("preble", **TIMES | fields)
    for seconds, backlog in ((0, 0), (100, ahead)):
        warm = a_candidate("warm", prompt_tokens=320, engine_blocks=9, backlog_tokens=backlog)
        router.pick(warm, request=a_question(key=7, seconds=seconds, answer_tokens=10))
    return router


@pytest.mark.parametrize(("ahead", "chosen"), [(31, "warm"), (32, "cold")])
def test_preble_copies_a_prefix_with_doubled_queue(ahead, chosen):
    """Copy the prefix to the least loaded worker without it if 64 tokens are queued before a request, but not if 63 are."""
    router = a_queue(ahead)
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=9)
    some = a_candidate("some", prompt_tokens=320)
    router.pick(some, request=a_question(320, seconds=100))

    assert router.pick(warm, some, a_candidate("cold"), request=a_question(key=7, seconds=101)) == chosen


def test_preble_copy_shares_requests_until_unused():
    """Choose between `warm` (load 2 x 0.132 s) and the copy (load 0.42 s, and three more blocks of the prompt to compute, 96 ms)."""
    router = a_queue(32)
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=9)
    cold = a_candidate("cold", prompt_tokens=320)
    copy = a_candidate("cold", prompt_tokens=320, engine_blocks=6)
    question = a_question(key=7, seconds=101, answer_tokens=10)

    assert router.pick(warm, cold, request=question) == "cold"
    assert [router.pick(warm, copy, request=question) for _ in range(3)] == ["warm", "warm", "cold"]
    assert router.pick(warm, copy, request=a_question(key=8, seconds=101)) == "warm", (
        "another prefix, the longest match"
    )

    router.pick(cold, request=a_question(key=9, seconds=200))
    late = a_question(key=7, seconds=282, answer_tokens=1000)
    assert [router.pick(warm, copy, request=late) for _ in range(2)] == ["warm", "warm"]


def test_preble_resets_queue_measurement_after_a_copy():
    router = a_queue(32)
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=9)
    cold = [a_candidate(name, prompt_tokens=320) for name in ("one", "two")]
    question = a_question(key=7, seconds=101, answer_tokens=10)

    assert router.pick(warm, *cold, request=question) in ("one", "two")
    assert router.pick(warm, *cold, request=question) == "warm"


def test_preble_makes_no_copy_while_rebalancing():
    router = a_queue(320)
    warm = a_candidate("warm", prompt_tokens=320, engine_blocks=9)
    some, cold = (a_candidate(name, prompt_tokens=320) for name in ("some", "cold"))
    for _ in range(148):
        router.pick(warm, request=a_question(key=8, seconds=100))

    assert router.pick(warm, some, cold, request=a_question(key=7, seconds=101)) in ("some", "cold")
    assert not any(recent.prefixes[7].is_copy for recent in router.policy.window.recent.values())


def test_preble_explores_decode_heavy_worker_if_configured():
    """Use two workers: at `talks`, decoding is 1 s of its 1.32 s of work; at `reads`, it is 0.1 s of 0.42 s."""
    talks, reads = (a_candidate(name, prompt_tokens=320) for name in ("talks", "reads"))

    def chosen(**fields) -> str:
        router = Router("preble", **TIMES | fields)
        router.pick(talks, request=a_question(answer_tokens=100))
        router.pick(reads, request=a_question(answer_tokens=10))
        assert bool(parts(router, talks, reads, request=a_question())) == (not fields or fields["decode_share"] > 0.76)
        return router.pick(talks, reads, request=a_question())

    assert chosen() == "reads", "which has less load"
    assert chosen(decode_share=0.77) == "reads"
    assert chosen(decode_share=0.75) == "talks"


def test_preble_window_drops_the_oldest_requests(monkeypatch):
    monkeypatch.setattr(preble_window, "MAX_REQUESTS", 2)
    router = Router("preble", **TIMES)
    one = a_candidate("one", prompt_tokens=320)
    for key in (7, 8, 9, 9):
        router.pick(one, request=a_question(key=key))

    assert {key: prefix.requests for key, prefix in router.policy.window.recent["one"].prefixes.items()} == {
        8: 1,
        9: 2,
    }
    assert parts(router, one, request=a_question())["load"] == pytest.approx([3 * 0.33])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smg", {"match_threshold": 1.5}),
        ("aibrix", {"k": 1}),
        ("preble", {"imbalance": 0.5}),
        ("preble", {"decode_share": 1.5}),
        ("preble", {"prefill_seconds_per_token": 1e308}),  # infinite if multiplied by the tokens of a prompt
        ("infera", {"weight": -1e308}),
        ("dynamo", {"prefill_load_scale": float("inf")}),
        ("composed", {"scorers": [{"name": "queue", "weight": 1e308}]}),
        ("composed", {"scorers": [{"name": "mooncake", "parameters": {"quadratic_seconds": 1e308}}]}),
    ],
)
def test_invalid_parameters_are_refused(name, parameters):
    with pytest.raises(ConfigurationRefused, match=name):
        policy(name, parameters)


def test_rules_by_cases_explain_no_cost_terms():
    candidates = candidates_of([a_candidate("a"), a_candidate("b")], SETTINGS)

    for name in ("smg", "aibrix"):
        assert policy(name, {}).costs(ASKED, candidates, Phase.AGGREGATED) == {}
    exploiting = candidates_of([a_candidate("a", prompt_tokens=320, engine_blocks=9), a_candidate("b")], SETTINGS)
    assert policy("preble", {}).costs(ASKED, exploiting, Phase.AGGREGATED) == {}
    assert np.isfinite(policy("infera", {}).costs(ASKED, candidates, Phase.AGGREGATED)["recent"]).all()
