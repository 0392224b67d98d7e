"""Simulated cluster: contains workers on nodes, their network and stores, and lets faults happen to them.

Rules:

1. A worker that dies loses its sequences, its cache and its transfers. Events that it sent before its death still arrive, unless its
   network was cut. All tokens that it had generated arrive too, because a real worker sends each token at once. A new worker starts under
   the same name.
2. A worker whose network is cut for longer than the router's heartbeat timeout counts as lost at the router, and drops
   its attempts. It keeps its cache, and sends the cache's content to the router after the cut.
3. To change its role, a worker drains, leaves when it is idle, and joins again in the new role with its cache. If
   another change of role is requested before it has joined again, that change replaces the first one. The router knows
   a worker `JOIN_MESSAGES` message delays after it has started, or has left to take another role. The router knows the
   first workers (`SimulatedCluster.begin`) at once.
4. A worker that has to leave for good drains, and leaves when it is idle. If it dies during the drain, no new worker
   starts.
5. `fleet.sim.cluster.faults` lists all faults. No fault loses a request as long as another worker can serve it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role
from fleet.router.messages import RouterEvent, StoreChanged, WorkerDraining, WorkerLeft
from fleet.sim.cluster.block_names import hashes_of
from fleet.sim.cluster.channels import Channel
from fleet.sim.cluster.faults import Fault, NetworkCut, NodeLost, RoleFlip, StoreLost, WorkerLost, WorkerSlow
from fleet.sim.cluster.handoffs import Handoffs, TransferEndpoint
from fleet.sim.cluster.network import LinkName, Network
from fleet.sim.cluster.node_store import AttachedWorker, NodeStore, StoreProfile, TierChange
from fleet.sim.cluster.pools import PoolProfile, node_of, worker_id_of
from fleet.sim.cluster.store_tiers import SimulatedTier
from fleet.sim.cluster.worker import FINGERPRINT, SimulatedRequests, SimulatedWorker, WorkerEnvironment
from fleet.sim.kernel import Kernel, ScheduledEvent
from fleet.sim.results.outcomes import PoolSample

# Number of nanoseconds before a fault at which the affected workers send their progress, so that all generated tokens
# arrive at the router.
JUST_BEFORE = 1000
JOIN_MESSAGES = 6
"""Number of message delays from a worker's start until a router knows the worker.

