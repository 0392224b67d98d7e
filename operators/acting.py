"""Performs what `reconcile` has decided. Every write passes through here.

Rules:

1. Nothing is written by who does not lead any more, not even the rest of what it has begun.
2. What a write answers goes into the cache at once (`operators.cache`, rule 1).
3. A write that comes late, sent before the Lease was lost, does no harm: replicas are changed only where they are what was seen, removals name
   the uid, and what is applied late is applied again by the next leader, which sees another digest.
4. What the API server will not do is remembered as a refusal, and the rest is done all the same. Any other failure ends the pass.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, assert_never

from operators import happenings, kinds
from operators.happenings import Happening
from operators.kinds import Kind
from operators.observe import DELETION_COST, Store
from operators.ports import Cluster, Denied, Manifest, Missing, Stale
from operators.reconcile import Action, Apply, End, Remove, Scale, Value
from operators.seen import Refusal
from operators.telemetry import Metrics
from operators.views import OF_KIND, Custom, Named, Pod, Scaled


class NotLeading(Exception):
    """Somebody else acts, or may soon."""


class Hand:
    """What writes."""

    def __init__(
        self, cluster: Cluster, store: Store, leads: Callable[[], bool], metrics: Metrics, identity: str
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._leads = leads
        self._metrics = metrics
        self._identity = identity

    async def perform(self, actions: Sequence[Action], namespace: str) -> tuple[Refusal, ...]:
        """What was refused of it.

        Raises:
            ClusterError: It could not go on.
            NotLeading: It must not.
        """
        refusals = []
        for action in actions:
            try:
                await self._perform(action, namespace)
            except Denied as error:
                match action:
                    case Apply(manifest):
                        kind, name = manifest["kind"], manifest["metadata"]["name"]
                    case Scale(kind, name) | Remove(kind, name):
                        pass
                    case Value(name) | End(name):
                        kind = kinds.POD.name
                    case _:
                        assert_never(action)
                reason = "QuotaExceeded" if "exceeded quota" in str(error) else error.reason
                refusals.append(Refusal(kind, name, reason, str(error)))
        return tuple(sorted(refusals))

    async def write_status(self, kind: Kind, custom: Custom, status: Mapping[str, Any]) -> None:
        """Write it in place of what we have written there before.

        Raises:
            ClusterError: It was not written.
            NotLeading: It must not be.
        """
        metadata = {"name": custom.metadata.name, "namespace": custom.metadata.namespace, "uid": custom.metadata.uid}
        manifest = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "status": dict(status)}
        self._permit("status")
        self._store.of(kind, Custom).put(await self._cluster.apply(kind, Custom, manifest, "status"))

    async def record(self, kind: Kind, about: Named, happened: Sequence[Happening], now: datetime) -> None:
        """Make Events of it; that one was made before, or may not be made, stops nobody.

        Raises:
            ClusterError: The API server cannot be reached.
            NotLeading: It must not be.
        """
        for each in happened:
            made = happenings.manifest(each, kind, about, self._identity, now)
            self._permit("event")
            try:
                await self._cluster.create(kinds.EVENT, Named, about.metadata.namespace, made)
            except (Denied, Missing):
                continue

    async def _perform(self, action: Action, namespace: str) -> None:
        match action:
            case Apply(manifest):
                kind = kinds.BY_NAME[manifest["kind"]]
                await self._apply(kind, self._held(kind, manifest))
            case Scale(name, child, replicas, was):
                await self._scale(kinds.BY_NAME[name], namespace, child, replicas, was)
            case Value(pod, cost):
                await self._value(namespace, pod, cost)
            case Remove(name, child):
                await self._remove(kinds.BY_NAME[name], namespace, child)
            case End(pod):
                await self._remove(kinds.POD, namespace, pod)
            case _:
                assert_never(action)

    def _held(self, kind: Kind, manifest: Manifest) -> Manifest:
        """With the uid of the object that it is for, if there is one: no other one of that name is changed."""
        metadata = manifest["metadata"]
        found = self._store.any(kind).get(metadata["namespace"], metadata["name"])
        return manifest if found is None else manifest | {"metadata": metadata | {"uid": found.metadata.uid}}

    async def _apply(self, kind: Kind, manifest: Manifest) -> None:
        view = OF_KIND[kind]
        if kind == kinds.ROLE_SCALER:
            await self._create(kind, view, manifest)
            return
        self._permit("apply")
        self._store.of(kind, view).put(await self._cluster.apply(kind, view, manifest))

    async def _create(self, kind: Kind, view: type[Named], manifest: Manifest) -> None:
        """Of what somebody else writes from then on: what is there already, and was not told yet, is as that somebody wants it."""
        self._permit("create")
        try:
            made = await self._cluster.create(kind, view, manifest["metadata"]["namespace"], manifest)
        except Denied as error:
            if error.reason == "AlreadyExists":
                raise Stale(f"{kind.name} {manifest['metadata']['name']} is there already") from error
            raise
        self._store.of(kind, view).put(made)

    async def _scale(self, kind: Kind, namespace: str, name: str, replicas: int, was: int | None) -> None:
        cache = self._store.of(kind, Scaled)
        found = cache.get(namespace, name)
        if found is None:
            raise Stale(f"{kind.name} {name} is not there any more")
        operations: list[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": found.metadata.uid},
            {"op": "test", "path": "/spec/replicas", "value": found.spec.replicas if was is None else was},
            {"op": "replace", "path": "/spec/replicas", "value": replicas},
        ]
        self._permit("scale")
        cache.put(await self._cluster.patch(kind, Scaled, namespace, name, operations))

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

    async def _remove(self, kind: Kind, namespace: str, name: str) -> None:
        cache = self._store.any(kind)
        if (found := cache.get(namespace, name)) is None:
            return
        self._permit("remove")
        with suppress(Missing):
            await self._cluster.delete(kind, namespace, name, found.metadata.uid)
        cache.remove(namespace, name)

    def _permit(self, write: str) -> None:
        if not self._leads():
            raise NotLeading
        self._metrics.wrote(write)
