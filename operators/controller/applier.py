"""Applier: performs the actions of `reconcile`. All writes pass through it.

Rules:

1. A process that does not lead writes nothing. If it loses the Lease in the middle of a reconcile, it does not perform
   the remaining actions.
2. The object that the API server returns for a write is put into the cache at once, so that the next reconcile sees it
   (`fleet.net.kubernetes.cache`, rule 1).
3. A write that was sent before the Lease was lost, and that arrives late, is harmless. Replicas change only if their
   number is still the observed one. A removal names the uid of the object, so it never removes a later object of the same
   name. After a late apply, the next leader finds a wrong digest and applies its own manifest.
4. A new object is created only if its name is free, and an object is changed only if it has the uid that the cache
   knows. So an operator with an outdated cache never overwrites an object of somebody else. If the name of a new object
   is taken, the existing object is read into the cache, and the next reconcile decides with this knowledge.
5. If the API server refuses an action, the refusal is recorded, and the other actions are still performed. Any other
   failure ends the reconcile.
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

# The maximum number of created Secrets that are remembered. A forgotten Secret does no harm: it is sent again, and the API
# server refuses it, because its name is taken.
MOST_SECRETS = 100_000


class NotLeading(Exception):
    """A write was not sent, because this process does not lead, or because its Lease may end before the write arrives."""


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
        """Detects child objects that others have edited. It is told what the API server returned for each apply, create and scale."""

        self._cluster = cluster
        self._store = store
        self._leads = leads
        self._metrics = metrics
        self._identity = identity
        self._secrets: dict[tuple[str, str, str], None] = {}  # (namespace, name, uid of the owner), oldest first

    async def perform(self, actions: Sequence[Action], namespace: str) -> tuple[ApiRefusal, ...]:
        """Perform the actions in their order; return the refusals of the API server.

        Raises:
            KubernetesError: The API server failed, or an object has changed since the decision (`ObjectConflict`).
            NotLeading: This process does not lead, so it must not write.
        """
        refusals = []
        for action in actions:
            try:
                await self._perform(action, namespace)
            except RequestDenied as error:
                refusals.append(refusal(action, error))
        return tuple(sorted(refusals))

    async def make_secret(self, manifest: Manifest, *, again: bool = False) -> tuple[ApiRefusal, ...]:
        """Create an immutable Secret, unless this process has created it before; return the refusals of the API server.

        Args:
            manifest: The Secret. An existing Secret of that name is not examined, because the operator may not read
                Secrets.
            again: If true, send the request even if this process has created the Secret before: it may have been
                removed.

        Raises:
            KubernetesError: The API server failed.
            NotLeading: This process does not lead, so it must not write.
        """
        metadata = manifest["metadata"]
        key = (metadata["namespace"], metadata["name"], metadata["ownerReferences"][0]["uid"])
        if key in self._secrets and not again:
            return ()
        self._permit("create")
        try:
            await self._cluster.create(kinds.SECRET, NamedObject, metadata["namespace"], manifest)
        # The existing Secret may belong to a deleted deployment of the same name, and may itself be deleted soon. So it is
        # not remembered, and the next reconcile sends the Secret again.
        except NameTaken:
            return ()
        except RequestDenied as error:
            return (ApiRefusal(kinds.SECRET.name, metadata["name"], error.reason, str(error)),)
        self._secrets[key] = None
        while len(self._secrets) > MOST_SECRETS:
            del self._secrets[next(iter(self._secrets))]
        return ()

    async def write_status(self, kind: ApiKind, custom: CustomObject, status: Mapping[str, Any]) -> None:
        """Write the status of a custom object. It replaces the status that the operator wrote before.

        Raises:
            KubernetesError: The status was not written.
            NotLeading: This process does not lead, so it must not write.
        """
        metadata = {"name": custom.metadata.name, "namespace": custom.metadata.namespace, "uid": custom.metadata.uid}
        manifest = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "status": dict(status)}
        self._permit("status")
        self._store.of(kind, CustomObject).put(await self._cluster.apply(kind, CustomObject, manifest, "status"))

    async def record(
        self, kind: ApiKind, about: NamedObject, recorded: Sequence[KubernetesEvent], now: datetime
    ) -> None:
        """Create Kubernetes events about an object. Skip an event that exists already, that is refused, or whose namespace is missing.

        Raises:
            KubernetesError: The API server failed.
            NotLeading: This process does not lead, so it must not write.
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
            ObjectConflict: The object belongs to another owner by now, or was replaced by another object of its name. For
                a new object: its name is taken, and the existing object of this name is in the cache now.
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

        A RoleScaler is created by a plain create, and not by a server-side apply. Autoscalers and the planner write it
        afterwards, so the operator must not own any of its fields.
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
        """Remove the operator's scheduling gate from a pod, and leave the gates of other controllers."""
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
