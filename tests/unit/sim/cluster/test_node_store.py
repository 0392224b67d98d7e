"""Simulated store: the content of its tiers, which loads are faster than computing, and what the router learns."""

from functools import partial

import pytest
from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Phase, Role
from fleet.router.messages import Arrived, Dispatch, StoreChanged
from fleet.sim.cluster.faults import NodeLost, RoleFlip, StoreLost
from fleet.sim.cluster.network import LinkName, Network
from fleet.sim.cluster.node_store import AttachedWorker, NodeStore, StoreProfile, TierChange
from fleet.sim.cluster.store_tiers import SimulatedTier, TierProfile
from fleet.sim.kernel import Kernel
from kvstore.eviction.policies import policy as named
from kvstore.eviction.trace_replay import TraceRequest, replay
from kvstore.messages import POOL_TIER
from tests.support.sim.worlds import BLOCK, LinearStepTimes, a_plan, a_pool, a_run, a_world

POOL = TierProfile(name=POOL_TIER, blocks=1000)
NODE = StoreId("both-node-0")


def a_store(*tiers: TierProfile, block_bytes: float = 1e4) -> StoreProfile:
    return StoreProfile(tiers=tiers or (POOL,), block_bytes=block_bytes, block_tokens=BLOCK)


def a_tier(**fields: object) -> TierProfile:
    return TierProfile(**{"name": "ssd", "blocks": 1000, "read_bandwidth": 1e9, "write_bandwidth": 1e9, **fields})


class Node:
    """A store with one worker, whose links carry a thousand blocks a second."""

    def __init__(self, *tiers: TierProfile, **profile: float):
        self.kernel = Kernel(1)
        network = Network(self.kernel)
        self.told: list[tuple[str, TierChange]] = []
        made = a_store(*tiers, **profile)
        self.store = NodeStore(self.kernel, network, NODE, made, {}, lambda _, tier, changed: self._tell(tier, changed))
        self.attached_worker = AttachedWorker(
            times=LinearStepTimes(), load_link=LinkName("load"), save_link=LinkName("save")
        )
        network.open(self.attached_worker.load_link, 1e7)
        network.open(self.attached_worker.save_link, 1e7)
        self.came: list[object] = []

    def _tell(self, tier: SimulatedTier, changed: TierChange) -> None:
        self.told.append((tier.profile.name, changed))

    def save(self, *keys: int) -> None:
        self.store.save(self.attached_worker, keys)
        self.kernel.run()

    def load(self, *keys: int, here: int = 0) -> int:
        """Load the blocks that the store offers, wait for them, and return their number; the engine has the first `here` blocks."""
        offered = self.store.offer(self.attached_worker, keys, here) - here
        if offered:
            self.store.load(self.attached_worker, keys, here, self.came.append)
            self.kernel.run()
            self.store.check()
        return offered

    @property
    def pool(self) -> list[int]:
        return sorted(self.store.tiers[0].names())


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "slru", "hazard"])
def test_tier_hits_and_evicts_like_kvstore_policies(policy):
    chains = [tuple(10 * (number % 7 * number % 5) + index for index in range(1 + number % 6)) for number in range(80)]
    requests = [
        TraceRequest(Nanos(number * 10 * SECOND), len(chain) * BLOCK, chain) for number, chain in enumerate(chains)
    ]
    tier = SimulatedTier(TierProfile(name="ssd", blocks=20, policy=policy))
    hits = written = 0
    for request in requests:
        held = 0
        while held < len(request.chain) and request.chain[held] in tier:
            held += 1
        hits += held * BLOCK
        tier.pin(request.chain[:held])
        tier.unpin(request.chain[:held], request.arrival)
        written += len(tier.put(request.chain, request.arrival)[0])
        tier.check()
    expected = replay(requests, named(policy), capacity_blocks=20, block_tokens=BLOCK)
    assert hits == expected.hit_tokens
    assert written == expected.blocks_written


