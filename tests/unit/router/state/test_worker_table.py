"""The worker table, compared with a loop over its workers."""

import random

import pytest

from fleet.core.ids import StoreId, WorkerId
from fleet.core.requests import Sampling
from fleet.core.roles import KvPath, Role
from fleet.core.work import KvRemoved, KvStored
from fleet.router import policy as quantity
from fleet.router.kv_index.prefix_index import engine_cache_holder, store_tier_holder
from fleet.router.messages import KvChanged, StoreChanged, WorkerDraining
from fleet.router.state.live_requests import LiveRequest
from fleet.router.state.worker_table import WorkerTable
from kvstore.block import blocks_for, chain
from kvstore.messages import POOL_TIER
from tests.support.builders import a_prompt, an_arrival
from tests.support.router.machine_driver import START, Dispatch, RouterMachineDriver

STORES = (StoreId("s1"), None)
FINGERPRINTS = ("even", "odd")


def by_hand(router: RouterMachineDriver, live: LiveRequest) -> list[list[float]]:
    """Return for each worker, computed one by one: backlog, active, requests, live, new, engine, coming, store and below blocks."""
    registry = router.machine.registry
    found = []
    for worker in registry.serving(live.arrived.model):
        description, reservations = worker.description, worker.reservations
        keys = live.keys(description.block_tokens)
        leading = registry.index.longest(keys)
        engine = leading.get(engine_cache_holder(description.worker_id), 0)
        held = {key for chain in reservations.chains() for key in chain.keys}
        held_for_requests = next((depth for depth, key in enumerate(keys) if key not in held), len(keys))
        memory = below = 0
        if description.store_id is not None and KvPath.STORE in description.kv_paths:
            for tier in (POOL_TIER, "ssd", "redis"):
                holder = store_tier_holder(description.store_id, description.fingerprint, tier)
                depth = leading.get(holder, 0)
                memory, below = (depth, below) if tier == POOL_TIER else (memory, max(below, depth))
        there = max(engine, held_for_requests)
        found.append(
            [
                reservations.prefill_tokens,
                reservations.blocks,
                len(reservations),
                held_for_requests,
                blocks_for(live.prompt_tokens, description.block_tokens) - held_for_requests,
                engine,
                max(0, held_for_requests - engine),
                max(0, memory - there),
                max(0, below - max(there, memory)),
            ]
        )
    return found


LOOKED_AT = [
    quantity.BACKLOG_TOKENS,
    quantity.ACTIVE_BLOCKS,
    quantity.REQUESTS,
    quantity.LIVE_BLOCKS,
    quantity.NEW_BLOCKS,
    quantity.ENGINE_BLOCKS,
    quantity.COMING_BLOCKS,
    quantity.STORE_BLOCKS,
    quantity.BELOW_BLOCKS,
]


@pytest.mark.parametrize("seed", range(12))
def test_worker_table_equals_a_loop_over_workers(seed):
    """Simulate workers with two block sizes, layouts and stores, and caches with holes, while requests arrive, grow and end."""
    rng = random.Random(seed)
    router = RouterMachineDriver(remote_prefill_min_tokens=256, oversubscribe=8.0)
    works: list[Dispatch] = []
    up: list[str] = []
    for step in range(120):
        match rng.randrange(9):
            case 0 if len(up) < 9:
                name = f"w{step}"
                up.append(name)
                router.join(
                    name,
                    rng.choice([Role.DECODE, Role.BOTH, Role.PREFILL]),
                    block_tokens=rng.choice([16, 32]),
                    store_id=rng.choice(STORES),
                    fingerprint=rng.choice(FINGERPRINTS),
                )
            case 1 if len(up) > 3 and rng.random() < 0.3:
                router.leave(up.pop(rng.randrange(len(up))))
            case 2 if up and rng.random() < 0.2:
                router.send(WorkerDraining(worker_id=WorkerId(rng.choice(up))))
            case 3 | 4 if up:
                hashes = tuple(chain(a_prompt(32 * rng.randrange(1, 20)), rng.choice([16, 32])))
                event = KvStored(hashes) if rng.random() < 0.8 else KvRemoved((rng.choice(hashes),))
                router.send(KvChanged(worker_id=WorkerId(rng.choice(up)), events=(event,)))
            case 5:
                hashes = tuple(chain(a_prompt(32 * rng.randrange(1, 20)), rng.choice([16, 32])))
                change = {"stored": hashes} if rng.random() < 0.7 else {"removed": hashes[-3:]}
                tier = rng.choice([POOL_TIER, "ssd", "redis"])
                router.send(StoreChanged(store_id=STORES[0], fingerprint=rng.choice(FINGERPRINTS), tier=tier, **change))
            case 6 if works:
                router.cancel(works.pop(rng.randrange(len(works))).start.request_id.split("#")[0])
            case _:
                prompt = a_prompt(rng.randrange(1, 700)) + a_prompt(rng.randrange(50), first=10_000 * (step + 1))
                arrival = an_arrival(request_id=f"r{step}", tokens=prompt, sampling=Sampling(max_tokens=64))
                works += [command for command in router.send(arrival) if isinstance(command, Dispatch)]
        probe = LiveRequest(arrived=an_arrival(tokens=a_prompt(32 * 18 + 5)), seq=0, since=START)
        candidate_table = router.machine.registry.candidate_table(probe)
        assert candidate_table.columns[LOOKED_AT].T.tolist() == by_hand(router, probe)
        names = [worker.description.worker_id for worker in router.machine.registry.serving(probe.arrived.model)]
        assert list(candidate_table.topology.worker_ids) == names
    assert works, "the history placed something"


def test_data_of_a_decision_never_changes():
    router = RouterMachineDriver(("d1", Role.BOTH), ("d2", Role.BOTH))
    router.send(an_arrival(request_id="r1", tokens=320))
    before = router.machine.explain("r1")

    for number in range(2, 12):
        router.send(an_arrival(request_id=f"r{number}", tokens=320))
    router.send(WorkerDraining(worker_id=WorkerId("d1")))
    router.leave("d2")

    assert router.machine.explain("r1") == before


def test_bits_are_reused():
    router = RouterMachineDriver(("stays", Role.BOTH))
    for number in range(300):
        router.join(f"w{number}", Role.BOTH)
        router.leave(f"w{number}")

    (pool,) = router.machine.registry.tables.values()

    assert isinstance(pool, WorkerTable)
    assert pool.take_bit() == 2


def test_ended_requests_hold_nothing():
    router = RouterMachineDriver(("d1", Role.BOTH), ("d2", Role.BOTH))
    for number in range(8):
        router.send(an_arrival(request_id=f"r{number}", tokens=a_prompt(320) + a_prompt(64, first=1000 * number)))
    (pool,) = router.machine.registry.tables.values()
    assert len(pool.chains) > 10

    router.leave("d1")
    for number in range(8):
        router.cancel(f"r{number}")

    assert len(pool.chains) == 0
