"""Operator server: informers fill caches, a work queue holds changed keys, and the leader's controller reconciles them.

Rules:

1. When an object changes, only the keys of the custom objects that it affects are enqueued. A reconcile reads the
   caches. From the API server it reads only the operator's Secret, an existing object that has taken the name of a new
   child object, and, if a worker group has to be placed, all nodes and pods. After a reconcile that has written
   something, the key is reconciled again until nothing is left to write. The next reconcile starts at once; after many
   reconciles with writes in a row, it starts a second later.
2. Every process fills all caches, even if it does not lead. So a new leader knows all objects, and it reconciles all
   deployments at once.
3. Only one reconcile of a deployment runs at a time. A failed reconcile is repeated after a pause that grows with each
   failure. The pause does not delay other deployments.
4. When the operator stops, it first waits until running reconciles have finished, but at most `STOP_SECONDS`. Then it
   gives the Lease back, so that another operator can lead at once. No deployment changes because the operator stops.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.informer import Informer
from fleet.net.kubernetes.kinds import ApiKind, OptionalKinds
from fleet.net.kubernetes.leader import LeaseLeader
from fleet.net.kubernetes.ports import (
    ApiServerBusy,
    KubernetesApi,
    KubernetesError,
    ObjectConflict,
    ObjectMissing,
    WallClock,
)
from fleet.net.kubernetes.views import VIEW_OF_KIND, CustomObject, KubernetesLease, NamedObject, Pod
from operators.controller.applier import Applier, NotLeading
from operators.controller.control_secrets import ControlSecrets
from operators.controller.loop import Controller
from operators.controller.room_reader import RoomReader
from operators.controller.work_queue import IMMEDIATELY, WorkQueue
from operators.keys import ReconcileKey, deployment_key
from operators.observed.caches import InformerCaches, affected_keys, all_keys
from operators.observed.observe import conditions_of, routers_of
from operators.observed.registrations import SELECTOR
from operators.observed.router_poller import RouterPoller, RouterReports
from operators.probes.prober import Prober, ProbeSender
from operators.settings import OperatorSettings
from operators.telemetry import OperatorMetrics, ReconcileOutcome

log = logging.getLogger(__name__)

DISCOVER_SECONDS = 60.0
RETRY_SECONDS = 1.0
STOP_SECONDS = 10.0
REST_SECONDS = 1.0
STANDBY_SECONDS = 0.05
SELECTORS = {kinds.POD: "app.kubernetes.io/managed-by=fleet-operator", kinds.LEASE: SELECTOR}


class Operator:
    """Runs all loops of one operator process, such as informers, leader election and the controller."""

    def __init__(
        self,
        settings: OperatorSettings,
        cluster: KubernetesApi,
        routers: RouterReports | None,
        leader: LeaseLeader,
        clock: Clock,
        wall: WallClock,
        metrics: OperatorMetrics,
        clients: ProbeSender | None = None,
        *,
        secrets: ControlSecrets,
    ) -> None:
        """Create the operator.

        If `routers` is None, the operator does not ask routers, and only Leases show which workers are registered. If
        `clients` is None, no probes are sent.
        """
        self.store = InformerCaches()
        self.leader = leader
        self._settings = settings
        self._cluster = cluster
        self._clock = clock
        self._wall = wall
        self._metrics = metrics
        self._queue: WorkQueue[ReconcileKey] = WorkQueue(settings.most_objects)
        self._woken = asyncio.Event()
        applier = Applier(cluster, self.store, leader.leads, metrics, settings.identity)
        probe = settings.probe
        self._prober = (
            Prober(clients, probe.at_once, probe.longest_pause_seconds, leader.leads, self._add)
            if clients is not None and probe.enabled
            else None
        )
        self._controller = Controller(
            self.store,
            applier,
            settings.images,
            clock,
            wall,
            self._add,
            self._prober,
            secrets=secrets,
            room=RoomReader(cluster, clock),
            plans_obeyed=settings.plans_obeyed,
        )
        asked = routers is not None and settings.ask_routers
        self._router_poller = (
            RouterPoller(
                routers, self._routers_of, secrets.of, settings.ask_routers_seconds, settings.at_once, self._add
            )
            if routers is not None and asked
            else None
        )
        self._generations: dict[ReconcileKey, int] = {}
        self._afresh: set[ReconcileKey] = set()
        self._informers: dict[tuple[ApiKind, str], Informer[Any]] = {}
        self._following: list[asyncio.Task[Any]] = []
        self._served = OptionalKinds(leader_worker_sets=False)
        self._stopping = False
        self._missed = asyncio.Event()
        """Set when a write failed because an object does not exist. The kind of the object may have been removed from the
        API server, so `_discover` asks for the kinds again."""

    # The health server and the metrics call the following methods.
    def ready(self) -> bool:
        """Return whether the objects of all kinds have been read once."""
        return bool(self._informers) and not self.unread()

    def unread(self) -> list[str]:
        """Return the kinds whose objects have not been read yet from the API server."""
        return sorted(
            {
                kind.name
                for (kind, _), each in self._informers.items()
                if not each.filled.is_set() and self._served.has(kind)
            }
        )

    def lost(self) -> list[str]:
        """Return the kinds whose objects have not been read yet, or whose changes cannot be watched now.

        Before the API server has reported its kinds, return a placeholder, so that the list is not empty.
        """
        lost = {kind.name for (kind, _), each in self._informers.items() if each.lost and self._served.has(kind)}
        return sorted(lost) if self._informers else ["anything"]

    def served(self) -> OptionalKinds:
        """Return the optional kinds that the API server had when it was last queried for them."""
        return self._served

    def waiting(self) -> int:
        """Return the number of keys that are due or being reconciled.

        Return 0 if this process is not the leader, or if its informers have not finished their first list.
        """
        return self._queue.due(self._clock.now()) if self._acts() else 0

    def restarts(self) -> int:
        """Return the number of times that informers had to list and watch their objects again."""
        return sum(each.restarts for each in self._informers.values())

    def by_readiness(self) -> dict[str, int]:
        """Return the number of deployments by the status of their condition Ready. A deployment without it counts as Unknown."""
        counts = {"True": 0, "False": 0, "Unknown": 0}
        for each in self._deployments():
            status = next((said.status for said in conditions_of(each) if said.type == "Ready"), "Unknown")
            counts[status] = counts.get(status, 0) + 1
        return counts

    def enqueue_all(self, *, afresh: bool = False) -> None:
        """Enqueue the keys of all custom objects in the caches.

        If `afresh` is true, the reconciles of these keys apply all objects again, even those that look unchanged.
        """
        for key in all_keys(self.store):
            if afresh:
                self._afresh.add(key)
            self._add(key)

    # `run`, and the loops that it starts:

    async def run(self, stop: asyncio.Event) -> None:
        """Run all loops until `stop` is set; then give the Lease back."""
        async with asyncio.TaskGroup() as tasks:
            self._following = [tasks.create_task(self._discover(tasks)), tasks.create_task(self.leader.run())]
            async with asyncio.TaskGroup() as acting:
                workers = [acting.create_task(self._work()) for _ in range(self._settings.at_once)]
                others = [acting.create_task(each) for each in self._other_loops()]
                await stop.wait()
                self._stopping = True
                self._woken.set()
                for task in others:
                    task.cancel()
                acting.create_task(_end(workers))
            # The election is cancelled before the Lease is given back, so that it cannot take the Lease again.
            for task in self._following:
                task.cancel()
            await self.leader.give_back()

    def _other_loops(self) -> list[Coroutine[Any, Any, None]]:
        loops: list[Coroutine[Any, Any, None]] = [self._begin(), self._resync()]
        if self._router_poller is not None:
            loops.append(self._router_poller.run(lambda: self._deployments() if self._acts() else []))
        if self._prober is not None:
            loops.append(self._prober.run())
        return loops

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        """Start an informer for every kind that the API server has, including kinds that are installed later.

        If an optional kind is removed from the API server, all its objects are removed from the cache, even if no watch has
        reported that they were deleted.
        """
        while True:
            try:
                served = await self._cluster.served()
            except KubernetesError as error:
                log.warning("api server discovery failed", extra={"cause": str(error)})
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for kind in (each for each in kinds.OPTIONAL_KINDS if not served.has(each)):
                self._changed(kind, self.store.any(kind).clear())
            for kind in (each for each in VIEW_OF_KIND if served.has(each)):
                for namespace in self._settings.namespaces or ("",):
                    if (kind, namespace) not in self._informers:
                        informer = self._informers[kind, namespace] = self._informer(kind, namespace)
                        self._following.append(tasks.create_task(informer.run()))
            if served != self._served:
                log.info("optional kinds changed", extra=msgspec.structs.asdict(served))
                self._served = served
                self.enqueue_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(DISCOVER_SECONDS):
                    await self._missed.wait()
                    await asyncio.sleep(RETRY_SECONDS)
            self._missed.clear()

    def _informer(self, kind: ApiKind, namespace: str) -> Informer[Any]:
        view = VIEW_OF_KIND[kind]
        cache, selector = self.store.of(kind, view), SELECTORS.get(kind, "")
        more: dict[str, Any] = {"convert": self._with_renewal_time} if kind == kinds.LEASE else {}
        return Informer(self._cluster, kind, view, cache, self._changed, namespace=namespace, selector=selector, **more)

    def _with_renewal_time(self, lease: KubernetesLease, before: KubernetesLease | None, news: bool) -> KubernetesLease:
        return lease.with_renewal_time(self._wall(), before, news=news)

    async def _begin(self) -> None:
        """Enqueue all keys whenever this process begins to lead, or finds that its Lease is another object than before."""
        while True:
            await self.leader.changed.wait()
            self.leader.changed.clear()
            self.enqueue_all()

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            self.enqueue_all(afresh=True)

    async def _work(self) -> None:
        """Reconcile keys from the queue, one at a time."""
        while not self._stopping:
            key = self._take()
            if key is None:
                await self._rest()
                continue
            began, pause = self._clock.now(), None
            try:
                reports = self._router_poller.of(key) if self._router_poller is not None else None
                outcome = await self._controller.reconcile_key(key, reports, self._served, afresh=key in self._afresh)
            except NotLeading:  # the key is enqueued again, so that it is reconciled when this process leads again
                self._queue.done(key)
                self._add(key)
                continue
            except KubernetesError as error:
                outcome, pause = ReconcileOutcome.FAILED, _pause(error)
                if isinstance(error, ObjectMissing):
                    self._missed.set()
                # Another writer has changed or deleted the object at the same time, which is normal, so DEBUG suffices.
                level = logging.DEBUG if isinstance(error, ObjectConflict | ObjectMissing) else logging.WARNING
                cause = f"{type(error).__name__}: {error}"
                log.log(
                    level,
                    "reconcile failed, will retry",
                    extra={"deployment": f"{key.namespace}/{key.name}", "cause": cause},
                )
            except Exception:  # supervisor: an error in the reconcile of one deployment must not stop the others
                log.exception("reconcile crashed", extra={"deployment": f"{key.namespace}/{key.name}"})
                outcome = ReconcileOutcome.CRASHED
            self._ended(key, outcome, began, pause)

    def _ended(self, key: ReconcileKey, outcome: ReconcileOutcome, began: Nanos, pause: Nanos | None) -> None:
        now = self._clock.now()
        self._metrics.reconciled(outcome, (now - began) / SECOND)
        if outcome in {ReconcileOutcome.SETTLED, ReconcileOutcome.ACTED}:
            self._afresh.discard(key)
            self._queue.done(key)
        else:
            self._queue.failed(key, now, pause)
        self._woken.set()

    def _acts(self) -> bool:
        return self.leader.leads() and self.ready()

    def _take(self) -> ReconcileKey | None:
        if not self._acts():
            return None
        key = self._queue.take(self._clock.now())
        if key is None and self._queue.overflown:
            self._queue.overflown = False
            self.enqueue_all()
            key = self._queue.take(self._clock.now())
        return key

    async def _rest(self) -> None:
        """Wait until the next key is due or a key is added, but at most REST_SECONDS.

        While this process does not lead, or has not read all objects yet, wait at most STANDBY_SECONDS.
        """
        self._woken.clear()
        seconds, due = REST_SECONDS, self._queue.next()
        if not self._acts():
            seconds = STANDBY_SECONDS
        elif due is not None:
            seconds = min(max(0.0, (due - self._clock.now()) / SECOND), REST_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    # Methods that enqueue keys when objects have changed:
    def _changed(self, kind: ApiKind, views: Sequence[NamedObject]) -> None:
        """Enqueue the keys of the objects that a change in a cache affects.

        `views` contains the object before the change and after it; a new or deleted object occurs once. If a kind was
        removed from the API server, `views` contains all objects of the kind.
        """
        if kind == kinds.DISAGG_DEPLOYMENT and self.leader.leads():
            before, after = views[0], views[-1]
            if isinstance(before, CustomObject) and isinstance(after, CustomObject):
                self._controller.edited(before, after)
        for view in views:
            for key in affected_keys(kind, view, self.store):
                self._add(key)
            if kind == kinds.DISAGG_DEPLOYMENT:
                self._specification_changed(deployment_key(view.metadata.namespace, view.metadata.name), view)

    def _specification_changed(self, key: ReconcileKey, view: NamedObject) -> None:
        """Make a deployment due now if its specification has changed, or forget the deployment if it was deleted."""
        if self.store.any(kinds.DISAGG_DEPLOYMENT).get(key.namespace, key.name) is None:
            self._generations.pop(key, None)
            if self._router_poller is not None:
                self._router_poller.forget(key)
        elif self._generations.get(key) != view.metadata.generation:
            self._generations[key] = view.metadata.generation
            self._queue.hasten(key, self._clock.now())
            self._woken.set()

    def _add(self, key: ReconcileKey, after: Nanos = IMMEDIATELY) -> None:
        self._queue.add(key, self._clock.now(), after)
        self._woken.set()

    def _routers_of(self, key: ReconcileKey) -> Iterator[Pod]:
        return routers_of(self.store.of(kinds.POD, Pod).of(key.namespace, key.name).values())

    def _deployments(self) -> list[CustomObject]:
        return list(self.store.of(kinds.DISAGG_DEPLOYMENT, CustomObject))


async def _end(tasks: "Sequence[asyncio.Task[None]]") -> None:
    """Wait until the tasks have finished, and cancel tasks that still run after `STOP_SECONDS`."""
    _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in late:
        task.cancel()


def _pause(error: KubernetesError) -> Nanos | None:
    """Return the pause that a busy API server demands before the next request, or None if it demands none."""
    after = error.after_seconds if isinstance(error, ApiServerBusy) else None
    return None if after is None else Nanos(int(after * SECOND))
