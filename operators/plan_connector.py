"""Kubernetes connector: writes the replicas of a plan into RoleScalers; the operator then scales the roles.

Rules:

1. The connector writes a number by server-side apply, with `writer` as the field manager. The write fails if the
   RoleScaler's specification has changed since the observation on which the write is based. Annotations hold the id of
   the plan and the number before the plan (`PoolObservation.before_a_write`). Only the operator creates RoleScalers.
2. `managedFields` record who owns a number. The operator owns the number at first, because it creates the RoleScaler.
   If the number has an owner other than the operator and the planner, the planner must not change it: the pool is
   pinned. So `kubectl scale`, an HPA and KEDA work without knowing about planners.
3. A write of the same number does not remove the other owners, so it cannot end the pinning. Instead, a pool is given
   back to the planner by an annotation with the present generation of the RoleScaler. While the RoleScaler has this
   generation, the pool is not pinned.
4. `scaling.mode` has precedence over rules 2 and 3. Only the specification sets the number of replicas of a Static role.
   A planner must not set the number of replicas of an External role.
5. The connector reads the state of the pools from the statuses that the operator writes. It does not read pods or ask
   routers itself, because the operator does this.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from fleet.core.errors import ConfigurationRefused
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.client import MANAGER, open_api_client
from fleet.net.kubernetes.kinds import GROUP
from fleet.net.kubernetes.ports import KubernetesApi, KubernetesError, ObjectConflict, ObjectMissing, RequestDenied
from fleet.net.kubernetes.views import CustomObject, NamedObject, ObjectMetadata
from fleet.planner import ports
from fleet.planner.execution import to_write
from fleet.planner.messages import Observation, Plan, PlanId, PlanWriter, PoolGapReason, PoolName, PoolObservation
from fleet.planner.settings import KubernetesTarget
from operators.api.disagg_deployment import DisaggDeploymentSpec, RoleSpec, RoleType, ScalingMode
from operators.observed.pod_troubles import UNPLACED

PLAN, BEFORE = f"{GROUP}/plan", f"{GROUP}/replicas-before"
RELEASED = f"{GROUP}/released"
"""Annotation with the generation of a RoleScaler at which its number was given back to the planner. Every other write
of the connector sets the annotation to an empty text."""

PINNED = "pinned: "
"""Beginning of the text `PoolObservation.pinned` if somebody other than the operator and the planner owns the number of
replicas."""

TRIES = 4
"""Maximum number of attempts to write a RoleScaler. An attempt fails if any part of the RoleScaler, such as its status,
changes between the read and the write of the connector."""

Decoded = TypeVar("Decoded")


class _Entry(Struct, frozen=True, rename="camel"):
    manager: str = ""
    fields_v1: Mapping[str, Any] = msgspec.field(default={}, name="fieldsV1")


class _Managed(ObjectMetadata, frozen=True, kw_only=True, rename="camel"):
    managed_fields: tuple[_Entry, ...] = ()


class _ScalerSpec(Struct, frozen=True):
    class Target(Struct, frozen=True):
        deployment: str
        role: str

    target: Target
    replicas: int = 1


class _Condition(Struct, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class _ScalerStatus(Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    conditions: tuple[_Condition, ...] = ()


class _Scaler(NamedObject, frozen=True, kw_only=True):
    """Reads a RoleScaler with the owners of its fields."""

    metadata: _Managed
    spec: _ScalerSpec
    status: _ScalerStatus = _ScalerStatus()

    @property
    def owners(self) -> list[str]:
        """Return the field managers that have set `spec.replicas` of this RoleScaler."""
        return [
            each.manager for each in self.metadata.managed_fields if "f:replicas" in each.fields_v1.get("f:spec", {})
        ]

    @property
    def version(self) -> str:
        """A text that changes with the specification of the RoleScaler, but not with its status."""
        return f"{self.metadata.uid}/{self.metadata.generation}"

    @property
    def plan(self) -> PlanId:
        """Id of the plan that set `spec.replicas`, or an empty text if no plan set it."""
        return PlanId(self._annotation(PLAN))

    @property
    def before(self) -> int | None:
        """The number below which a rollback of the plan does not go, or None if it is unknown.

        It is the number before the plan, less replicas of an earlier plan that did not serve, as
        `PoolObservation.before_a_write` has computed it (`fleet.planner.messages`).
        """
        number = self._annotation(BEFORE)
        return int(number) if number.isdecimal() else None

    @property
    def released(self) -> bool:
        """Return whether `spec.replicas` was given back to the planner, and the specification has not changed since."""
        return self.metadata.annotations.get(RELEASED) == str(self.metadata.generation)

    def _annotation(self, name: str) -> str:
        """Return an annotation of the plan that set `spec.replicas`, or an empty text if another writer set it.

        In the second case, annotations of an older plan may still exist. They are ignored.
        """
        ours = any(each in tuple(PlanWriter) for each in self.owners)
        return self.metadata.annotations.get(name, "") if ours else ""


class _RoleStatus(Struct, frozen=True):
    name: str
    desired: int = 0
    ready: int = 0
    registered: int = 0
    draining: int = 0


class _Status(Struct, frozen=True, rename="camel"):
    """Reads the fields of a DisaggDeployment's status that the connector needs, and ignores all other fields."""

    observed_generation: int = 0
    roles: tuple[_RoleStatus, ...] = ()
    conditions: tuple[_Condition, ...] = ()