The worker registers (1), the router is informed (1) and connects (2), the router requests the description (1), and the
worker answers (1).
"""


class SimulatedCluster:
    """Manages the workers and stores of a simulated cluster: starts and removes them, and makes them fail."""

    def __init__(
        self,
        kernel: Kernel,
        requests: SimulatedRequests,
        to_router: Callable[[RouterEvent], None],
        *,
        block_tokens: int,
        message_delay: Nanos,
        silence: Nanos,
        store: StoreProfile | None = None,
    ):
        """Create a cluster without workers.

        `to_router` delivers an event to the router without a delay. The cluster calls `to_router` directly if a new worker joins, or if a
        worker is given up. All other events take a message delay first. `silence` is the router's heartbeat timeout: the router gives up
        a worker whose network is cut for longer than this.
        """
        self._kernel = kernel
        self._to_router = to_router
        self._delay = message_delay
        self._silence = silence
        self._network = Network(kernel)
        self._handoffs = Handoffs(kernel, self._network, block_tokens, self._leave_if_idle)
        self._environment = WorkerEnvironment(
            kernel=kernel,
            message_delay=message_delay,
            to_router=to_router,
            handoffs=self._handoffs,
            requests=requests,
            attempts_ended=self._leave_if_idle,
        )
        self._workers: dict[WorkerId, SimulatedWorker] = {}
        self._left: list[SimulatedWorker] = []
        self._store = store
        self._stores: dict[StoreId, NodeStore] = {}
        shared = () if store is None else (tier for tier in store.tiers if tier.shared)
        self._shared_tiers = {tier.name: SimulatedTier(tier) for tier in shared}
        self._stores_to_router: Channel[RouterEvent] = Channel(kernel, message_delay, to_router)
        self.cut = self._cut
        """Function that cuts the network of a worker for a time. `fleet.app.agreement.production_world` sets another
        function."""
        self.left: Callable[[WorkerId], None] = _ignore
        """Function that is called with the id of each worker that has left and will not return."""

    # Joining.

    def begin(self, profile: PoolProfile) -> None:
        """Add all workers of a pool now, without the duration of a start."""
        for number in range(profile.workers):
            worker_id = worker_id_of(profile, number)
            self._join(profile, worker_id, node_of(profile, number), profile.role, 1, self._kernel.now())

    def _join(
        self, profile: PoolProfile, worker_id: WorkerId, node: StoreId, role: Role, incarnation: int, since: Nanos
    ) -> None:
        attached_worker = None
        if self._store is not None:
            load, save = LinkName(f"{worker_id} load"), LinkName(f"{worker_id} save")
            attached_worker = AttachedWorker(times=profile.times, load_link=load, save_link=save)
        worker = SimulatedWorker(
            self._environment,
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
        endpoint = TransferEndpoint(
            engine=worker.engine, bytes_per_token=profile.kv_bytes_per_token, latency=profile.link_latency
        )
        self._handoffs.join(worker_id, endpoint)
        if attached_worker is not None:
            self._network.open(attached_worker.load_link, profile.host_bandwidth)
            self._network.open(attached_worker.save_link, profile.host_bandwidth)
        worker.announce(self._to_router)

    def _store_of(self, node: StoreId, profile: StoreProfile) -> NodeStore:
        if (store := self._stores.get(node)) is None:
            store = NodeStore(self._kernel, self._network, node, profile, self._shared_tiers, self._store_changed)
            self._stores[node] = store
        return store

    def _store_changed(self, store: NodeStore, tier: SimulatedTier, change: TierChange) -> None:
        stores = [each for each in self._stores.values() if each.up] if tier.profile.shared else [store]
        for each in stores:
            self._stores_to_router.send(
                StoreChanged(
                    store_id=each.id,
                    fingerprint=FINGERPRINT,
                    tier=change.tier,
                    stored=hashes_of(change.stored),
                    removed=hashes_of(change.removed),
                    reset=change.reset,
                )
            )

    # Pools that grow and shrink.

    def start(
        self, profile: PoolProfile, number: int, start: Nanos, joined: Callable[[WorkerId], None]
    ) -> ScheduledEvent:
        """Begin to start one worker, and call `joined` when the router knows the worker.

        The router knows the worker after the duration `start` and the message delays of joining. Until then, the caller
        can cancel the start by cancelling the returned event.
        """
        worker_id, node, since = worker_id_of(profile, number), node_of(profile, number), self._kernel.now()

        def join() -> None:
            self._join(profile, worker_id, node, profile.role, 1, since)
            joined(worker_id)

        return self._kernel.after(start + JOIN_MESSAGES * self._delay, join)

    def drain(self, worker_id: WorkerId) -> None:
        """Let a worker finish its attempts and then leave; from now on it takes no new attempts."""
        worker = self._workers[worker_id]
        if worker.leaves:
            return
        worker.leaves = True
        if worker.away:
            self._remove(worker)
            return
        if worker.flips_to is None:
            worker.to_router.send(WorkerDraining(worker_id=worker.id))
        self._leave_if_idle(worker.id)

    def end(self, worker_id: WorkerId) -> None:
        """Remove a worker at once, if it is up; the router repeats the worker's attempts on other workers."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.leaves = True
            worker.report_progress()
            if worker.until is None:
                self._remove(worker)

    # Faults.

    def fail(self, fault: Fault) -> None:
        """Schedule a fault. The fault has no effect if its worker or node does not exist at the instant of the fault."""
        if isinstance(fault, WorkerLost | NodeLost | NetworkCut):
            self._kernel.at(max(0, fault.at - JUST_BEFORE), partial(self._report_progress, fault))
        self._kernel.at(fault.at, partial(self._happen, fault))

    def _report_progress(self, fault: WorkerLost | NodeLost | NetworkCut) -> None:
        for worker in list(self._workers.values()):
            if worker.node == fault.node if isinstance(fault, NodeLost) else worker.id == fault.worker:
                worker.report_progress()

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
            case RoleFlip() if worker.leaves:
                pass
            case RoleFlip() if worker.flips_to is not None:
                # the worker already drains for an earlier change of its role; the new change replaces that one
                worker.flips_to = fault.role
            case RoleFlip() if fault.role is worker.role:
                pass
            case RoleFlip():
                worker.flips_to = fault.role
                worker.to_router.send(WorkerDraining(worker_id=worker.id))
                self._leave_if_idle(worker.id)
            case _:
                assert_never(fault)

    def _die(self, worker: SimulatedWorker, down: Nanos, start: Nanos) -> None:
        gone = self._kernel.now()
        self._remove(worker)
        if worker.leaves:
            return
        begun = Nanos(gone + down)
        # The new worker has the same id. So the router must have received WorkerLeft before the new worker is announced.
        known = gone + self._delay + 1
        role = worker.flips_to or worker.role
        successor = partial(self._join, worker.profile, worker.id, worker.node, role, worker.incarnation + 1, begun)
        self._kernel.at(max(begun + start + JOIN_MESSAGES * self._delay, known), successor)

    def _remove(self, worker: SimulatedWorker) -> None:
        """Remove a worker with its attempts and transfers.

        Send WorkerLeft to the router, unless the worker has already left to change its role.
        """
        del self._workers[worker.id]
        worker.until = self._kernel.now()
        worker.engine.stop()
        self._left.append(worker)
        self._network.leave(worker.id)
        self._handoffs.leave(worker.id)
        if worker.attached_worker is not None:
            self._network.close(worker.attached_worker.load_link)
            self._network.close(worker.attached_worker.save_link)
        worker.to_router.drop_held()
        worker.to_router.restore()
        if not worker.away:
            worker.to_router.send(WorkerLeft(worker_id=worker.id))
        if worker.leaves:
            self.left(worker.id)

    def _cut(self, worker: SimulatedWorker, lasting: Nanos) -> None:
        if worker.to_router.is_cut:
            return
        worker.to_router.cut()
        worker.from_router.cut()
        if lasting > self._silence:
            self._kernel.after(self._silence, partial(self._give_up, worker))
        self._kernel.after(lasting, partial(self._reconnect, worker, was_given_up=lasting > self._silence))

    def _give_up(self, worker: SimulatedWorker) -> None:
        """Drop the attempts of a worker whose network is cut, and report to the router that the worker has left."""
        if worker.until is None:
            worker.drop_all()
            self._to_router(WorkerLeft(worker_id=worker.id))

    def _reconnect(self, worker: SimulatedWorker, *, was_given_up: bool) -> None:
        if worker.until is not None:
            return
        if was_given_up:
            worker.to_router.drop_held()
        worker.to_router.restore()
        worker.from_router.restore()
        if was_given_up and not worker.away:
            worker.announce(worker.to_router.send)
            self._leave_if_idle(worker.id)

    def _leave_if_idle(self, worker_id: WorkerId) -> None:
        """If a worker drains and is idle now, let it leave. Do nothing for other workers."""
        worker = self._workers.get(worker_id)
        if worker is None or not worker.draining or worker.away or not worker.engine.idle:
            return
        if worker.leaves:
            self._remove(worker)
            return
        worker.away = True
        worker.to_router.send(WorkerLeft(worker_id=worker.id))
        # JOIN_MESSAGES - 1, because `announce` sends a message, which takes the last delay
        announced = (JOIN_MESSAGES - 1) * self._delay + 1
        self._kernel.after(announced, partial(self._begin_role, worker))

    def _begin_role(self, worker: SimulatedWorker) -> None:
        """Let a worker join again in its new role."""
        if worker.until is not None:
            return  # the worker has died meanwhile
        assert worker.flips_to is not None
        worker.role, worker.flips_to, worker.away = worker.flips_to, None, False
        worker.incarnation += 1
        worker.announce(worker.to_router.send)

    # Observation.

    def get(self, worker_id: WorkerId) -> SimulatedWorker | None:
        """Return the worker with an id, or None if no worker with this id is up."""
        return self._workers.get(worker_id)

    def __iter__(self) -> Iterator[SimulatedWorker]:
        """Iterate over the workers that are up."""
        return iter(self._workers.values())

    def ever(self) -> list[SimulatedWorker]:
        """Return all workers that have ever been up; those that are not up any more come first."""
        return [*self._left, *self._workers.values()]

    @property
    def moved_bytes(self) -> float:
        """Number of bytes of all transfers between workers so far, including lost ones and those under way."""
        return self._network.moved_bytes

    @property
    def held(self) -> int:
        """Number of attempts that have not ended, on all workers together."""
        return sum(worker.engine.held for worker in self)

    @property
    def kv_share(self) -> float:
        """Share of the KV blocks of all workers that attempts and handoffs use, from 0 to 1. Idle blocks of prefix caches do not count."""
        blocks = sum(worker.profile.limits.kv_blocks for worker in self)
        return sum(worker.engine.kv_blocks_used for worker in self) / blocks if blocks else 0.0

    def pools(self) -> tuple[PoolSample, ...]:
        """Return the present state of each pool."""
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
        """Assert that engines and stores are consistent. If `idle`, also assert that no worker has an attempt or a used block."""
        for worker in self:
            worker.engine.check()
            if idle:
                assert not worker.engine.held, worker.id
                assert not worker.engine.kv_blocks_used, worker.id
        for store in self._stores.values():
            store.check()


def _ignore(_: WorkerId) -> None:
    """Ignore the departure of a worker; this is the default of `SimulatedCluster.left`."""
