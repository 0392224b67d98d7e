"""Worth of a worker's cache: the seconds that it would take to compute again the blocks that no other worker holds."""

import random

import pytest

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.core.roles import Role
from fleet.core.work import KvStored
from fleet.router.kv_index.prefix_index import SAMPLED_BLOCKS, PrefixIndex, engine_cache_holder
from fleet.router.messages import Dispatch, KvChanged, StoreChanged
from kvstore.block import chain
from tests.support.builders import BLOCK_TOKENS, FINGERPRINT, STORE, a_prompt, an_arrival
from tests.support.router.machine_driver import RouterMachineDriver, the

D1, D2, D3 = (WorkerId(name) for name in ("d1", "d2", "d3"))


@pytest.fixture
def router():
    return RouterMachineDriver(*((name, Role.BOTH) for name in (D1, D2, D3)))


def cached(router, worker_id, blocks, first=1):
    hashes = tuple(chain(a_prompt(blocks * BLOCK_TOKENS, first=first), BLOCK_TOKENS))
    router.send(KvChanged(worker_id=worker_id, events=(KvStored(hashes),)))
    return hashes


def worth(router):
    return router.machine.cache_seconds()


def test_blocks_that_another_worker_holds_are_worth_nothing(router):
    cached(router, D1, 40)
    cached(router, D2, 40)
    cached(router, D3, 5, first=1000)

    found = worth(router)

    assert found[D1] == found[D2] == 0.0
    assert found[D3] > 0.0


def test_blocks_in_the_store_count_by_the_time_to_load_them(router):
    hashes = cached(router, D1, 40)
    cached(router, D2, 40, first=1000)
    router.send(StoreChanged(store_id=STORE, fingerprint=FINGERPRINT, stored=hashes))

    found = worth(router)

    assert found[D1] == pytest.approx(0.25 * found[D2])  # store_hit_credit is 0.75


def test_measured_speed_turns_blocks_into_seconds(router):
    """Let a prompt of 320 tokens take 3.2 s, so that each cached token is worth 10 ms."""
    work = the(Dispatch, router.send(an_arrival(tokens=320)))
    router.now = Nanos(router.now + round(3.2 * SECOND))
    router.step(work, 7)

    cached(router, D1, 10, first=5000)

    assert worth(router)[D1] == pytest.approx(10 * BLOCK_TOKENS * 0.01, rel=0.01)


def test_sample_of_a_large_cache_is_near_the_truth():
    source = random.Random(5)
    index = PrefixIndex()
    mine, other = engine_cache_holder(D1), engine_cache_holder(D2)
    for holder in (mine, other):
        index.add(holder, capacity=100_000)
    keys = [source.getrandbits(64) for _ in range(50 * SAMPLED_BLOCKS)]
    index.stored(mine, keys)
    index.stored(other, keys[: len(keys) // 4])

    lost = index.lost_blocks(mine, index.bit(mine) | index.bit(other), 0.25)

    assert lost == pytest.approx(0.75 * len(keys), rel=0.1)
    assert index.lost_blocks(other, index.bit(mine) | index.bit(other), 0.25) == 0.0