class KubernetesConnector:
    """Writes plans into RoleScalers.

    Implements `fleet.planner.ports.PlanConnector`; `writer` is the field manager of the writes.
    """

    def __init__(self, cluster: KubernetesApi, target: KubernetesTarget, writer: PlanWriter) -> None:
        self.cluster = cluster
        self._target = target
        self._writer = writer

    async def observe(self) -> Observation:
        try:
            async with asyncio.timeout(ports.CALL_SECONDS):
                return await self._look()
        except TimeoutError as error:
            raise ports.ConnectorUnreachable("the API server does not answer in time") from error
        except KubernetesError as error:
            raise _unreachable(error) from error

    async def apply(self, plan: Plan, seen: Observation) -> None:
        try:
            async with asyncio.timeout(ports.CALL_SECONDS):
                for each in to_write(plan, seen, await self._look()):
                    await self._write(each, plan)
        except TimeoutError as error:
            raise ports.ConnectorUnreachable(
                "the API server does not answer in time; perhaps it has done it"
            ) from error
        except KubernetesError as error:
            raise _unreachable(error) from error

    async def release(self, pools: Sequence[PoolName]) -> None:
        """Give pools back to the planner: they keep their numbers, and the planner may change them again.

        The writer of this connector must be the planner.

        Raises:
            PlanRefused: A pool or its RoleScaler does not exist, its `scaling.mode` is not Planner, or the API server
                refused the write.
            PlanConflict: The specification of a pool's RoleScaler has just changed, or another write interfered with
                each of `TRIES` attempts. The pools that precede this pool in `pools` are released.
            ConnectorUnreachable: The API server does not answer or fails, or the deployment is missing or cannot be read; some of
                the pools may be released.
        """
        assert self._writer is PlanWriter.PLANNER, "another writer would only pin the pool again"
        try:
            async with asyncio.timeout(ports.CALL_SECONDS):
                seen = await self._look()
                found = {name: seen.pool(name) for name in pools}
                for name, pool in found.items():
                    if pool is None:
                        there = ", ".join(each.name for each in seen.pools)
                        raise ports.PlanRefused(name, f"there is no such pool; there are {there}")
                    if pool.pinned and not pool.pinned.startswith(PINNED):
                        raise ports.PlanRefused(name, pool.pinned)
                for pool in filter(None, found.values()):
                    await self._replace(pool, pool.wanted, released=True)
        except TimeoutError as error:
            raise ports.ConnectorUnreachable(
                "the API server does not answer in time; perhaps it has done it"
            ) from error
        except KubernetesError as error:
            raise _unreachable(error) from error

    async def _write(self, pool: PoolObservation, plan: Plan) -> None:
        replicas = plan.replicas[pool.name]
        await self._replace(pool, replicas, {PLAN: plan.id, BEFORE: str(pool.before_a_write(replicas))})

    async def _replace(
        self,
        pool: PoolObservation,
        replicas: int,
        annotations: Mapping[str, str] | None = None,
        *,
        released: bool = False,
    ) -> None:
        """Write a number of replicas into the RoleScaler of a pool.

        Raises:
            PlanConflict: The specification of the RoleScaler has changed since the observation `pool`, the RoleScaler
                was deleted, or another write interfered with each of `TRIES` attempts.
            PlanRefused: The API server refused the write.
            KubernetesError: The API server failed.
        """
        for _ in range(TRIES):
            scaler = (await self._scalers()).get(pool.name)
            if scaler is None or (scaler.version, scaler.plan) != (pool.version, pool.plan):
                break
            metadata = {
                "name": scaler.metadata.name,
                "namespace": scaler.metadata.namespace,
                "resourceVersion": scaler.metadata.resource_version,
                "annotations": {
                    **(annotations or {}),
                    RELEASED: str(scaler.metadata.generation) if released else "",
                },
            }
            kind = kinds.ROLE_SCALER
            manifest = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata}
            try:
                await self.cluster.apply(kind, _Scaler, manifest | {"spec": {"replicas": replicas}})
            except ObjectConflict:
                continue
            except RequestDenied as error:
                raise ports.PlanRefused(pool.name, str(error)) from error
            return
        raise ports.PlanConflict(pool.name)

    async def _look(self) -> Observation:
        target = self._target
        try:
            found = await self.cluster.get(kinds.DISAGG_DEPLOYMENT, CustomObject, target.namespace, target.deployment)
        except ObjectMissing as error:
            raise ports.ConnectorUnreachable(
                f"there is no DisaggDeployment {target.deployment} in namespace {target.namespace}"
            ) from error
        spec = _understood(found.spec, DisaggDeploymentSpec, "specification")
        status = _understood(found.status, _Status, "status")
        current = status.observed_generation == found.metadata.generation
        scalers = await self._scalers()
        return Observation(
            tuple(
                self._pool(role, scalers.get(PoolName(role.name)), status, current, f"{target.deployment}-{role.name}-")
                for role in sorted(spec.roles, key=lambda role: role.name)
                if role.type is not RoleType.ROUTER
            )
        )

    async def _scalers(self) -> dict[PoolName, _Scaler]:
        """Return the RoleScalers of the deployment by role.

        If a role has several RoleScalers, return only the RoleScaler that the operator uses.
        """
        target = self._target
        found: dict[PoolName, _Scaler] = {}
        listed = await self.cluster.list(kinds.ROLE_SCALER, _Scaler, target.namespace)
        for each in sorted(listed.items, key=lambda each: each.metadata.name, reverse=True):
            role = PoolName(each.spec.target.role)
            if each.spec.target.deployment != target.deployment:
                continue
            if role not in found or found[role].metadata.name != f"{target.deployment}-{role}":
                found[role] = each
        return found

    def _pool(
        self, role: RoleSpec, scaler: _Scaler | None, status: _Status, current: bool, pods: str
    ) -> PoolObservation:
        there = next((each for each in status.roles if each.name == role.name), None)
        static = role.scaling.mode is ScalingMode.STATIC
        seen = PoolObservation(
            name=PoolName(role.name),
            wanted=role.replicas if static or scaler is None else scaler.spec.replicas,
            ready=_serving(there, status) if there is not None else 0,
            draining=there.draining if there is not None else 0,
            plan=scaler.plan if scaler is not None else PlanId(""),
            before=scaler.before if scaler is not None else None,
            version=scaler.version if scaler is not None else "",
            pinned=self._pinned(role, scaler),
        )
        if there is not None and seen.ready == there.desired == seen.wanted:
            return seen
        if not current:
            return structs.replace(
                seen, why=PoolGapReason.NOT_TAKEN_UP, message="the operator has not seen the deployment as it is"
            )
        why, message = _why(seen, None if static else scaler, there, status, pods)
        return structs.replace(seen, why=why, message=message)

    def _pinned(self, role: RoleSpec, scaler: _Scaler | None) -> str:
        if role.scaling.mode is ScalingMode.STATIC:
            return "scaling.mode is Static: its replicas are those of the DisaggDeployment's specification"
        if scaler is None:
            return "the operator has not made its RoleScaler yet"
        if self._writer is PlanWriter.PERSON:
            return ""
        if role.scaling.mode is ScalingMode.EXTERNAL:
            return "scaling.mode is External: it is scaled by others than a planner"
        if scaler.released:
            return ""
        others = [each for each in scaler.owners if each not in (MANAGER, PlanWriter.PLANNER)]
        if not others:
            return ""
        where = f"{self._target.namespace}/{self._target.deployment}"
        return (
            f"{PINNED}{others[0]} has set it to {scaler.spec.replicas};"
            f" fleet scale --release {role.name} --deployment {where} gives it back"
        )


