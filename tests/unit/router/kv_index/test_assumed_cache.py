"""Assumed caches: they are limited in size and time, and keep the latest prompts."""

import random

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import Role
from fleet.router.kv_index.assumed_cache import MAX_LISTED_FACTOR, AssumedCache
from fleet.router.kv_index.peer_prompts import PlacedPrompt
from fleet.router.kv_index.prefix_index import Knowledge, RadixTree
from fleet.router.messages import CacheAged, PeerPlaced
from fleet.router.state.live_requests import hash_prompt
from tests.support.builders import a_joined_worker, a_prompt, an_arrival
from tests.support.router.machine_driver import Dispatch, RouterMachineDriver, the

START = Nanos(1000 * SECOND)
MINUTE = Nanos(60 * SECOND)
LATER = Nanos(START + MINUTE)


def a_cache(capacity: int) -> tuple[RadixTree, AssumedCache]:
    chains = RadixTree()
    return chains, AssumedCache(chains, 1, capacity)


def test_sent_prompt_is_assumed_cached():
    chains, cache = a_cache(100)

    cache.sent((1, 2, 3), LATER)

    assert chains.runs((1, 2, 3, 4)) == [(3, 1)]
    assert len(cache) == 3


def test_least_recently_sent_prompt_is_forgotten_first():
    chains, cache = a_cache(6)
    for prompt in ((1, 2), (3, 4), (1, 2), (5, 6), (7, 8)):  # the first prompt is sent twice
        cache.sent(prompt, LATER)

    assert [bool(chains.runs((key,))) for key in (1, 3, 5, 7)] == [True, False, True, True]
    cache.check()


def test_shared_blocks_stay_with_the_other_prompt():
    chains, cache = a_cache(5)
    for prompt in ((1, 2, 3), (1, 2, 4), (9, 8)):
        cache.sent(prompt, LATER)

    assert (chains.runs((1, 2, 3)), chains.runs((1, 2, 4))) == ([(2, 1)], [(3, 1)])


def test_growing_conversation_is_kept_once():
    chains, cache = a_cache(1000)
    for turn in range(1, 100):
        cache.sent(tuple(range(4 * turn)), LATER)
        cache.check()

    assert (len(cache), len(cache.chains()), len(chains.nodes)) == (4 * 99, 1, 1)


def test_listed_keys_of_shared_blocks_are_bounded():
    _, cache = a_cache(100)
    for number in range(50):
        cache.sent((*range(90), 1000 + number), LATER)

    assert len(cache.chains()) == MAX_LISTED_FACTOR * 100 // 91
    cache.check()


def test_too_long_prompt_counts_with_its_beginning():
    chains, cache = a_cache(16)

    cache.sent(range(100), LATER)

    assert chains.runs(range(100)) == [(16, 1)]


def test_unsent_prompts_expire():
    chains, cache = a_cache(100)
    cache.sent((1, 2), LATER)
    cache.sent((3,), Nanos(LATER + SECOND))

    cache.expire(Nanos(LATER - 1))
    assert len(cache) == 3
    cache.expire(LATER)
    assert (len(cache), len(chains)) == (1, 1)


@pytest.mark.parametrize("seed", range(8))
def test_limits_hold_for_any_prompts(seed):
    rng = random.Random(seed)
    chains = RadixTree()
    caches = [AssumedCache(chains, 1 << number, rng.randrange(1, 30)) for number in range(3)]
    for step in range(600):
        path = [rng.randrange(2) for _ in range(rng.randrange(12))]
        keys = tuple(hash((3, *path[: end + 1])) for end in range(len(path)))
        cache = rng.choice(caches)
        if rng.randrange(2):
            cache.sent(keys, Nanos(step + 5))
        else:
            cache.add_earlier(keys, Nanos(step + rng.randrange(5)))
        if step % 7 == 0:
            cache.expire(now := Nanos(step - 20))
            assert all(chain.until > now for chain in cache.chains())
        for each in caches:
            each.check()
            assert each.listed <= MAX_LISTED_FACTOR * each.capacity
        chains.check([chain for each in caches for chain in each.chains()])
    for cache in caches:
        cache.clear()
    assert len(chains) == 0