def test_saved_blocks_are_in_pool_after_copy():
    node = Node()
    node.store.save(node.attached_worker, (1, 2, 3, 4, 5))
    node.kernel.run(until=Nanos(SECOND // 250))
    assert node.pool == []
    node.kernel.run()
    assert node.kernel.now() == pytest.approx(SECOND / 200, rel=1e-6)
    assert node.pool == [1, 2, 3, 4, 5]
    assert node.told == [(POOL_TIER, TierChange(POOL_TIER, [1, 2, 3, 4, 5], []))]


def test_saved_or_saving_blocks_are_not_copied_again():
    node = Node()
    node.store.save(node.attached_worker, (1, 2))
    node.store.save(node.attached_worker, (1, 2, 3))
    node.kernel.run()
    node.save(1, 2, 3)
    assert [list(changed.stored) for _, changed in node.told] == [[3], [1, 2]]


def test_load_takes_missing_leading_blocks():
    node = Node()
    node.save(1, 2, 3, 5)
    assert node.load(1, 2, 3, 4, 5, here=1) == 2
    assert node.came == [{POOL_TIER: 2 * BLOCK}]


def test_blocks_are_not_loaded_if_computing_is_faster():
    # Computing a block of 16 tokens takes 0.3 ms, and a step 2 ms more; loading a block takes 1 ms.
    node = Node()
    node.save(*range(100))
    assert node.load(*range(2)) == 2
    assert node.load(*range(50)) == 0


def test_tiers_load_in_parallel_and_promote_to_pool():
    node = Node(TierProfile(name=POOL_TIER, blocks=4), a_tier(), block_bytes=1e3)
    node.save(1, 2, 3, 4)
    node.save(11, 12, 13, 14)
    assert node.pool == [11, 12, 13, 14]
    node.save(1, 2)
    assert node.load(1, 2, 3, 4) == 4
    assert node.came == [{POOL_TIER: 2 * BLOCK, "ssd": 2 * BLOCK}]
    assert node.pool == [1, 2, 3, 4]


def test_same_prompts_hit_each_tier_in_turn():
    node = Node(TierProfile(name=POOL_TIER, blocks=2), a_tier(blocks=4), a_tier(name="remote"), block_bytes=1e3)
    for first in (1, 11, 21):
        node.save(first, first + 1)
    for first in (21, 11, 1):
        node.load(first, first + 1)
    assert node.came == [{POOL_TIER: 2 * BLOCK}, {"ssd": 2 * BLOCK}, {"remote": 2 * BLOCK}]


def test_reuse_admission_writes_only_seen_blocks():
    node = Node(POOL, a_tier(admission="reuse"))
    node.save(1, 2)
    assert [tier for tier, _ in node.told] == [POOL_TIER]
    node.kernel.at(Nanos(10 * SECOND), lambda: None)
    node.kernel.run()
    node.load(1, 2)
    assert [(tier, list(changed.stored)) for tier, changed in node.told] == [(POOL_TIER, [1, 2]), ("ssd", [1, 2])]


def test_loading_blocks_are_not_evicted():
    node = Node(TierProfile(name=POOL_TIER, blocks=2))
    node.save(1, 2)
    node.store.load(node.attached_worker, (1, 2), 0, node.came.append)
    node.save(3)  # arrives when the load is half done
    assert node.pool == [1, 2]  # there was no room
    assert node.came == [{POOL_TIER: 2 * BLOCK}]
    node.store.check()
    node.save(3)
    assert node.pool == [1, 3]


def test_lost_store_returns_with_its_disk():
    node = Node(POOL, a_tier(), block_bytes=1e3)
    node.save(1, 2)
    node.store.save(node.attached_worker, (3,))
    node.store.load(node.attached_worker, (1, 2), 0, node.came.append)
    saved: list[str] = []
    node.store.when_saved((3,), partial(saved.append, "over"))
    node.kernel.run(until=Nanos(node.kernel.now() + 1000))
    node.store.go()
    node.kernel.run()
    assert node.came == [None]
    assert saved == ["over"]
    assert node.load(1, 2) == 0
    node.store.come()
    assert node.told[-2:] == [(POOL_TIER, TierChange(POOL_TIER, reset=True)), ("ssd", TierChange("ssd", stored=[1, 2]))]
    assert node.load(1, 2) == 2
    assert node.came[-1] == {"ssd": 2 * BLOCK}


# The store in a cluster.


def returning(world, kernel, turns: int = 3) -> None:
    """Send twelve prompts of 17 blocks, each `turns` times; two engines of 60 blocks cannot keep them all."""
    for number in range(12 * turns):
        chain = tuple(1000 * (number % 12) + index for index in range(17))
        at = Nanos(number * SECOND // 2)
        kernel.at(at, partial(world.send, TraceRequest(at, 17 * BLOCK, chain, 4)))
    kernel.run()
    world.check()


def test_store_serves_evicted_blocks_and_reports_tier():
    small = a_pool(kv_blocks=60)
    given = {"requests": 300, "prefixes": 12, "prefix_tokens": 17 * BLOCK, "spread": 0.0, "output_tokens": 4}
    without = a_run(a_plan(small), **given).outcome
    with_store = a_run(a_plan(small, store=a_store(POOL)), **given).outcome
    assert without.hit_rate_by_tier.keys() == {"gpu"}
    assert with_store.hit_rate > without.hit_rate + 0.1
    assert with_store.hit_rate_by_tier[POOL_TIER] > 0.1
    assert sum(with_store.hit_rate_by_tier.values()) == pytest.approx(with_store.hit_rate, abs=1e-4)
    assert not with_store.refused


def test_router_learns_content_of_each_tier():
    kernel = Kernel(1)
    heard: list[StoreChanged] = []

    def record(_: Nanos, event: object, __: object) -> None:
        if isinstance(event, StoreChanged):
            heard.append(event)

    plan = a_plan(a_pool(kv_blocks=60), store=a_store(POOL, a_tier()))
    world, ended = a_world(kernel, plan, record)
    returning(world, kernel)
    assert len(ended) == 36
    assert {event.tier for event in heard} == {POOL_TIER, "ssd"}
    stores = {(each.tier, each.blocks) for each in world.machine.snapshot().stores}
    assert stores == {(POOL_TIER, 12 * 17), ("ssd", 12 * 17)}


def test_router_prefers_node_whose_store_has_prompt():
    kernel = Kernel(1)
    placed: dict[tuple[int, ...], list[WorkerId]] = {}

    def record(_: Nanos, event: object, commands: list[object]) -> None:
        if isinstance(event, Arrived):
            placed.setdefault(event.keys[BLOCK], []).append(commands[0].worker_id)

    pools = [structs.replace(a_pool(workers=1, kv_blocks=60), name=name) for name in ("one", "two")]
    world, ended = a_world(kernel, a_plan(*pools, store=a_store(POOL)), record)
    returning(world, kernel, turns=2)
    assert len(placed) == 12
    assert {len(set(workers)) for workers in placed.values()} == {1}
    assert {workers[0] for workers in placed.values()} == {"one-0", "two-0"}
    again = ended[12:]
    assert len(again) == 12
    assert all(each.tier_tokens == {POOL_TIER: 16 * BLOCK} for each in again)


def test_shared_tier_is_reported_for_every_node():
    kernel = Kernel(1)
    remote = a_tier(name="remote", shared=True)
    pools = (a_pool(Role.BOTH, 1, kv_blocks=60), a_pool(Role.DECODE, 1, kv_blocks=60))
    world, _ = a_world(kernel, a_plan(*pools, store=a_store(POOL, remote)))
    returning(world, kernel)
    blocks = {(each.store_id, each.blocks) for each in world.machine.snapshot().stores if each.tier == "remote"}
    assert blocks == {(NODE, 12 * 17), (StoreId("decode-node-0"), 12 * 17)}


def test_workers_of_one_node_hand_off_through_store():
    kernel = Kernel(1)
    begun: list[Dispatch] = []

    def record(_: Nanos, __: object, commands: list[object]) -> None:
        begun.extend(command for command in commands if isinstance(command, Dispatch))

    pool = a_pool(Role.BOTH, 3)
    plan = a_plan(pool, store=a_store(POOL), remote_prefill_min_tokens=100)
    world, ended = a_world(kernel, plan, record)
    world.fail(RoleFlip(at=Nanos(0), worker=WorkerId("both-0"), role=Role.PREFILL))
    kernel.run()
    begun.clear()
    returning(world, kernel, turns=1)
    assert [(each.refused, each.output_tokens) for each in ended] == [("", 4)] * 12
    decodes = [command.start for command in begun if command.start.phase is Phase.DECODE]
    assert {start.handoff.kv_path.value for start in decodes} == {"store"}
    assert {each.cached_tokens for each in ended} == {0}
    # For each prompt, the decode worker computes only the token that the prefill worker has sampled.
    computed = [engine.computed_tokens for _, _, engine in world.workers()]
    assert computed[0] == 12 * 17 * BLOCK
    assert sum(computed[1:]) == 12


@pytest.mark.parametrize(
    "fault",
    [
        StoreLost(at=Nanos(5 * SECOND), node=NODE, down=Nanos(4 * SECOND)),
        NodeLost(at=Nanos(5 * SECOND), node=NODE, down=Nanos(4 * SECOND)),
    ],
)
def test_lost_store_loses_no_request(fault):
    kernel = Kernel(1)
    pool = structs.replace(a_pool(workers=4, kv_blocks=60), gpus=4)  # two workers per node
    plan = a_plan(pool, store=a_store(POOL, a_tier(read_bandwidth=1e6)))
    world, ended = a_world(kernel, plan)
    world.fail(fault)
    returning(world, kernel)
    assert [(each.refused, each.output_tokens) for each in ended] == [("", 4)] * 36
