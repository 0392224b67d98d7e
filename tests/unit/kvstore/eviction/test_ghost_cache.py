"""Ghost caches: estimates from a sample, compared with replays of all requests; only the most used namespaces have a ghost cache."""

import hashlib

import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.ghost_cache import (
    FADE_EVERY,
    HALF_LIFE,
    MAX_GHOST_CACHES,
    MAX_NAMESPACES,
    GhostCache,
    GhostCaches,
    GhostCacheScenario,
    HitRateEstimate,
    sample_names,
)
from kvstore.eviction.policies import policy
from kvstore.eviction.trace_replay import distinct_blocks, replay
from tests.support.kvstore.builders import BLOCK_BYTES, a_chain, a_namespace
from tests.support.sim.traces import agentic, conversation

CHAIN = a_chain(10)
SCALES = (0.5, 1, 2, 4)


def sample_numbers(numbers, share):
    """Return about this share of the numbers, chosen by Knuth's multiplicative hash (2⁶⁴ divided by the golden ratio)."""
    below = round(share * (1 << 24))
    return [number for number in numbers if (number * 0x9E3779B97F4A7C15 >> 40) & 0xFFFFFF < below]


def replayed_ghost_cache(trace, capacity_blocks, scenarios, sampled_blocks):
    ghost_cache = GhostCache(
        capacity_blocks, scenarios, sample_numbers, sampled_blocks=sampled_blocks, half_life=Nanos(1 << 62)
    )
    for request in trace.requests:
        ghost_cache.looked_up(request.chain, request.arrival)
        ghost_cache.stored(request.chain, request.arrival)
    return ghost_cache


