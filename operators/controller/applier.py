"""Applier: performs the actions of `reconcile`. All writes pass through it.

Rules:

1. A process that does not lead writes nothing, not even the rest of a pass that it has begun.
2. The answer to a write goes into the cache at once (`fleet.net.kubernetes.cache`, rule 1).
3. A late write, sent before the Lease was lost, is harmless: replicas change only if they have the observed number, a
   removal names the uid, and the next leader notices the other digest of a late apply and applies again.
4. A new object is created only if its name is free, and an object is changed only if its uid is the known one, so that
   an outdated cache harms nobody's object. If a name turns out to be taken, the object is read and handled like any
   other.
5. A refusal of the API server is recorded, and the other actions are still performed. Any other failure ends the pass.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, assert_never

from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.events import KubernetesEvent, event_manifest
from fleet.net.kubernetes.kinds import ApiKind
from fleet.net.kubernetes.ports import KubernetesApi, Manifest, NameTaken, ObjectConflict, ObjectMissing, RequestDenied
from fleet.net.kubernetes.views import VIEW_OF_KIND, CustomObject, NamedObject, Pod, WorkloadResource
from operators.controller.events import CONTROLLER
from operators.controller.reconcile import Action, Apply, DeletePod, OpenGate, Remove, Scale, SetDeletionCost
from operators.controller.refusals import refusal
from operators.manifests.names import GATE
from operators.observed.caches import InformerCaches
from operators.observed.drift import DriftDetector
from operators.observed.observe import DELETION_COST
from operators.observed.state import ApiRefusal
from operators.telemetry import OperatorMetrics

# most created Secrets that are remembered; a forgotten one is created again, which changes nothing
MOST_SECRETS = 100_000


class NotLeading(Exception):
    """A write is not made, because this process does not lead, or may soon not lead any more."""


class Applier:
    """Performs the actions of `reconcile` as writes to the API server."""

    def __init__(
        self,
        cluster: KubernetesApi,
        store: InformerCaches,
        leads: Callable[[], bool],
        metrics: OperatorMetrics,
        identity: str,
    ) -> None:
        self.drift = DriftDetector()
        """Learns from each write."""

        self._cluster = cluster
        self._store = store
        self._leads = leads
        self._metrics = metrics
        self._identity = identity
        self._secrets: dict[tuple[str, str, str], None] = {}  # created Secrets in the order of their creation

    async def perform(self, actions: Sequence[Action], namespace: str) -> tuple[ApiRefusal, ...]:
        """Perform actions; return the refusals.

        Raises:
            KubernetesError: The API server failed.
            NotLeading: This process must not write.
        """
        refusals = []
        for action in actions:
            try:
                await self._perform(action, namespace)
            except RequestDenied as error:
                refusals.append(refusal(action, error))
        return tuple(sorted(refusals))

    async def make_secret(self, manifest: Manifest, *, again: bool = False) -> tuple[ApiRefusal, ...]:
        """Create a Secret that never changes, once; return why it was refused.

        Args:
            manifest: The Secret. An existing Secret of that name is not examined, because the operator may not read
                Secrets.
            again: Whether to create it again if it has been removed.

        Raises:
            KubernetesError: The API server failed.
            NotLeading: This process must not write.
        """
        metadata = manifest["metadata"]
        key = (metadata["namespace"], metadata["name"], metadata["ownerReferences"][0]["uid"])
        if key in self._secrets and not again:
            return ()
        self._permit("create")
        try:
            await self._cluster.create(kinds.SECRET, NamedObject, metadata["namespace"], manifest)
        # not remembered, because this Secret may belong to a former deployment of the same name and be deleted with it
        except NameTaken:
            return ()
        except RequestDenied as error:
            return (ApiRefusal(kinds.SECRET.name, metadata["name"], error.reason, str(error)),)
        self._secrets[key] = None
        while len(self._secrets) > MOST_SECRETS:
            del self._secrets[next(iter(self._secrets))]
        return ()

    async def write_status(self, kind: ApiKind, custom: CustomObject, status: Mapping[str, Any]) -> None:
        """Write a status in place of the one that we wrote before.

        Raises:
            KubernetesError: It was not written.
            NotLeading: This process must not write.
        """
        metadata = {"name": custom.metadata.name, "namespace": custom.metadata.namespace, "uid": custom.metadata.uid}
        manifest = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "status": dict(status)}
        self._permit("status")
        self._store.of(kind, CustomObject).put(await self._cluster.apply(kind, CustomObject, manifest, "status"))

    async def record(
        self, kind: ApiKind, about: NamedObject, recorded: Sequence[KubernetesEvent], now: datetime
    ) -> None:
        """Create Events; an existing or refused Event is skipped.

        Raises:
            KubernetesError: The API server failed.
            NotLeading: This process must not write.
        """
        for each in recorded:
            made = event_manifest(each, kind, about.metadata, now, controller=CONTROLLER, identity=self._identity)
            self._permit("event")
            try:
                await self._cluster.create(kinds.EVENT, NamedObject, about.metadata.namespace, made)
            except (RequestDenied, ObjectMissing, NameTaken):
                continue

    async def _perform(self, action: Action, namespace: str) -> None:
        match action:
            case Apply(manifest):
                await self._apply(kinds.BY_NAME[manifest["kind"]], manifest)
            case Scale(name, child, replicas, was):
                await self._scale(kinds.BY_NAME[name], namespace, child, replicas, was)
            case SetDeletionCost(pod, cost):
                await self._value(namespace, pod, cost)
            case Remove(name, child):
                await self._remove(kinds.BY_NAME[name], namespace, child)
            case DeletePod(pod):
                await self._remove(kinds.POD, namespace, pod)
            case OpenGate(pod):
                await self._open_gate(namespace, pod)
            case _:
                assert_never(action)

    async def _apply(self, kind: ApiKind, manifest: Manifest) -> None:
        """Create an object or update it (rule 4).

        Raises:
            ObjectConflict: The object is not the known one, or the name was taken by an object that is known from now
                on.
        """
        view, metadata = VIEW_OF_KIND[kind], manifest["metadata"]
        cache = self._store.of(kind, view)
        found = cache.get(metadata["namespace"], metadata["name"])
        if found is None or kind == kinds.ROLE_SCALER:
            await self._make(kind, view, manifest)
            return
        owners = {each["uid"] for each in metadata.get("ownerReferences", ()) if each.get("controller")}
        if owners and found.metadata.owner_references and found.metadata.owner_uid not in owners:
            raise NameTaken(f"{kind.name} {metadata['name']} belongs to somebody else since the decision")
        self._permit("apply")
        held = manifest | {"metadata": metadata | {"uid": found.metadata.uid}}
        answer = await self._cluster.apply(kind, view, held)
        cache.put(answer)
        self.drift.applied(answer)

    async def _make(self, kind: ApiKind, view: type[NamedObject], manifest: Manifest) -> None:
        """Create an object.

        A RoleScaler is created and not applied, because others write it from then on, so that we own none of its
        fields.
        """
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        cache = self._store.of(kind, view)
        make = self._cluster.create if kind == kinds.ROLE_SCALER else self._cluster.make
        self._permit("create")
        try:
            made = await make(kind, view, namespace, manifest)
        except NameTaken as error:
            if (found := await self._cluster.find(kind, view, namespace, name)) is not None:
                cache.put(found)
            raise NameTaken(f"{kind.name} {name} exists already") from error
        cache.put(made)
        self.drift.applied(made)

    async def _scale(self, kind: ApiKind, namespace: str, name: str, replicas: int, was: int | None) -> None:
        cache = self._store.of(kind, WorkloadResource)
        found = cache.get(namespace, name)
        if found is None:
            raise ObjectConflict(f"{kind.name} {name} does not exist any more")
        operations: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": found.metadata.uid},
            {"op": "test", "path": "/spec/replicas", "value": found.spec.replicas if was is None else was},
            {"op": "replace", "path": "/spec/replicas", "value": replicas},
        ]
        self._permit("scale")
        answer = await self._cluster.patch(kind, WorkloadResource, namespace, name, operations)
        cache.put(answer)
        self.drift.scaled(answer)

    async def _value(self, namespace: str, name: str, cost: int) -> None:
        cache = self._store.of(kinds.POD, Pod)
        if (found := cache.get(namespace, name)) is None:
            return
        metadata = {
            "name": name,
            "namespace": namespace,
            "uid": found.metadata.uid,
            "annotations": {DELETION_COST: str(cost)},
        }
        self._permit("value")
        manifest = {"apiVersion": kinds.POD.api_version, "kind": kinds.POD.name, "metadata": metadata}
        cache.put(await self._cluster.apply(kinds.POD, Pod, manifest))

    async def _open_gate(self, namespace: str, name: str) -> None:
        """Take the operator's gate from a pod, and leave the gates of others."""
        cache = self._store.of(kinds.POD, Pod)
        if (found := cache.get(namespace, name)) is None:
            return
        gates = [each.name for each in found.spec.scheduling_gates or ()]
        if GATE not in gates:
            return
        path = f"/spec/schedulingGates/{gates.index(GATE)}"
        operations: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": found.metadata.uid},
            {"op": "test", "path": f"{path}/name", "value": GATE},
            {"op": "remove", "path": path},
        ]
        self._permit("gate")
        cache.put(await self._cluster.patch(kinds.POD, Pod, namespace, name, operations))

    async def _remove(self, kind: ApiKind, namespace: str, name: str) -> None:
        cache = self._store.any(kind)
        if (found := cache.get(namespace, name)) is None:
            return
        self._permit("remove")
        with suppress(ObjectMissing):
            await self._cluster.delete(kind, namespace, name, found.metadata.uid)
        cache.remove(namespace, name)

    def _permit(self, write: str) -> None:
        if not self._leads():
            raise NotLeading
        self._metrics.wrote(write)
