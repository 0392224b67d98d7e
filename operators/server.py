"""The operator around `reconcile`: caches that follow the API server, a queue of what to look at, and hands that do it while we lead.

Rules:

1. Whatever changes wakes the deployments that it concerns, by name, and nothing else. A look reads caches only, and goes on at once
   after it has written anything, until there is nothing left to write.
2. All caches follow from the start, on standbys too, so that whoever begins to lead knows everything; then all deployments are looked at.
3. A deployment is in one hand at a time; a look that fails comes again after a growing pause, and stops no other.
4. On the way out, hands finish the look that they are at, and then the Lease is given back. The operator's end changes nothing for
   what is running.
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
    ProbeSender,
    RouterReports,
    WallClock,
)
from fleet.net.kubernetes.views import VIEW_OF_KIND, CustomObject, KubernetesLease, NamedObject, Pod
from operators.controller.applier import Applier, NotLeading
from operators.controller.control_secrets import ControlSecrets
from operators.controller.loop import Controller
from operators.controller.work_queue import IMMEDIATELY, WorkQueue
from operators.keys import ReconcileKey, affected_keys, all_keys, deployment_key
from operators.observed.observe import InformerCaches, conditions_of, routers_of
from operators.observed.registrations import SELECTOR
from operators.observed.router_poller import RouterPoller
from operators.probes.prober import Prober
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
    """All loops of one process."""

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
        """`routers` None: only Leases of workers say which are registered. `clients` None: no probes are sent."""
        self.store = InformerCaches()
        self.leader = leader
        self._settings = settings
        self._cluster = cluster
        self._clock = clock
        self._wall = wall
        self._metrics = metrics
        self._queue: WorkQueue[ReconcileKey] = WorkQueue(settings.most_objects)
        self._woken = asyncio.Event()
        hand = Applier(cluster, self.store, leader.leads, metrics, settings.identity)
        probe = settings.probe
        self._prober = (
            Prober(clients, probe.at_once, probe.longest_pause_seconds, leader.leads, self._add)
            if clients is not None and probe.enabled
            else None
        )
        self._look = Controller(
            self.store, hand, settings.images, clock, wall, self._add, self._prober, secrets=secrets
        )
        asked = routers is not None and settings.ask_routers
        self._hearsay = (
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

    # What others ask.

    def ready(self) -> bool:
        """Whether everything has been read once."""
        return bool(self._informers) and not self.unread()

    def unread(self) -> list[str]:
        """Kinds that have not been read yet."""
        return sorted({kind.name for (kind, _), each in self._informers.items() if not each.filled.is_set()})

    def waiting(self) -> int:
        """Deployments that are being looked at, or should be; none where somebody else leads."""
        return self._queue.due(self._clock.now()) if self._acts() else 0

    def restarts(self) -> int:
        """Lists and watches begun anew."""
        return sum(each.restarts for each in self._informers.values())

    def by_readiness(self) -> dict[str, int]:
        """Deployments by the status of their condition Ready."""
        counts = {"True": 0, "False": 0, "Unknown": 0}
        for each in self._deployments():
            status = next((said.status for said in conditions_of(each) if said.type == "Ready"), "Unknown")
            counts[status] = counts.get(status, 0) + 1
        return counts

    def look_at_everything(self, *, afresh: bool = False) -> None:
        """Soon; `afresh`: and write everything again, whatever it looks like."""
        for key in all_keys(self.store):
            if afresh:
                self._afresh.add(key)
            self._add(key)

    # The loops.

    async def run(self, stop: asyncio.Event) -> None:
        """Until asked to stop; then the Lease is given back."""
        async with asyncio.TaskGroup() as tasks:
            self._following = [tasks.create_task(self._discover(tasks)), tasks.create_task(self.leader.run())]
            async with asyncio.TaskGroup() as acting:
                hands = [acting.create_task(self._work()) for _ in range(self._settings.at_once)]
                others = [acting.create_task(each) for each in self._others()]
                await stop.wait()
                self._stopping = True
                self._woken.set()
                for task in others:
                    task.cancel()
                acting.create_task(_end(hands))
            # Who renews the Lease must not take it again.
            for task in self._following:
                task.cancel()
            await self.leader.give_back()

    def _others(self) -> list[Coroutine[Any, Any, None]]:
        loops: list[Coroutine[Any, Any, None]] = [self._begin(), self._resync()]
        if self._hearsay is not None:
            loops.append(self._hearsay.run(lambda: self._deployments() if self._acts() else []))
        if self._prober is not None:
            loops.append(self._prober.run())
        return loops

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        """Follow every kind there is, also one that comes later."""
        while True:
            try:
                served = await self._cluster.served()
            except KubernetesError as error:
                log.warning("the API server does not say what it serves", extra={"cause": str(error)})
                await asyncio.sleep(RETRY_SECONDS)
                continue
            for kind in (each for each in VIEW_OF_KIND if served.has(each)):
                for namespace in self._settings.namespaces or ("",):
                    if (kind, namespace) not in self._informers:
                        informer = self._informers[kind, namespace] = self._informer(kind, namespace)
                        self._following.append(tasks.create_task(informer.run()))
            if served != self._served:
                log.info("optional kinds", extra=msgspec.structs.asdict(served))
                self._served = served
                self.look_at_everything()
            await asyncio.sleep(DISCOVER_SECONDS)

    def _informer(self, kind: ApiKind, namespace: str) -> Informer[Any]:
        view = VIEW_OF_KIND[kind]
        cache, selector = self.store.of(kind, view), SELECTORS.get(kind, "")
        more: dict[str, Any] = {"heard": self._heard} if kind == kinds.LEASE else {}
        return Informer(self._cluster, kind, view, cache, self._changed, namespace=namespace, selector=selector, **more)

    def _heard(self, lease: KubernetesLease, before: KubernetesLease | None, news: bool) -> KubernetesLease:
        return lease.heard(self._wall(), before, news=news)

    async def _begin(self) -> None:
        """Look at everything whenever we begin to lead."""
        while True:
            await self.leader.changed.wait()
            self.leader.changed.clear()
            self.look_at_everything()

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            self.look_at_everything(afresh=True)

    async def _work(self) -> None:
        """One hand."""
        while not self._stopping:
            key = self._take()
            if key is None:
                await self._rest()
                continue
            began, pause = self._clock.now(), None
            try:
                told = self._hearsay.of(key) if self._hearsay is not None else None
                outcome = await self._look.at(key, told, self._served, afresh=key in self._afresh)
            except NotLeading:  # it waits for the next time that we do
                self._queue.done(key)
                self._add(key)
                continue
            except KubernetesError as error:
                outcome, pause = ReconcileOutcome.FAILED, _pause(error)
                # That somebody else was faster is everyday life.
                level = logging.DEBUG if isinstance(error, ObjectConflict | ObjectMissing) else logging.WARNING
                cause = f"{type(error).__name__}: {error}"
                log.log(level, "later, again", extra={"deployment": f"{key.namespace}/{key.name}", "cause": cause})
            except Exception:  # supervisor: what is wrong with one deployment must not end the work on the others
                log.exception("a look crashed", extra={"deployment": f"{key.namespace}/{key.name}"})
                outcome = ReconcileOutcome.CRASHED
            self._ended(key, outcome, began, pause)

    def _ended(self, key: ReconcileKey, outcome: ReconcileOutcome, began: Nanos, pause: Nanos | None) -> None:
        now = self._clock.now()
        self._metrics.looked(outcome, (now - began) / SECOND)
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
            self.look_at_everything()
            key = self._queue.take(self._clock.now())
        return key

    async def _rest(self) -> None:
        """Until something may be due."""
        self._woken.clear()
        seconds, due = REST_SECONDS, self._queue.next()
        if not self._acts():
            seconds = STANDBY_SECONDS
        elif due is not None:
            seconds = min(max(0.0, (due - self._clock.now()) / SECOND), REST_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    # What wakes what.

    def _changed(self, kind: ApiKind, views: Sequence[NamedObject]) -> None:
        """Told by caches, before and after."""
        for view in views:
            for key in affected_keys(kind, view, self.store):
                self._add(key)
            if kind == kinds.DISAGG_DEPLOYMENT:
                self._wished(deployment_key(view.metadata.namespace, view.metadata.name), view)

    def _wished(self, key: ReconcileKey, view: NamedObject) -> None:
        """What is wished has changed, or is wished no more."""
        if self.store.any(kinds.DISAGG_DEPLOYMENT).get(key.namespace, key.name) is None:
            self._generations.pop(key, None)
            if self._hearsay is not None:
                self._hearsay.forget(key)
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
    """Let them finish what they are at; not for ever."""
    _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in late:
        task.cancel()


def _pause(error: KubernetesError) -> Nanos | None:
    """That the server asks for."""
    after = error.after_seconds if isinstance(error, ApiServerBusy) else None
    return None if after is None else Nanos(int(after * SECOND))