@pytest.mark.parametrize(("trace", "share"), [(conversation, 0.1), (agentic, 0.05)])
@pytest.mark.parametrize(("name", "error"), [("lru", 0.015), ("hazard", 0.03)])
def test_estimate_from_a_third_of_the_blocks_is_close(trace, share, name, error):
    requests, tokens = trace().requests, trace().block_tokens
    capacity_blocks = int(distinct_blocks(requests) * share)
    scenarios = [GhostCacheScenario(name, scale) for scale in SCALES]

    estimates = replayed_ghost_cache(trace(), capacity_blocks, scenarios, capacity_blocks // 3).estimates()

    for estimate in estimates:
        whole = replay(
            requests, policy(name), capacity_blocks=int(capacity_blocks * estimate.scale), block_tokens=tokens
        )
        assert estimate.hit_rate == pytest.approx(whole.hit_rate, abs=error)


def test_sufficient_pool_gains_nothing_by_growing():
    ghost_cache = GhostCache(1000, [GhostCacheScenario("lru", 1), GhostCacheScenario("lru", 4)], sample_numbers)
    for turn in range(10):
        ghost_cache.looked_up(range(500), Nanos(turn * SECOND))
        ghost_cache.stored(range(500), Nanos(turn * SECOND))

    assert ghost_cache.estimates() == [
        HitRateEstimate(policy="lru", scale=1, hit_rate=0.9),
        HitRateEstimate(policy="lru", scale=4, hit_rate=0.9),
    ]


def test_small_capacity_is_simulated_without_sampling():
    assert GhostCache(100, [], sample_numbers).share == 1
    assert GhostCache(1 << 20, [], sample_numbers, sampled_blocks=1 << 10).share == 1 / 1024


def test_memory_does_not_grow_with_the_capacity_or_the_traffic():
    ghost_cache = GhostCache(1 << 14, [GhostCacheScenario("lru", 4)], sample_numbers, sampled_blocks=64)
    for block in range(0, 1_000_000, 100):
        ghost_cache.stored(range(block, block + 100), Nanos(block))

    (cache,) = ghost_cache.caches.values()
    assert len(cache.held) == 4 * 64


def test_sampling_depends_only_on_the_hash_and_keeps_its_share():
    names = [hashlib.sha256(index.to_bytes(4)).digest()[:16] for index in range(20_000)]

    sampled = sample_names(names, 0.1)

    assert len(sampled) == pytest.approx(2000, rel=0.1)
    assert sampled == [name for name in names if sample_names([name], 0.1)]
    assert sample_names(names, 1.0) == names
    assert set(sample_names(names, 0.05)) < set(sampled)
    assert len(sample_numbers(range(20_000), 0.1)) == pytest.approx(2000, rel=0.1)


def test_old_look_ups_lose_weight():
    ghost_cache = GhostCache(100, [GhostCacheScenario("lru")], sample_numbers)
    ghost_cache.looked_up(range(10), Nanos(FADE_EVERY))  # all ten blocks are misses
    ghost_cache.stored(range(10), Nanos(FADE_EVERY))
    ghost_cache.looked_up(range(10), Nanos(FADE_EVERY + HALF_LIFE))  # all ten blocks are hits

    (estimate,) = ghost_cache.estimates()
    assert estimate.hit_rate == pytest.approx(2 / 3)


@pytest.mark.parametrize(("scenario", "message"), [(("mru", 1), "'mru' is not one of"), (("lru", 0), "not positive")])
def test_invalid_scenario_is_refused(scenario, message):
    with pytest.raises(ValueError, match=message):
        GhostCache(100, [GhostCacheScenario(*scenario)], sample_numbers)


def namespaces(count: int, of: str = "adapter"):
    return [a_namespace(lora=f"{of}{number}") for number in range(count)]


def ghost_caches(*opened) -> GhostCaches:
    ghost_caches = GhostCaches(100 * BLOCK_BYTES, "lru")
    for namespace in opened:
        ghost_caches.open(namespace)
    return ghost_caches


def looked_at(ghost_caches: GhostCaches) -> set[str]:
    return {each.fingerprint for each in ghost_caches.estimates()}


def use(ghost_caches: GhostCaches, namespace, times: int = 1, now: int = 0) -> None:
    for _ in range(times):
        ghost_caches.looked_up(namespace.digest, CHAIN, Nanos(now))
        ghost_caches.stored(namespace.digest, CHAIN, Nanos(now))


def test_first_namespaces_get_a_ghost_cache_within_the_limit():
    opened = namespaces(MAX_GHOST_CACHES + 3)

    assert looked_at(ghost_caches(*opened)) == {each.fingerprint for each in opened[:MAX_GHOST_CACHES]}


def test_busy_namespace_replaces_the_least_used_one():
    *first, newcomer = opened = namespaces(MAX_GHOST_CACHES + 1)
    found = ghost_caches(*opened)
    for number, namespace in enumerate(first):
        use(found, namespace, times=10 - number)  # the last namespace is used three times

    use(found, newcomer, times=5)
    assert newcomer.fingerprint not in looked_at(found), "it is used less than twice as much"
    use(found, newcomer)

    assert looked_at(found) == {each.fingerprint for each in (*first[:-1], newcomer)}
    (estimate,) = [each for each in found.estimates() if each.fingerprint == newcomer.fingerprint]
    assert estimate.estimates[0].hit_rate == 0
    use(found, newcomer)
    (estimate,) = [each for each in found.estimates() if each.fingerprint == newcomer.fingerprint]
    assert estimate.estimates[0].hit_rate > 0


def test_equally_used_namespaces_do_not_replace_each_other():
    opened = namespaces(MAX_GHOST_CACHES + 1)
    found = ghost_caches(*opened)
    for _ in range(20):
        for namespace in opened:
            use(found, namespace)

    assert looked_at(found) == {each.fingerprint for each in opened[:-1]}


def test_old_uses_of_a_namespace_lose_weight():
    *first, newcomer = opened = namespaces(MAX_GHOST_CACHES + 1)
    found = ghost_caches(*opened)
    for namespace in first:
        use(found, namespace, times=100)

    use(found, newcomer, times=13, now=4 * HALF_LIFE)

    assert newcomer.fingerprint in looked_at(found), "13 uses against 100 uses that have lost 15/16 of their weight"


def test_forgotten_namespace_can_return():
    opened = namespaces(MAX_NAMESPACES)
    found = ghost_caches(*opened)
    for namespace in opened[1:]:
        use(found, namespace)

    for namespace in namespaces(5, "late"):
        found.open(namespace)

    assert len(found.namespaces) == MAX_NAMESPACES
    assert opened[0].fingerprint not in looked_at(found)
    use(found, opened[0])
    found.open(opened[0])
    use(found, opened[0], times=100, now=SECOND)
    assert opened[0].fingerprint in looked_at(found)
    assert len(looked_at(found)) == MAX_GHOST_CACHES
