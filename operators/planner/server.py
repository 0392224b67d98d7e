"""Planner server of a cluster: watches ServingPlans, deployments and routers, and runs a planner for each usable plan.

Rules:

1. Every planner process runs the planners of all plans that can be carried out. So a process already knows the demand
   when it becomes the leader. Only the leader applies plans (the loops check the election) and writes statuses.
2. A planner is replaced if its settings or its control secret have changed. If only the routers have changed, the
   planner goes on and reads the reports of the new routers.
3. If several ServingPlans name one deployment, only the plan whose name sorts first can be carried out, even if it is
   refused. The statuses of the other plans say that they are not carried out.
4. If the deployment of a plan is deleted, the planner of the plan ends without changing the number of any replicas.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Never

import msgspec
from msgspec import Struct

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.informer import Informer
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.leader import LeaseLeader, rfc3339
from fleet.net.kubernetes.ports import KubernetesApi, KubernetesError, ObjectConflict, ObjectMissing, WallClock
from fleet.net.kubernetes.views import VIEW_OF_KIND, CustomObject, NamedObject, Pod
from fleet.planner.control.service import ShownPlanner
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleType
from operators.api.serving_plan import ServingPlanSpec, ServingPlanStatus
from operators.controller.control_secrets import ControlSecrets
from operators.manifests.names import TYPE, DesiredDeployment
from operators.observed.caches import InformerCaches
from operators.observed.observe import conditions_of
from operators.observed.router_poller import address_of
from operators.planner.demand import FollowedRouter
from operators.planner.deployment_planner import DeploymentPlanner, PlannerParts, PlannerTask
from operators.planner.settings import KubePlannerSettings
from operators.planner.status import is_news, obeyed_status, refused_status, undated
from operators.planner.translation import (
    SPECIFICATION_REFUSED,
    PlanNotObeyed,
    planned_roles,
    planner_settings,
)

log = logging.getLogger(__name__)

ROUND_SECONDS = 1.0
"""Maximum seconds between two comparisons of the planners' states with the statuses of their plans. This is also the
pause before the control secret is read again after a failure."""

STATUS_SHORT = Nanos(SECOND)
"""Minimum time between two writes of the status of one plan."""

SECRET_SECONDS = 10.0
FOLLOWED = (kinds.SERVING_PLAN, kinds.DISAGG_DEPLOYMENT, kinds.POD)
SELECTORS = {kinds.POD: f"app.kubernetes.io/managed-by=fleet-operator,{TYPE}={RoleType.ROUTER}"}

Place = tuple[str, str]
"""Namespace and name of a ServingPlan or of a DisaggDeployment."""


class _RunningPlanner(Struct):
    planner: DeploymentPlanner
    task: asyncio.Task[Never]


class KubePlanner:
    """Runs all loops of one planner process of a cluster. Implements `fleet.planner.control.service.ShownPlanners`."""

    def __init__(
        self,
        settings: KubePlannerSettings,
        cluster: KubernetesApi,
        leader: LeaseLeader,
        secrets: ControlSecrets,
        parts: PlannerParts,
        clock: Clock,
        wall: WallClock,
        wall_ms: Callable[[], int],
    ) -> None:
        self.store = InformerCaches()
        self.leader = leader
        self._settings = settings
        self._cluster = cluster
        self._secrets = secrets
        self._parts = parts
        self._clock = clock
        self._wall = wall
        self._wall_ms = wall_ms
        self._informers: dict[tuple[ApiKind, str], Informer[Any]] = {}
        self._changed = asyncio.Event()
        self._running: dict[Place, _RunningPlanner] = {}
        self._refused: dict[Place, PlanNotObeyed] = {}
        # The plans for which no planner can be created, each with its unusable inputs and the reason. A plan is tried
        # again only with other inputs.
        self._unusable: dict[Place, tuple[PlannerTask, PlanNotObeyed]] = {}
        self._written: dict[Place, Nanos] = {}  # the instant at which the status of each plan was last written
        self._secret_trouble = "not read yet" if settings.control_secret else ""
        for kind in FOLLOWED:
            for namespace in settings.namespaces or ("",):
                self._informers[kind, namespace] = Informer(
                    cluster,
                    kind,
                    VIEW_OF_KIND[kind],
                    self.store.of(kind, VIEW_OF_KIND[kind]),
                    self._note_change,
                    namespace=namespace,
                    selector=SELECTORS.get(kind, ""),
                )

    # The health server, the metrics and the control port call the following methods.

    def ready(self) -> bool:
        """Return whether the objects of all kinds have been read once."""
        return not self.unread()

    def unread(self) -> list[str]:
        """Return the kinds whose objects have not been read yet from the API server."""
        return sorted({kind.name for (kind, _), each in self._informers.items() if not each.filled.is_set()})

    def lost(self) -> list[str]:
        """Return the kinds whose objects have not been read yet, or whose changes cannot be watched now."""
        return sorted({kind.name for (kind, _), each in self._informers.items() if each.lost})

    def planners(self) -> Mapping[Place, DeploymentPlanner]:
        """Return the running planners by the namespace and name of their deployment."""
        return {self._place(each.planner): each.planner for each in self._running.values()}

    def planner(self, deployment: str) -> ShownPlanner:
        there = {f"{namespace}/{name}": each for (namespace, name), each in sorted(self.planners().items())}
        if not deployment and len(there) == 1:
            return next(iter(there.values())).loop
        if (found := there.get(deployment)) is not None:
            return found.loop
        names = ", ".join(there) or "none"
        wrong = f"{deployment[:200]!r} is not planned" if deployment else "name one"
        message = f"deployment: {wrong}; planned deployments: {names}"
        raise RequestRejected(Reason.REQUEST_NOT_FOUND, message, field="deployment")

    # `run`, and the loops that it starts:

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set; then give the Lease back, so that the next leader continues the plans."""
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(each.run()) for each in self._informers.values()]
            following += [
                tasks.create_task(each) for each in (self.leader.run(), self._read_secret(), self._tend(tasks))
            ]
            await stop.wait()
            for task in following:
                task.cancel()
            await asyncio.wait(following)
            for place in list(self._running):
                await self._end(place)
            await self.leader.give_back()

    async def _read_secret(self) -> Never:
        """Read the operator's secret regularly, because it may be created or replaced while this process runs."""
        while True:
            if self._settings.control_secret:
                try:
                    await self._secrets.read()
                    trouble = ""
                except KubernetesError as error:
                    trouble = f"{type(error).__name__}: {error}"
                if trouble != self._secret_trouble and trouble:
                    log.warning("control secret not read", extra={"cause": trouble})
                self._secret_trouble = trouble
                self._changed.set()
            await asyncio.sleep(SECRET_SECONDS if not self._secret_trouble else ROUND_SECONDS)

    async def _tend(self, tasks: asyncio.TaskGroup) -> Never:
        """Start and end planners when their inputs change, and write the statuses of plans while this process leads."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            if not self.ready():
                continue
            try:
                await self._arrange(tasks)
                if self.leader.leads():
                    for plan in self._plans():
                        await self._tell(plan)
            except Exception:  # supervisor: after an error, running planners go on, and the next round tries again
                log.exception("plans not arranged, will retry")

    def _note_change(self, _: ApiKind, __: Sequence[NamedObject]) -> None:
        self._changed.set()

    def _plans(self) -> list[CustomObject]:
        found = [each for each in self.store.of(kinds.SERVING_PLAN, CustomObject) if not each.metadata.deleted]
        return sorted(found, key=_place_of)

    # Methods that start and end planners:

    async def _arrange(self, tasks: asyncio.TaskGroup) -> None:
        wanted: dict[Place, PlannerTask] = {}
        refused: dict[Place, PlanNotObeyed] = {}
        taken: dict[Place, str] = {}  # name of the only ServingPlan that can be carried out, by deployment (rule 3)
        for plan in self._plans():
            place = _place_of(plan)
            try:
                wanted[place] = self._task(plan, taken, len(wanted))
            except PlanNotObeyed as error:
                refused[place] = error
            except Exception as error:  # noqa: BLE001 - supervisor: an error in one plan must not delay the others
                refused[place] = self._unread(place, error)
        for place in list(self._running):
            if self._running[place].planner.task != wanted.get(place):
                await self._end(place)
        self._unusable = {place: each for place, each in self._unusable.items() if wanted.get(place) == each[0]}
        self._written = {place: each for place, each in self._written.items() if place in wanted or place in refused}
        for place, task in wanted.items():
            if place in self._unusable:
                refused[place] = self._unusable[place][1]
            elif place not in self._running:
                try:
                    self._begin(place, task, tasks)
                except ConfigurationRefused as error:
                    refused[place] = PlanNotObeyed(SPECIFICATION_REFUSED, f"spec: {error}")
                    self._unusable[place] = (task, refused[place])
        self._refused = refused
        for each in self._running.values():
            each.planner.demand.routers_are(self._routers(*self._place(each.planner)))

    def _unread(self, place: Place, error: Exception) -> PlanNotObeyed:
        """Return the refusal of a plan that has caused an unexpected error in this process, and log the error once."""
        refusal = PlanNotObeyed(SPECIFICATION_REFUSED, f"this planner cannot read it: {type(error).__name__}")
        if str(self._refused.get(place)) != str(refusal):
            log.error("plan not read", exc_info=error, extra={"plan": "/".join(place)})
        return refusal

    def _task(self, plan: CustomObject, taken: dict[Place, str], planned: int) -> PlannerTask:
        """Return the inputs of the planner for a plan.

        Raises:
            PlanNotObeyed: The plan cannot be carried out; the message says why.
        """
        namespace, name = _place_of(plan)
        try:
            asked = msgspec.convert(plan.spec, ServingPlanSpec)
        except msgspec.ValidationError as error:
            raise PlanNotObeyed(
                SPECIFICATION_REFUSED, f"spec is written for another version: {_path(error)}"
            ) from error
        place = (namespace, asked.deployment)
        if (other := taken.setdefault(place, name)) != name:
            text = (
                f"the ServingPlan {other} is for the same deployment and its name sorts first, so only it can be obeyed"
            )
            raise PlanNotObeyed("OtherPlanObeyed", text)
        if planned >= self._settings.most_plans:
            text = f"this planner obeys {self._settings.most_plans} plans at most (most_plans)"
            raise PlanNotObeyed("TooManyPlans", text)
        desired = self._deployment(namespace, asked.deployment)
        settings = planner_settings(asked, desired, self._settings)
        if self._secret_trouble:
            raise PlanNotObeyed("ControlSecretUnusable", f"the operator's control secret: {self._secret_trouble}")
        return PlannerTask(settings, self._secrets.of(namespace, asked.deployment))

    def _deployment(self, namespace: str, name: str) -> DesiredDeployment:
        found = self.store.of(kinds.DISAGG_DEPLOYMENT, CustomObject).get(namespace, name)
        if found is None or found.metadata.deleted:
            raise PlanNotObeyed("NoTarget", "there is no DisaggDeployment of that name", target_found=False)
        try:
            spec = msgspec.convert(found.spec, DisaggDeploymentSpec)
        except msgspec.ValidationError as error:
            text = f"the deployment is written for another version: {_path(error)}"
            raise PlanNotObeyed(SPECIFICATION_REFUSED, text) from error
        return DesiredDeployment(name=name, namespace=namespace, spec=spec)

    def _begin(self, place: Place, task: PlannerTask, tasks: asyncio.TaskGroup) -> None:
        planner = DeploymentPlanner(task, self._parts, self._cluster, self.leader, self._clock, self._wall_ms)
        self._running[place] = _RunningPlanner(planner, tasks.create_task(planner.run()))
        log.info("planner of a deployment started", extra={"plan": "/".join(place), "mode": task.settings.mode})

    async def _end(self, place: Place) -> None:
        running = self._running.pop(place)
        running.task.cancel()
        await asyncio.wait({running.task})
        log.info("planner of a deployment ended", extra={"plan": "/".join(place)})

    def _routers(self, namespace: str, deployment: str) -> Iterator[FollowedRouter]:
        for pod in self.store.of(kinds.POD, Pod).of(namespace, deployment).values():
            if pod.alive and pod.status.pod_ip:
                yield FollowedRouter(pod.metadata.name, address_of(pod), pod.ready)

    def _place(self, planner: DeploymentPlanner) -> Place:
        target: Any = planner.task.settings.target
        return target.namespace, target.deployment

    # Methods that write the statuses of ServingPlans:

    async def _tell(self, plan: CustomObject) -> None:
        """Write the status of a plan if the status has changed, at most once in STATUS_SHORT.

        If only numbers in the status have changed, write at most once in `status_seconds` (`operators.planner.status`, rule 4).
        """
        place, now = _place_of(plan), self._clock.now()
        said = undated(self._status(plan))
        last = self._written.get(place)
        if last is None or last + STATUS_SHORT <= now:
            try:
                there: ServingPlanStatus | None = undated(msgspec.convert(plan.status, ServingPlanStatus))
            except msgspec.ValidationError:
                there = None
            refresh = Nanos(round(self._settings.status_seconds * SECOND))
            if is_news(there, said) or (there != said and (last is None or last + refresh <= now)):
                await self._write(plan, said)

    def _status(self, plan: CustomObject) -> ServingPlanStatus:
        place, before, now = _place_of(plan), conditions_of(plan), rfc3339(self._wall())
        generation = plan.metadata.generation
        running = self._running.get(place)
        refusal = self._refused.get(place)
        if running is None or refusal is not None:
            unknown = PlanNotObeyed("Starting", "its planner starts")
            return refused_status(refusal or unknown, before, generation, self._settings.identity, now)
        try:
            modes = planned_roles(self._deployment(*self._place(running.planner)))
        except PlanNotObeyed as error:  # the plan or its deployment has just become unusable
            return refused_status(error, before, generation, self._settings.identity, now)
        return obeyed_status(running.planner.loop.status(), modes, before, generation, now)

    async def _write(self, plan: CustomObject, said: ServingPlanStatus) -> None:
        place, kind = _place_of(plan), kinds.SERVING_PLAN
        metadata = {"name": plan.metadata.name, "namespace": plan.metadata.namespace, "uid": plan.metadata.uid}
        content = {name: value for name, value in msgspec.to_builtins(said).items() if value != ""}
        manifest = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "status": content}
        self._written[place] = self._clock.now()
        try:
            self.store.of(kind, CustomObject).put(await self._cluster.apply(kind, CustomObject, manifest, "status"))
        except (ObjectConflict, ObjectMissing):
            return  # the plan was replaced or removed meanwhile; the watch will report that
        except KubernetesError as error:
            log.warning("status of a plan not written", extra={"plan": "/".join(place), "cause": str(error)})


def _place_of(plan: NamedObject) -> Place:
    return plan.metadata.namespace, plan.metadata.name


def _path(error: msgspec.ValidationError) -> str:
    """Return the path of the invalid field, without its value. If the error names no path, return a text in its place."""
    return str(error).partition(" - at `$")[2].strip("`.") or "a field is missing or unknown"
