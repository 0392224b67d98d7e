"""What a router of the simulation routes to: workers on nodes, the network and the stores between them, and what happens to them.

Rules:

1. A worker that is lost takes its sequences, its cache and its transfers with it. What it told before arrives, and so does what it
   had generated: tokens would have been sent one by one. Another one comes under its name.
2. A worker that is cut off is given up, and gives up its work, after the silence that routers wait for. It keeps its cache, and
   tells what is in it when it is back.
3. A worker that is to change its role drains, leaves when nothing is left to do, and joins again with its cache. Until then it may
   be told otherwise: the last word counts. A worker that begins, anew or in another role, is heard of `JOIN_MESSAGES` messages later.
4. What else can happen is in `fleet.sim.cluster.faults`; none of it loses a request.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role
from fleet.router.messages import RouterEvent, StoreChanged, WorkerDraining, WorkerLeft
from fleet.sim.cluster.channels import Channel
from fleet.sim.cluster.faults import Fault, NetworkCut, NodeLost, RoleFlip, StoreLost, WorkerLost, WorkerSlow
from fleet.sim.cluster.handoffs import Handoffs, TransferEndpoint
from fleet.sim.cluster.network import LinkName, Network
from fleet.sim.cluster.node_store import AttachedWorker, NodeStore, SimulatedTier, StoreProfile, TierChange
from fleet.sim.cluster.pools import PoolProfile, node_of
from fleet.sim.cluster.prompts import hashes_of
from fleet.sim.cluster.worker import FINGERPRINT, SimulatedRequests, SimulatedWorker, WorkerEnvironment
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import PoolSample

JUST_BEFORE = 1000  # nanoseconds: before a fault, what was generated is on its way
JOIN_MESSAGES = 6
"""Messages, one after the other, from a worker's start until a router knows it: it registers and the router is told; the router
connects, which takes two; it asks, and is answered."""


class SimulatedCluster:
    """Workers by name, those that are up."""

    def __init__(
        self,
        kernel: Kernel,
        requests: SimulatedRequests,
        hear: Callable[[RouterEvent], None],
        *,
        block_tokens: int,
        message_delay: Nanos,
        silence: Nanos,
        store: StoreProfile | None = None,
    ):
        """Nobody is there.

        Args:
            kernel: Its time.
            requests: That workers work for.
            hear: The router's ear. A worker that is there from the beginning is heard at once, all else a message later.
            block_tokens: Of all engines.
            message_delay: Between router and workers, one way.
            silence: After which a router takes a worker for lost.
            store: Of each node; None: there is none.
        """
        self._kernel = kernel
        self._hear = hear
        self._delay = message_delay
        self._silence = silence
        self._network = Network(kernel)
        self._handoffs = Handoffs(kernel, self._network, block_tokens, self._leave_if_idle)
        self._around = WorkerEnvironment(
            kernel=kernel,
            message_delay=message_delay,
            hear=hear,
            handoffs=self._handoffs,
            requests=requests,
            ended=self._leave_if_idle,
        )
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        self._left: list[SimulatedWorker] = []
        self._store = store
        self._stores: dict[StoreId, NodeStore] = {}
        self._shared_tiers = (
            {} if store is None else {tier.name: SimulatedTier(tier) for tier in store.tiers if tier.shared}
        )
        self._stores_say: Channel[RouterEvent] = Channel(kernel, message_delay, hear)
        self.cut = self._cut
        """What a cut is, of a worker and for how long; `fleet.app.agreement.production_world` has another."""

    # Joining.

    def begin(self, profile: PoolProfile) -> None:
        """All workers of a pool join now."""
        for number in range(profile.workers):
            worker_id = WorkerId(f"{profile.name}-{number}")
            self._join(profile, worker_id, node_of(profile, number), profile.role, 1, self._kernel.now())

    def _join(
        self, profile: PoolProfile, worker_id: WorkerId, node: StoreId, role: Role, incarnation: int, since: Nanos
    ) -> None:
        attached_worker = None
        if self._store is not None:
            times, load, save = profile.times, LinkName(f"{worker_id} load"), LinkName(f"{worker_id} save")
            attached_worker = AttachedWorker(times=times, load_link=load, save_link=save)
        worker = SimulatedWorker(
            self._around,
            profile,
            worker_id,
            node,
            role=role,
            incarnation=incarnation,
            since=since,
            store=None if self._store is None else self._store_of(node, self._store),
            attached_worker=attached_worker,
        )
        self._workers[worker_id] = worker
        self._network.join(worker_id, profile.bandwidth)
        end = TransferEndpoint(
            engine=worker.engine, bytes_per_token=profile.kv_bytes_per_token, latency=profile.link_latency
        )
        self._handoffs.join(worker_id, end)
        if attached_worker is not None:
            self._network.open(attached_worker.load_link, profile.host_bandwidth)
            self._network.open(attached_worker.save_link, profile.host_bandwidth)
        worker.announce(self._hear)

    def _store_of(self, node: StoreId, profile: StoreProfile) -> NodeStore:
        if (store := self._stores.get(node)) is None:
            store = NodeStore(self._kernel, self._network, node, profile, self._shared_tiers, self._store_changed)
            self._stores[node] = store
        return store

    def _store_changed(self, store: NodeStore, tier: SimulatedTier, changed: TierChange) -> None:
        stores = [each for each in self._stores.values() if each.up] if tier.profile.shared else [store]
        for each in stores:
            self._stores_say.say(
                StoreChanged(
                    store_id=each.id,
                    fingerprint=FINGERPRINT,
                    tier=changed.tier,
                    stored=hashes_of(changed.stored),
                    removed=hashes_of(changed.removed),
                    reset=changed.reset,
                )
            )

    # What happens.

    def fail(self, fault: Fault) -> None:
        """Have something happen in time. What it happens to may be gone then, and nothing happens."""
        if isinstance(fault, WorkerLost | NodeLost | NetworkCut):
            self._kernel.at(max(0, fault.at - JUST_BEFORE), partial(self._tell_progress, fault))
        self._kernel.at(fault.at, partial(self._happen, fault))

    def _tell_progress(self, fault: WorkerLost | NodeLost | NetworkCut) -> None:
        for worker in list(self._workers.values()):
            if worker.node == fault.node if isinstance(fault, NodeLost) else worker.id == fault.worker:
                worker.tell_progress()

    def _happen(self, fault: Fault) -> None:
        if isinstance(fault, NodeLost | StoreLost):
            if isinstance(fault, NodeLost):
                for lost in [worker for worker in self._workers.values() if worker.node == fault.node]:
                    self._die(lost, fault.down, lost.profile.start_time)
            if (store := self._stores.get(fault.node)) is not None:
                store.go()
                self._kernel.after(fault.down, store.come)
            return
        if (worker := self._workers.get(fault.worker)) is None:
            return
        match fault:
            case WorkerLost():
                self._die(worker, fault.down, worker.profile.start_time if fault.start is None else fault.start)
            case WorkerSlow():
                worker.engine.slow(fault.factor)
                self._kernel.after(fault.lasting, partial(worker.engine.recover, fault.factor))
            case NetworkCut():
                self.cut(worker, fault.lasting)
            case RoleFlip() if worker.flips_to is not None:
                worker.flips_to = fault.role  # it drains already, and that once is enough
            case RoleFlip() if fault.role is worker.role:
                pass
            case RoleFlip():
                worker.flips_to = fault.role
                worker.to_router.say(WorkerDraining(worker_id=worker.id))
                self._leave_if_idle(worker.id)
            case _:
                assert_never(fault)

    def _die(self, worker: SimulatedWorker, down: Nanos, start: Nanos) -> None:
        del self._workers[worker.id]
        gone = worker.until = self._kernel.now()
        worker.engine.stop()
        self._left.append(worker)
        self._network.leave(worker.id)
        self._handoffs.leave(worker.id)
        if worker.attached_worker is not None:
            self._network.close(worker.attached_worker.load_link)
            self._network.close(worker.attached_worker.save_link)
        worker.to_router.forget()
        worker.to_router.restore()  # nobody hears of a cut any more
        if not worker.away:
            worker.to_router.say(WorkerLeft(worker_id=worker.id))
        begun = Nanos(gone + down)
        heard = gone + self._delay + 1  # only then another may come: the router goes by names
        role = worker.flips_to or worker.role
        successor = partial(self._join, worker.profile, worker.id, worker.node, role, worker.incarnation + 1, begun)
        self._kernel.at(max(begun + start + JOIN_MESSAGES * self._delay, heard), successor)

    def _cut(self, worker: SimulatedWorker, lasting: Nanos) -> None:
        if worker.to_router.is_cut:
            return
        worker.to_router.cut()
        worker.from_router.cut()
        if lasting > self._silence:
            self._kernel.after(self._silence, partial(self._lose_touch, worker))
        self._kernel.after(lasting, partial(self._regain_touch, worker, lasting > self._silence))

    def _lose_touch(self, worker: SimulatedWorker) -> None:
        """Router and worker give each other up."""
        if worker.until is None:
            worker.give_up_all()
            self._hear(WorkerLeft(worker_id=worker.id))

    def _regain_touch(self, worker: SimulatedWorker, was_lost: bool) -> None:
        if worker.until is not None:
            return
        if was_lost:
            worker.to_router.forget()
        worker.to_router.restore()
        worker.from_router.restore()
        if was_lost and not worker.away:
            worker.announce(worker.to_router.say)
            self._leave_if_idle(worker.id)

    def _leave_if_idle(self, worker_id: WorkerId) -> None:
        """A worker that drains leaves, once it has nothing left to do in its old role."""
        worker = self._workers.get(worker_id)
        if worker is None or worker.flips_to is None or worker.away or not worker.engine.idle:
            return
        worker.away = True
        worker.to_router.say(WorkerLeft(worker_id=worker.id))
        announced = (JOIN_MESSAGES - 1) * self._delay + 1  # and heard a message later
        self._kernel.after(announced, partial(self._begin_anew, worker))

    def _begin_anew(self, worker: SimulatedWorker) -> None:
        """In its new role."""
        if worker.until is not None:
            return  # it died meanwhile
        assert worker.flips_to is not None
        worker.role, worker.flips_to, worker.away = worker.flips_to, None, False
        worker.incarnation += 1
        worker.announce(worker.to_router.say)

    # Looks from outside.

    def get(self, worker_id: WorkerId) -> SimulatedWorker | None:
        """A worker that is up."""
        return self._workers.get(worker_id)

    def __iter__(self) -> Iterator[SimulatedWorker]:
        """Those that are up."""
        return iter(self._workers.values())

    def ever(self) -> list[SimulatedWorker]:
        """All that were ever there, those that have left first."""
        return [*self._left, *self._workers.values()]

    @property
    def moved_bytes(self) -> float:
        """Between workers."""
        return self._network.moved_bytes

    @property
    def held(self) -> int:
        """Pieces of work on workers."""
        return sum(worker.engine.held for worker in self)

    @property
    def kv_share(self) -> float:
        """Of all blocks, those that sequences hold."""
        blocks = sum(worker.profile.limits.kv_blocks for worker in self)
        return sum(worker.engine.kv_blocks_used for worker in self) / blocks if blocks else 0.0

    def pools(self) -> tuple[PoolSample, ...]:
        """How each pool stands now."""
        pools: dict[str, list[SimulatedWorker]] = {}
        for worker in self:
            pools.setdefault(worker.profile.name, []).append(worker)
        return tuple(
            PoolSample(
                name=name,
                workers=len(workers),
                running=sum(worker.engine.held for worker in workers),
                waiting=sum(worker.engine.waiting for worker in workers),
                kv_share=sum(worker.engine.kv_blocks_used for worker in workers)
                / sum(worker.profile.limits.kv_blocks for worker in workers),
            )
            for name, workers in pools.items()
        )

    def check(self, *, idle: bool) -> None:
        """Assert that all books are in order; with nothing to do, that nothing is held."""
        for worker in self:
            worker.engine.check()
            if idle:
                assert not worker.engine.held, worker.id
                assert not worker.engine.kv_blocks_used, worker.id
        for store in self._stores.values():
            store.check()