def test_prompt_of_another_router_keeps_its_age():
    """Announce prompts before and after their workers join: a prompt that is too old counts for no worker."""
    told, later = RouterMachineDriver(), RouterMachineDriver()
    joined = [
        structs.replace(a_joined_worker(name, Role.BOTH), knowledge=Knowledge.APPROXIMATE, believed_for=MINUTE)
        for name in ("a", "b")
    ]
    for event in joined:
        told.send(event)
    for number, age_ms in ((1, 59_000), (2, 61_000)):
        keys = hash_prompt(a_prompt(64, first=1000 * number), joined[0].description.block_tokens, b"")
        placed = tuple(PlacedPrompt(worker_id=WorkerId(name), keys=keys, age_ms=age_ms) for name in ("a", "b"))
        for router in (told, later):
            router.send(PeerPlaced(replica="other", placed=placed))
    for event in joined:
        later.send(event)

    for router in (told, later):
        known = router.machine.assumed_prompts(router.now)
        assert [(each.worker_id, each.age_ms) for each in known] == [("a", 59_000), ("b", 59_000)]
        router.now = Nanos(router.now + SECOND)
        assert router.machine.assumed_prompts(router.now) == []
        for name in ("a", "b"):
            router.send(CacheAged(worker_id=WorkerId(name)))
        assert router.machine.snapshot().index_blocks == 0


@pytest.mark.parametrize("earlier_first", [True, False])
def test_prompt_that_was_sent_again_is_not_made_older(earlier_first):
    _, cache = a_cache(100)
    calls = [lambda: cache.sent((1, 2), LATER), lambda: cache.add_earlier((1, 2), START)]
    for call in reversed(calls) if earlier_first else calls:
        call()
    cache.expire(START)
    assert len(cache) == 2


def test_earlier_prompt_does_not_shorten_the_one_it_continues():
    _, cache = a_cache(100)
    cache.sent((1, 2), LATER)
    cache.add_earlier((1, 2, 3), Nanos(START + SECOND))
    cache.expire(Nanos(START + SECOND))
    assert len(cache) == 3


def test_earlier_prompt_expires_behind_a_later_one():
    """Add a peer's prompt that was sent before the prompts already there: it must expire before them."""
    chains, cache = a_cache(100)
    cache.sent((1, 2), LATER)
    cache.add_earlier((5, 6, 7), START)

    cache.expire(START)

    assert (chains.runs((1, 2)), chains.runs((5, 6, 7))) == ([(2, 1)], [])
    cache.check()


def test_continued_prompt_expires_behind_a_later_one():
    chains, cache = a_cache(100)
    cache.sent((1, 2), START)
    cache.sent((8, 9), LATER)
    cache.add_earlier((1, 2, 3), Nanos(START - SECOND))

    cache.expire(Nanos(START - 1))
    assert chains.runs((1, 2, 3)) == [(3, 1)]
    cache.expire(START)
    assert chains.runs((1, 2, 3)) == []


def test_prompt_returns_to_its_worker_until_expiry():
    router = RouterMachineDriver()
    for name in ("a", "b"):
        joined = a_joined_worker(name, Role.BOTH)
        router.send(structs.replace(joined, knowledge=Knowledge.APPROXIMATE, believed_for=Nanos(60 * SECOND)))

    def went(number: int) -> str:
        work = the(Dispatch, router.send(an_arrival(request_id=f"r{number}", tokens=a_prompt(640))))
        router.step(work, 1, finish=Finish.STOP)
        return work.worker_id

    assert len({went(number) for number in range(20)}) == 1
    assert router.machine.snapshot().index_blocks > 0

    router.now = Nanos(router.now + 60 * SECOND)
    router.send(CacheAged(worker_id=WorkerId("a")))
    router.send(CacheAged(worker_id=WorkerId("b")))
    assert router.machine.snapshot().index_blocks == 0
