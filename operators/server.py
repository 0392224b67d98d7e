"""The operator around `reconcile`: caches that follow the API server, a queue of what to look at, and hands that do it while we lead.

Rules:

1. Whatever changes wakes the deployments that it concerns, by name, and nothing else. A look reads caches only, and goes on at once
   after it has written anything, until there is nothing left to write.
2. All caches follow from the start, on standbys too, so that whoever begins to lead knows everything; then all deployments are looked at.
3. A deployment is in one hand at a time; a look that fails comes again after a growing pause, and stops no other.
4. On the way out, hands finish the write that they are at, and then the Lease is given back. The operator's end changes nothing for
   what is running.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from msgspec import Struct

from fleet.clock import SECOND, Clock, Nanos
from operators import happenings, kinds, others
from operators.acting import Hand, NotLeading
from operators.children import Deployment
from operators.informer import Informer
from operators.kinds import Kind, Served
from operators.leader import Leader, rfc3339
from operators.observe import Store, conditions_of, deployment_of, observe, scalers_of
from operators.pace import Pace
from operators.ports import Busy, Cluster, ClusterError, Missing, Routers, Stale, Wall
from operators.queue import AT_ONCE, WorkQueue
from operators.reconcile import reconcile
from operators.registrations import SELECTOR, SKEW_SECONDS, Registration
from operators.resources import Condition, DisaggDeploymentSpec, DisaggDeploymentStatus
from operators.settings import OperatorSettings
from operators.status import misread
from operators.telemetry import Metrics
from operators.views import OF_KIND, Custom, Lease, Named

log = logging.getLogger(__name__)

DISCOVER_SECONDS = 60.0
STOP_SECONDS = 10.0
SELECTORS: Mapping[Kind, str] = {kinds.POD: "app.kubernetes.io/managed-by=fleet-operator", kinds.LEASE: SELECTOR}
RESTLESS = 20
"""Looks in a row that wrote something, after which there is a pause between two: somebody may be undoing it."""

MISSED_ANSWERS = 3
"""Of a router, until what it said before is not believed any more."""


class Key(Struct, frozen=True, order=True):
    """What is looked at in one piece: a deployment with everything that is about it, or a request for one."""

    kind: str
    namespace: str
    name: str


class Told(Struct, frozen=True):
    """What a router said of its workers, and how often it has not answered since."""

    workers: tuple[Registration, ...] | None
    missed: int = 0


class Operator:
    def __init__(
        self,
        settings: OperatorSettings,
        cluster: Cluster,
        routers: Routers | None,
        leader: Leader,
        clock: Clock,
        wall: Wall,
        metrics: Metrics,
    ) -> None:
        """`routers` None: only Leases of workers say which are registered."""
        self.store = Store()
        self.leader = leader
        self._settings = settings
        self._cluster = cluster
        self._routers = routers
        self._clock = clock
        self._wall = wall
        self._metrics = metrics
        self._hand = Hand(cluster, self.store, leader.leads, metrics, settings.identity)
        self._queue: WorkQueue[Key] = WorkQueue(settings.most_objects)
        self._woken = asyncio.Event()
        self._pace: Pace[Key] = Pace()
        self._restless: dict[Key, int] = {}
        self._generations: dict[Key, int] = {}
        self._told: dict[Key, Told] = {}
        self._informers: dict[tuple[Kind, str], Informer[Any]] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._served = Served(leader_worker_sets=False)
        self._stopping = False

    # What others ask.

    def ready(self) -> bool:
        """Whether everything has been read once."""
        return bool(self._informers) and all(each.filled.is_set() for each in self._informers.values())

    def waiting(self) -> int:
        """Deployments that are being looked at, or should be."""
        return self._queue.due(self._clock.now())

    def restarts(self) -> int:
        return sum(each.restarts for each in self._informers.values())

    def by_readiness(self) -> dict[str, int]:
        """Deployments by the status of their condition Ready."""
        counts = {"True": 0, "False": 0, "Unknown": 0}
        for each in self.store.of(kinds.DISAGG_DEPLOYMENT, Custom):
            status = next((said.status for said in conditions_of(each) if said.type == "Ready"), "Unknown")
            counts[status] = counts.get(status, 0) + 1
        return counts

    # The loops.

    async def run(self, stop: asyncio.Event) -> None:
        """Until asked to stop; then the Lease is given back."""
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(self._discover(tasks)), tasks.create_task(self.leader.run())]
            async with asyncio.TaskGroup() as acting:
                ends = [acting.create_task(each) for each in (self._begin(), self._resync(), self._ask_routers())]
                hands = [acting.create_task(self._work()) for _ in range(self._settings.at_once)]
                await stop.wait()
                self._stopping = True
                self._woken.set()
                for task in ends:
                    task.cancel()
                acting.create_task(_end(hands))
            for task in following:
                task.cancel()
            await self.leader.give_back()
            for informer in self._tasks:
                informer.cancel()

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        """Follow every kind there is, also one that comes later."""
        while True:
            try:
                served = await self._cluster.served()
            except ClusterError as error:
                log.warning("the API server does not say what it serves", extra={"cause": str(error)})
                await asyncio.sleep(1)
                continue
            for kind in (each for each in OF_KIND if served.has(each)):
                for namespace in self._settings.namespaces or ("",):
                    if (kind, namespace) not in self._informers:
                        informer = self._informer(kind, namespace)
                        self._informers[kind, namespace] = informer
                        self._tasks.append(tasks.create_task(informer.run()))
            if served != self._served:
                log.info("optional kinds", extra=msgspec.structs.asdict(served))
                self._served = served
                self._add_all()
            await asyncio.sleep(DISCOVER_SECONDS)

    def _informer(self, kind: Kind, namespace: str) -> Informer[Any]:
        view = OF_KIND[kind]
        return Informer(
            self._cluster,
            kind,
            view,
            self.store.of(kind, view),
            self._changed,
            namespace=namespace,
            selector=SELECTORS.get(kind, ""),
        )

    async def _begin(self) -> None:
        """Look at everything whenever we begin to lead."""
        while True:
            await self.leader.changed.wait()
            self.leader.changed.clear()
            self._add_all()

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            self._add_all()

    async def _work(self) -> None:
        """One hand."""
        while not self._stopping:
            key = self._take()
            if key is None:
                await self._rest()
                continue
            began = self._clock.now()
            pause: Nanos | None = None
            try:
                outcome = await self._look(key)
            except NotLeading:  # it waits for the next time that we do
                self._queue.done(key)
                self._add(key)
                continue
            except Busy as error:
                outcome, pause = "failed", Nanos(int((error.after_seconds or 0) * SECOND))
            except ClusterError as error:
                # That somebody else was faster is everyday life.
                level = logging.DEBUG if isinstance(error, Stale | Missing) else logging.WARNING
                log.log(
                    level, "later, again", extra={"deployment": key.name, "cause": f"{type(error).__name__}: {error}"}
                )
                outcome = "failed"
            except Exception:  # supervisor: what is wrong with one deployment must not end the work on the others
                log.exception("a look crashed", extra={"namespace": key.namespace, "deployment": key.name})
                outcome = "crashed"
            self._metrics.looked(outcome, (self._clock.now() - began) / SECOND)
            if outcome in {"settled", "acted"}:
                self._queue.done(key)
            else:
                self._queue.failed(key, self._clock.now(), pause)
            self._woken.set()

    def _take(self) -> Key | None:
        if not (self.leader.leads() and self.ready()):
            return None
        key = self._queue.take(self._clock.now())
        if key is None and self._queue.overflown:
            self._queue.overflown = False
            self._add_all()
            key = self._queue.take(self._clock.now())
        return key

    async def _rest(self) -> None:
        """Until something may be due."""
        self._woken.clear()
        due = self._queue.next()
        acts = self.leader.leads() and self.ready()
        seconds = self._settings.lease.retry_seconds if due is None or not acts else (due - self._clock.now()) / SECOND
        try:
            async with asyncio.timeout(max(0.0, min(seconds, 1.0 if acts else 0.05))):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _ask_routers(self) -> None:
        """What routers say is asked for again and again, more often while something is not as it should be."""
        if self._routers is None or not self._settings.ask_routers:
            return
        round_, asked = 0, asyncio.Semaphore(self._settings.at_once)
        while True:
            if self.leader.leads() and self.ready():
                async with asyncio.TaskGroup() as tasks:
                    for custom in self.store.of(kinds.DISAGG_DEPLOYMENT, Custom):
                        if round_ % 6 == 0 or not _is_ready(custom):
                            tasks.create_task(self._ask_router(custom, self._routers, asked))
            round_ += 1
            await asyncio.sleep(self._settings.ask_routers_seconds)

    async def _ask_router(self, custom: Custom, routers: Routers, asked: asyncio.Semaphore) -> None:
        key = _key_of(custom.metadata.namespace, custom.metadata.name)
        async with asked:
            workers = await routers.workers(key.namespace, key.name)
        before = self._told.get(key, Told(None))
        missed = 0 if workers is not None else before.missed + 1
        kept = workers if workers is not None or missed >= MISSED_ANSWERS else before.workers
        self._told[key] = Told(kept, missed)
        if _names(kept) != _names(before.workers):
            self._add(key)

    # What wakes what.

    def _changed(self, kind: Kind, views: Sequence[Named]) -> None:
        """Told by caches, before and after."""
        for view in views:
            metadata = view.metadata
            match kind:
                case kinds.DISAGG_DEPLOYMENT:
                    self._deployment_changed(_key_of(metadata.namespace, metadata.name), metadata.generation)
                case kinds.SERVING_REQUEST:
                    self._add(Key(kind.name, metadata.namespace, metadata.name))
                case _:
                    names = {deployment_of(view)} - {""}
                    names |= {
                        each.name for each in metadata.owner_references if each.kind == kinds.DISAGG_DEPLOYMENT.name
                    }
                    for name in names:
                        self._add(_key_of(metadata.namespace, name))
                    if not names:
                        self._wake_rivals(metadata.namespace, metadata.name)

    def _deployment_changed(self, key: Key, generation: int) -> None:
        if self._generations.get(key) != generation:
            self._generations[key] = generation
            self._queue.hasten(key, self._clock.now())
            self._woken.set()
        else:
            self._add(key)

    def _wake_rivals(self, namespace: str, name: str) -> None:
        """Those whose child might have that name, which somebody else has taken or given up."""
        for each in self.store.of(kinds.DISAGG_DEPLOYMENT, Custom):
            if each.metadata.namespace == namespace and name.startswith(each.metadata.name):
                self._add(_key_of(namespace, each.metadata.name))

    def _add(self, key: Key, after: Nanos = AT_ONCE) -> None:
        self._queue.add(key, self._clock.now(), after)
        self._woken.set()

    def _add_all(self) -> None:
        for each in self.store.of(kinds.DISAGG_DEPLOYMENT, Custom):
            self._add(_key_of(each.metadata.namespace, each.metadata.name))
        for kind in (kinds.ROLE_SCALER, kinds.SERVING_PLAN):
            for each in self.store.of(kind, Custom):
                self._add(_key_of(each.metadata.namespace, deployment_of(each)))
        for each in self.store.of(kinds.SERVING_REQUEST, Custom):
            self._add(Key(kinds.SERVING_REQUEST.name, each.metadata.namespace, each.metadata.name))

    # One look.

    async def _look(self, key: Key) -> str:
        """How it ended.

        Raises:
            ClusterError: It could not go on.
            NotLeading: It must not.
        """
        if key.kind == kinds.SERVING_REQUEST.name:
            custom = self.store.of(kinds.SERVING_REQUEST, Custom).get(key.namespace, key.name)
            if custom is not None:
                said = others.request_status(conditions_of(custom), custom.metadata.generation, self._now())
                await self._write_status(key, kinds.SERVING_REQUEST, custom, said)
            return "settled"
        custom = self.store.of(kinds.DISAGG_DEPLOYMENT, Custom).get(key.namespace, key.name)
        if custom is None or custom.metadata.deleted:
            self._forget(key)
            await self._look_at_others(key, None, None)
            return "settled"
        try:
            spec = msgspec.convert(custom.spec, DisaggDeploymentSpec)
        except msgspec.ValidationError as error:
            await self._misread(key, custom, error)
            return "settled"
        wish = Deployment(name=key.name, namespace=key.namespace, spec=spec, uid=custom.metadata.uid)
        told = self._told.get(key, Told(None)).workers
        seen = observe(self.store, custom, spec, told, self._wall(), self._served)
        outcome = reconcile(wish, seen, self._settings.images, self._now())
        refusals = await self._hand.perform(outcome.actions, key.namespace)
        if refusals:
            outcome = reconcile(
                wish, msgspec.structs.replace(seen, refusals=refusals), self._settings.images, self._now()
            )
        await self._write_status(key, kinds.DISAGG_DEPLOYMENT, custom, outcome.status)
        await self._look_at_others(key, wish, outcome.status)
        acted = len(outcome.actions) > len(refusals)
        happened = [*happenings.steps(outcome.actions, custom.metadata.generation)] if not refusals else []
        await self._hand.record(kinds.DISAGG_DEPLOYMENT, custom, happened, self._wall())
        self._look_again(key, acted)
        return "refused" if refusals else "acted" if acted else "settled"

    def _look_again(self, key: Key, acted: bool) -> None:
        if acted:
            self._restless[key] = self._restless.get(key, 0) + 1
            self._add(key, Nanos(0 if self._restless[key] < RESTLESS else 1 * SECOND))
            return
        self._restless.pop(key, None)
        leases = self.store.of(kinds.LEASE, Lease).of(key.namespace, key.name).values()
        now = self._wall()
        ends = [
            each.renewed + timedelta(seconds=(each.spec.lease_duration_seconds or 0) + SKEW_SECONDS) - now
            for each in leases
            if each.spec.holder_identity
        ]
        if upcoming := [each for each in ends if each > timedelta(0)]:
            self._add(key, Nanos(int(min(upcoming).total_seconds() * SECOND) + SECOND // 10))

    async def _look_at_others(self, key: Key, wish: Deployment | None, status: DisaggDeploymentStatus | None) -> None:
        """RoleScalers and plans of a deployment, whether it is there or not."""
        now = self._now()
        for role, scaler in scalers_of(self.store, key.namespace, key.name).items():
            said = others.scaler_status(
                scaler.status,
                conditions_of(scaler),
                scaler.metadata.generation,
                scaler.spec.get("replicas", 1),
                role,
                wish,
                status,
                now,
            )
            await self._write_status(
                Key(kinds.ROLE_SCALER.name, key.namespace, scaler.metadata.name), kinds.ROLE_SCALER, scaler, said, key
            )
        for plan in self.store.of(kinds.SERVING_PLAN, Custom).of(key.namespace, key.name).values():
            planned = others.plan_status(conditions_of(plan), plan.metadata.generation, wish is not None, now)
            await self._write_status(
                Key(kinds.SERVING_PLAN.name, key.namespace, plan.metadata.name), kinds.SERVING_PLAN, plan, planned, key
            )

    async def _misread(self, key: Key, custom: Custom, error: msgspec.ValidationError) -> None:
        conditions = misread(conditions_of(custom), custom.metadata.generation, _where(error), self._now())
        said = DisaggDeploymentStatus(observed_generation=custom.metadata.generation, conditions=conditions)
        await self._write_status(key, kinds.DISAGG_DEPLOYMENT, custom, said)
        await self._look_at_others(key, None, None)

    async def _write_status(self, key: Key, kind: Kind, custom: Custom, said: Any, wake: Key | None = None) -> None:
        """If it differs from what is there, and as `operators.pace` says; `wake` is looked at when it may be written."""
        try:
            there = msgspec.convert(custom.status, type(said))
        except msgspec.ValidationError:
            there = None
        if there == said:
            return
        now = self._clock.now()
        due = self._pace.due(key, now, urgent=_urgent(there, said))
        if due > now:
            self._add(wake or key, Nanos(due - now))
            return
        before = conditions_of(custom)
        content = {name: value for name, value in msgspec.to_builtins(said).items() if value != ""}
        await self._hand.write_status(kind, custom, content)
        self._pace.wrote(key, now)
        await self._hand.record(kind, custom, tuple(happenings.turns(before, said.conditions)), self._wall())

    def _forget(self, key: Key) -> None:
        self._pace.forget(key)
        for kept in (self._restless, self._generations, self._told):
            kept.pop(key, None)

    def _now(self) -> str:
        return rfc3339(self._wall())


async def _end(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Let them finish what they are at; not for ever."""
    _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
    for task in late:
        task.cancel()


def _key_of(namespace: str, deployment: str) -> Key:
    return Key(kinds.DISAGG_DEPLOYMENT.name, namespace, deployment)


def _is_ready(custom: Custom) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in conditions_of(custom))


def _names(workers: tuple[Registration, ...] | None) -> frozenset[str] | None:
    return None if workers is None else frozenset(each.pod for each in workers)


def _urgent(there: Any, said: Any) -> bool:
    """Whether it says something new, and does not only count along."""
    if there is None or there.observed_generation != said.observed_generation:
        return True
    if isinstance(said, DisaggDeploymentStatus):
        now = ([(each.name, each.desired) for each in said.roles], _statuses(said.conditions))
        return now != ([(each.name, each.desired) for each in there.roles], _statuses(there.conditions))
    return True


def _statuses(conditions: Sequence[Condition]) -> list[tuple[str, str, str]]:
    return [(each.type, each.status, each.reason) for each in conditions]


def _where(error: msgspec.ValidationError) -> str:
    """The field that is not understood, and what is expected there; never what is there."""
    cause, _, path = str(error).partition(" - at `$")
    return f"spec{path.rstrip('`')}: {cause}"