def _serving(role: _RoleStatus, status: _Status) -> int:
    """Return the number of replicas that serve: the number of ready or of registered replicas, whichever is smaller.

    If it is unknown which workers are registered, count all ready replicas.
    """
    unknown = _condition(status.conditions, "RolesRegistered", "Unknown")
    return role.ready if unknown is not None else min(role.ready, role.registered)


def _why(
    seen: PoolObservation, scaler: _Scaler | None, there: _RoleStatus | None, status: _Status, pods: str
) -> tuple[PoolGapReason, str]:
    """Return why the number of replicas of a pool differs from the requested number.

    `pods` is the text with which the names of the pool's pods and workload objects begin.
    """
    if scaler is not None and scaler.status.observed_generation != scaler.metadata.generation:
        return PoolGapReason.NOT_TAKEN_UP, "the operator has not seen it yet"
    if there is None or there.desired != seen.wanted:
        bounds = _condition(scaler.status.conditions if scaler is not None else (), "WithinBounds", "False")
        if bounds is not None:
            return PoolGapReason.LIMITED, bounds.message
        return PoolGapReason.NOT_TAKEN_UP, "the operator has not acted on it yet"
    unplaced = _condition(status.conditions, "Scheduled", "False")
    if unplaced is not None and pods in unplaced.message:
        return PoolGapReason.NO_ROOM, unplaced.message
    degraded = _condition(status.conditions, "Degraded", "True")
    if degraded is not None and pods in degraded.message and degraded.reason not in {each.name for each in UNPLACED}:
        return PoolGapReason.FAILING, degraded.message
    return PoolGapReason.UNDER_WAY, ""


def _condition(conditions: tuple[_Condition, ...], kind: str, status: str) -> _Condition | None:
    return next((each for each in conditions if (each.type, each.status) == (kind, status)), None)


def _understood(content: Mapping[str, Any], of: type[Decoded], what: str) -> Decoded:
    try:
        return msgspec.convert(content, of)
    except msgspec.ValidationError as error:
        raise ports.ConnectorUnreachable(f"the deployment's {what} is written for another version: {error}") from error


def _unreachable(error: KubernetesError) -> ports.ConnectorUnreachable:
    return ports.ConnectorUnreachable(f"the API server: {error}")


@asynccontextmanager
async def kubernetes_connector(target: KubernetesTarget, writer: PlanWriter) -> AsyncIterator[KubernetesConnector]:
    """Open a connector to the RoleScalers of a deployment.

    Raises:
        ConfigurationRefused: The kubeconfig does not exist or cannot be used. Or none is named, and this process runs in no pod.
    """
    async with AsyncExitStack() as stack:
        try:
            cluster = await stack.enter_async_context(open_api_client(target.kubeconfig, f"fleet/{writer}", writer))
        except KubernetesError as error:
            raise ConfigurationRefused(f"connector.{error}") from error
        yield KubernetesConnector(cluster, target, writer)
