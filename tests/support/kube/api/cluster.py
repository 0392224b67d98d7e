"""Object store of the API server for tests: creates, changes and deletes objects, without HTTP, tasks or waiting.

Rules:

1. Every write passes the same steps: decode the object and find unknown fields, apply defaults, validate, update field
ownership, store. A write that changes nothing is not stored.
2. `status` is written only through its subresource, and everything else only through the object itself.
3. `generation` counts the changes of all fields except metadata and status.
4. The deletion of an object with finalizers only marks the object as deleted. The object is removed when its last
   finalizer is removed. Nobody can add a finalizer to an object that is marked as deleted.
"""

import random
import uuid
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from tests.support.kube.api import errors, names, ownership, patching, typed_patches
from tests.support.kube.api.errors import ApiError, ErrorCause
from tests.support.kube.api.kinds import ages, builtin_rules, custom
from tests.support.kube.api.kinds import builtin as builtin_kinds
from tests.support.kube.api.kinds import cel_rules as rules
from tests.support.kube.api.kinds.resources import Place, ServedResource
from tests.support.kube.api.kinds.schemas import drop_nulls, fill_defaults, prune, violations
from tests.support.kube.api.ownership import Manager
from tests.support.kube.api.storage import Key, Storage
from tests.support.kube.api.values import Json, Object, clone, dig, without

NAMESPACES: Place = ("", "namespaces")
PODS: Place = ("", "pods")
API_SERVICES: Place = ("apiregistration.k8s.io", "apiservices")
UNCONDITIONAL_NOT_ALLOWED = frozenset({"Lease", "CustomResourceDefinition", "PodDisruptionBudget"})
CAUSES_SHOWN = 10


class Validation(StrEnum):
    """Says what happens to fields of a write that the schema does not have."""

    IGNORE = "Ignore"
    WARN = "Warn"
    STRICT = "Strict"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the options of a write request."""

    manager: str = "unknown"
    dry_run: bool = False
    validation: Validation = Validation.WARN
    force: bool = False
    subresource: str = ""


class Written(msgspec.Struct, frozen=True):
    item: Object
    created: bool = False
    warnings: tuple[str, ...] = ()


class ObjectStore:
    def __init__(self, *, chance: random.Random | None = None):
        self.storage = Storage()
        self.catalogue = builtin_kinds.catalogue()
        self._chance = chance or random.Random()
        self._addresses = 0
        for name in ("default", "kube-system", "kube-public", "kube-node-lease"):
            self.create(
                self.catalogue.at(NAMESPACES), "", {"metadata": {"name": name}}, Options(manager="kube-apiserver")
            )
        self._list_api_services()

    # Reading.

    def get(self, resource: ServedResource, namespace: str, name: str) -> Object:
        """Return an object as stored; the caller has to copy it before changing it.

        Raises:
            ApiError: It does not exist.
        """
        found = self.storage.get(resource.place, _key(resource, namespace, name))
        if found is None:
            raise errors.not_found(*resource.place, name)
        return as_version(found, resource)

    # Writing.

    def create(
        self,
        resource: ServedResource,
        namespace: str,
        body: Json,
        options: Options,
        *,
        claims: ownership.Claims | None = None,
    ) -> Written:
        """Create an object. `claims` are the owners of its fields; None: the sender owns all fields."""
        item = _decoded(resource, body)
        metadata = item["metadata"]
        self._check_namespace(resource, namespace, metadata)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = names.generated(metadata["generateName"], self._chance)
        if metadata.get("resourceVersion") not in {None, ""}:
            raise ApiError("BadRequest", "resourceVersion should not be set on objects to be created")
        if not metadata.get("name"):
            cause = errors.required("metadata.name", "name or generateName is required")
            raise errors.invalid(resource.group, resource.kind, metadata.get("name", ""), [cause])
        for name in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "managedFields"):
            metadata.pop(name, None)
        metadata |= {
            "uid": str(uuid.UUID(int=self._chance.getrandbits(128), version=4)),
            "creationTimestamp": ages.now(),
        }
        if resource.has_generation:
            metadata["generation"] = 1
        if resource.has_status:
            item.pop("status", None)
        warnings = self._admit(resource, item, None, options)
        if self.storage.get(resource.place, _key(resource, namespace, metadata["name"])) is not None:
            raise errors.already_exists(*resource.place, metadata["name"])
        if claims is None:
            manager = Manager(options.manager, "Update", resource.api_version)
            claims = ownership.claims_after_write({}, manager, {}, item, resource.shape, ages.now())
        ownership.write_claims(metadata, claims)
        return Written(self._keep(resource, namespace, item, options), created=True, warnings=warnings)

    def replace(self, resource: ServedResource, namespace: str, name: str, body: Json, options: Options) -> Written:
        item = _decoded(resource, body)
        if item["metadata"].setdefault("name", name) != name:
            raise ApiError(
                "BadRequest",
                f"the name of the object ({item['metadata']['name']}) does not match the name on the URL ({name})",
            )
        old = self.get(resource, namespace, name)
        if not item["metadata"].get("resourceVersion") and (
            resource.custom or resource.kind in UNCONDITIONAL_NOT_ALLOWED
        ):
            cause = errors.invalid_value("metadata.resourceVersion", 0, "must be specified for an update")
            raise errors.invalid(resource.group, resource.kind, name, [cause])
        return self._change(resource, namespace, old, item, options)

    def patch(
        self, resource: ServedResource, namespace: str, name: str, kind: str, body: Json, options: Options
    ) -> Written:
        """Patch an object.

        `kind` is the media type of the patch without `application/` and suffix: `merge-patch`, `json-patch`, ...

        Raises:
            ApiError: The patch or its result is invalid; 415 for a strategic merge of a custom resource.
        """
        if kind == "apply-patch":
            return self._apply(resource, namespace, name, body, options)
        old = self.get(resource, namespace, name)
        if kind == "json-patch":
            item = patching.json_patch(old, body, group=resource.group, kind=resource.plural)
        elif not isinstance(body, dict):
            raise ApiError("BadRequest", "the body of the patch is not an object")
        elif kind == "merge-patch":
            item = clone(patching.merge_patch(old, body))
        elif kind == "strategic-merge-patch" and not resource.custom:
            item = patching.strategic_merge(old, body, resource.shape)
        else:
            known = ["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"]
            raise ApiError(
                "UnsupportedMediaType",
                f"the body of the request was in an unknown format - accepted media types include: {', '.join(known)}",
            )
        return self._change(resource, namespace, old, _decoded(resource, item), options)

    def _apply(self, resource: ServedResource, namespace: str, name: str, body: Json, options: Options) -> Written:
        applied = _decoded(resource, body)
        metadata = applied["metadata"]
        if metadata.setdefault("name", name) != name:
            raise ApiError(
                "BadRequest", f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
            )
        if metadata.get("managedFields"):
            raise ApiError("BadRequest", "metadata.managedFields must be nil")
        self._check_namespace(resource, namespace, metadata, exists=False)
        drop_nulls(applied, resource.shape)
        typed_patches.check_types(applied, resource)
        _only(applied, options.subresource, resource)
        live = self.storage.get(resource.place, _key(resource, namespace, name))
        manager = Manager(options.manager, "Apply", resource.api_version, options.subresource)
        if live is None:
            if options.subresource:
                raise errors.not_found(*resource.place, name)
            self._check_namespace(resource, namespace, metadata)
            if uid := metadata.get("uid"):
                text = f"uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                raise errors.conflict(*resource.place, name, text)
            # Every resourceVersion is accepted, because there is no stored object to compare it with.
            metadata.pop("resourceVersion", None)
            _, claims = ownership.apply(None, applied, manager, resource.shape, ages.now(), force=options.force)
            typed_patches.check_conversion(applied, resource)
            made = self.create(resource, namespace, applied, options, claims=claims)
            return Written(made.item, created=True)
        live = as_version(live, resource)
        merged, claims = ownership.apply(live, applied, manager, resource.shape, ages.now(), force=options.force)
        typed_patches.check_conversion(merged, resource)
        return self._change(resource, namespace, live, merged, options, claims=claims)

    def _change(
        self,
        resource: ServedResource,
        namespace: str,
        old: Object,
        item: Object,
        options: Options,
        *,
        claims: ownership.Claims | None = None,
    ) -> Written:
        """Check a changed object, and store it if it differs from the stored one."""
        name, metadata, before = old["metadata"]["name"], item["metadata"], old["metadata"]
        if (asked := metadata.get("resourceVersion")) and asked != before["resourceVersion"]:
            raise errors.stale(*resource.place, name)
        if (uid := metadata.get("uid")) and uid != before["uid"]:
            raise errors.conflict(
                *resource.place,
                name,
                f"Precondition failed: UID in precondition: {before['uid']}, UID in object meta: {uid}",
            )
        if metadata.get("namespace", namespace) != namespace or metadata.get("name") != name:
            raise ApiError("BadRequest", "the name and namespace of an object cannot be changed")
        for field in (
            "name",
            "namespace",
            "uid",
            "creationTimestamp",
            "generation",
            "resourceVersion",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ):
            metadata.pop(field, None)
            if field in before:
                metadata[field] = before[field]
        if claims is None:
            claims = ownership.claims_of(before if metadata.get("managedFields") is None else metadata)
            applied = False
        else:
            applied = True
        metadata.pop("managedFields", None)
        if options.subresource == "status":
            item = clone(old) | {"status": item.get("status"), "metadata": clone(without(before, "managedFields"))}
        elif resource.has_status:
            item["status"] = clone(old.get("status"))
        if item.get("status") is None:
            item.pop("status", None)
        warnings = self._admit(resource, item, old, options)
        if not applied:
            manager = Manager(options.manager, "Update", resource.api_version, options.subresource)
            claims = ownership.claims_after_write(claims, manager, old, item, resource.shape, ages.now())
        ownership.write_claims(item["metadata"], claims)
        if resource.has_generation and _wanted(resource, item) != _wanted(resource, old):
            item["metadata"]["generation"] = before.get("generation", 0) + 1
        if item == old:
            return Written(old, warnings=warnings)
        return Written(self._keep(resource, namespace, item, options), warnings=warnings)

    def _admit(self, resource: ServedResource, item: Object, old: Object | None, options: Options) -> tuple[str, ...]:
        """Apply defaults, check the object, and return the warnings for the sender."""
        name = item["metadata"].get("name", "")
        if resource.custom:
            drop_nulls(item["metadata"], resource.shape.field("metadata"))  # type: ignore[arg-type]
        else:
            drop_nulls(item, resource.shape)
        for field in ("finalizers", "ownerReferences", "labels", "annotations"):
            if not item["metadata"].get(field):
                item["metadata"].pop(field, None)
        warnings = _refuse_unknown(resource, item, options)
        fill_defaults(item, resource.shape)
        builtin_rules.complete(resource, item, old, self._next_address)
        if resource.place == custom.PLACE:
            custom.complete(item)
        causes = list(names.metadata_violations(resource, item["metadata"])) + _new_finalizers(item, old)
        causes += violations(item, resource.shape)
        mistyped = [each for each in causes if "must be of type" in each.message and not resource.custom]
        if mistyped:
            raise ApiError(
                "BadRequest",
                f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: {mistyped[0]}',
            )
        if not causes:
            causes += builtin_rules.further_violations(resource, item, old)
            if resource.place == custom.PLACE:
                causes += custom.violations(item, self.catalogue)
            if resource.ruled:
                causes += rules.broken_rules(item, old, resource.shape)
        if causes:
            raise errors.invalid(resource.group, resource.kind, name, causes[:CAUSES_SHOWN])
        return warnings

    def _keep(self, resource: ServedResource, namespace: str, item: Object, options: Options) -> Object:
        """Store an object; if it is marked as deleted and nothing holds it any more, remove it. A dry run does neither."""
        key = _key(resource, namespace, item["metadata"]["name"])
        if options.dry_run:
            return item
        if item["metadata"].get("deletionTimestamp") and not _held(resource, item):
            self.storage.put(resource.place, key, item)
            return self._removed(resource, key)
        if (
            resource.place == custom.PLACE
            and CLEAN not in item["metadata"].get("finalizers", ())
            and not item["metadata"].get("deletionTimestamp")
        ):
            item["metadata"]["finalizers"] = [*item["metadata"].get("finalizers", ()), CLEAN]
        item = self.storage.put(resource.place, key, item)
        if resource.place == custom.PLACE and not item["metadata"].get("deletionTimestamp"):
            self._serve(_place_of(item), custom.resources_of(item))
            established = custom.establish(item)
            if established["status"] != item.get("status"):
                self.storage.put(resource.place, key, established)
        return item

    # Deletion.

    def delete(
        self, resource: ServedResource, namespace: str, name: str, wanted: Object, *, dry_run: bool = False
    ) -> tuple[Object, bool]:
        """Delete an object, or mark it as deleted if finalizers or a grace period hold it; `wanted` are DeleteOptions.

        Returns:
            The last state of the object, and whether it is removed.

        Raises:
            ApiError: The object does not exist, or differs from the preconditions.
        """
        old = self.get(resource, namespace, name)
        for field in ("uid", "resourceVersion"):
            if (asked := dig(wanted, "preconditions", field)) and asked != old["metadata"][field]:
                raise errors.conflict(
                    *resource.place,
                    name,
                    f"Precondition failed: {field} in precondition: {asked}, in object meta: {old['metadata'][field]}",
                )
        key = _key(resource, namespace, name)
        item = clone(old)
        metadata = item["metadata"]
        policy = wanted.get("propagationPolicy") or ("Orphan" if wanted.get("orphanDependents") else "Background")
        finalizers = [each for each in metadata.get("finalizers", ()) if each not in {"orphan", "foregroundDeletion"}]
        finalizers += {"Orphan": ["orphan"], "Foreground": ["foregroundDeletion"]}.get(policy, [])
        if finalizers:
            metadata["finalizers"] = finalizers
        grace = _grace_seconds(resource, item, wanted)
        held = _held(resource, item) or grace > 0
        if dry_run:
            return item, not held
        if not held:
            return self._removed(resource, key), True
        if not metadata.get("deletionTimestamp"):
            metadata |= {"deletionTimestamp": ages.now(), "deletionGracePeriodSeconds": grace}
            if "generation" in metadata:
                metadata["generation"] += 1
        elif grace == 0 and metadata.get("deletionGracePeriodSeconds"):
            metadata["deletionGracePeriodSeconds"] = 0
            if not _held(resource, item):
                return self._removed(resource, key), True
        if resource.place == NAMESPACES:
            item["status"] = (item.get("status") or {}) | {"phase": "Terminating"}
        if item != old:
            item = self.storage.put(resource.place, key, item)
        if resource.place == custom.PLACE:
            self._clean_up(item)
            gone = self.storage.get(resource.place, key) is None
            return item, gone
        return item, False

    def release(self, resource: ServedResource, key: Key, *finalizers: str) -> None:
        """Remove finalizers from an object that is being deleted, as controllers do; do nothing if the object does not exist."""
        old = self.storage.get(resource.place, key)
        if old is None:
            return
        item = clone(old)
        item["metadata"]["finalizers"] = [
            each for each in item["metadata"].get("finalizers", ()) if each not in finalizers
        ]
        if not item["metadata"]["finalizers"]:
            del item["metadata"]["finalizers"]
        if resource.place == NAMESPACES:
            item["spec"]["finalizers"] = [
                each for each in dig(item, "spec", "finalizers") or () if each not in finalizers
            ]
        self._keep(resource, key[0], item, Options())

    def _removed(self, resource: ServedResource, key: Key) -> Object:
        last = self.storage.remove(resource.place, key)
        if resource.place == custom.PLACE:
            self._serve(_place_of(last), ())
        elif resource.custom:
            definition = self.storage.get(custom.PLACE, ("", f"{resource.plural}.{resource.group}"))
            if definition is not None and definition["metadata"].get("deletionTimestamp"):
                self._clean_up(definition)
        return last

    def _clean_up(self, definition: Object) -> None:
        """Delete all objects of a kind whose definition is being deleted, and then the definition."""
        place = _place_of(definition)
        served = next((each for each in self.catalogue if each.place == place), None)
        left = self.storage.items(place)
        for each in left if served is not None else ():
            if not each["metadata"].get("deletionTimestamp"):
                self.delete(served, each["metadata"].get("namespace", ""), each["metadata"]["name"], {})  # type: ignore[arg-type]
        if not self.storage.items(place) and self.storage.get(custom.PLACE, ("", definition["metadata"]["name"])):
            self.release(self.catalogue.at(custom.PLACE), ("", definition["metadata"]["name"]), CLEAN)

    # Details.

    def _serve(self, place: Place, resources: Sequence[ServedResource]) -> None:
        """Serve these versions of a custom kind, and list each version of each group as an APIService."""
        self.catalogue.replace(place, resources)
        self._list_api_services()

    def _list_api_services(self) -> None:
        kind = self.catalogue.at(API_SERVICES)
        served = {f"{each.version}.{each.group}": each for each in self.catalogue}
        listed = {each["metadata"]["name"] for each in self.storage.items(API_SERVICES)}
        for name in listed - served.keys():
            self.delete(kind, "", name, {})
        for name in sorted(served.keys() - listed):
            spec = {"version": served[name].version, "groupPriorityMinimum": 1000, "versionPriority": 100}
            spec |= {"group": served[name].group} if served[name].group else {}
            metadata = {"name": name, "labels": {"kube-aggregator.kubernetes.io/automanaged": "true"}}
            self.create(kind, "", {"metadata": metadata, "spec": spec}, Options(manager="kube-apiserver"))

    def _check_namespace(
        self, resource: ServedResource, namespace: str, metadata: Object, *, exists: bool = True
    ) -> None:
        if not resource.namespaced:
            metadata.pop("namespace", None)
            return
        if metadata.setdefault("namespace", namespace) != namespace:
            raise ApiError(
                "BadRequest", "the namespace of the provided object does not match the namespace sent on the request"
            )
        if not exists:
            return
        found = self.storage.get(NAMESPACES, ("", namespace))
        if found is None:
            raise errors.not_found("", "namespaces", namespace)
        if found["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            refused = errors.forbidden(*resource.place, metadata.get("name", ""), why)
            refused.details["causes"] = [
                {
                    "reason": "NamespaceTerminating",
                    "message": f"namespace {namespace} is being terminated",
                    "field": "metadata.namespace",
                }
            ]
            raise refused

    def _next_address(self) -> str:
        self._addresses += 1
        return f"10.96.{self._addresses // 250}.{self._addresses % 250 + 1}"


CLEAN = custom.CLEANUP


def as_version(item: Object, resource: ServedResource) -> Object:
    """Return the object in the requested version.

    Versions of a custom kind differ only in `apiVersion` (conversion `None`).
    """
    return item if item["apiVersion"] == resource.api_version else item | {"apiVersion": resource.api_version}


def _decoded(resource: ServedResource, body: Json) -> Object:
    if not isinstance(body, dict):
        raise ApiError("BadRequest", f"the body is no {resource.kind}")
    item = clone(body)
    for field, expected in (("apiVersion", resource.api_version), ("kind", resource.kind)):
        if item.setdefault(field, expected) != expected:
            raise ApiError(
                "BadRequest",
                f"the {field} in the data ({item[field]}) does not match the expected {field} ({expected})",
            )
    metadata = item.setdefault("metadata", {})
    if not isinstance(metadata, dict):
        raise ApiError("BadRequest", "metadata must be an object")
    return item


def _refuse_unknown(resource: ServedResource, item: Object, options: Options) -> tuple[str, ...]:
    unknown = prune(item, resource.shape)
    if unknown and options.validation is Validation.STRICT:
        text = ", ".join(f'unknown field "{each}"' for each in unknown)
        raise ApiError(
            "BadRequest",
            f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: strict decoding error: {text}',
        )
    return tuple(f'unknown field "{each}"' for each in unknown) if options.validation is Validation.WARN else ()


def _only(applied: Object, subresource: str, resource: ServedResource) -> None:
    """Remove the fields that a server-side apply may not set here: all but `status` for its subresource, `status` for the object."""
    if subresource == "status":
        for name in list(applied):
            if name not in {"apiVersion", "kind", "metadata", "status"}:
                del applied[name]
        applied["metadata"] = {
            name: each
            for name, each in applied["metadata"].items()
            if name in {"name", "namespace", "uid", "resourceVersion"}
        }
    elif resource.has_status:
        applied.pop("status", None)


def _new_finalizers(item: Object, old: Object | None) -> list[ErrorCause]:
    if old is None or not old["metadata"].get("deletionTimestamp"):
        return []
    new = sorted(set(item["metadata"].get("finalizers") or ()) - set(old["metadata"].get("finalizers") or ()))
    if not new:
        return []
    listed = ", ".join(f'"{each}"' for each in new)
    text = f"no new finalizers can be added if the object is being deleted, found new finalizers []string{{{listed}}}"
    return [errors.forbidden_field("metadata.finalizers", text)]


def _wanted(resource: ServedResource, item: Object) -> Object:
    return without(item, "metadata", *(["status"] if resource.has_status else []))


def _held(resource: ServedResource, item: Object) -> bool:
    """Return whether finalizers or a grace period still hold an object that is marked as deleted."""
    if item["metadata"].get("finalizers"):
        return True
    if resource.place == NAMESPACES:
        return bool(dig(item, "spec", "finalizers"))
    return bool(resource.place == PODS and item["metadata"].get("deletionGracePeriodSeconds"))


def _grace_seconds(resource: ServedResource, item: Object, wanted: Object) -> int:
    """Return the grace period of a deletion in seconds.

    Only pods that are bound to a node and still run have one. Their kubelet then removes them by a deletion without grace.
    """
    if (
        resource.place != PODS
        or not dig(item, "spec", "nodeName")
        or dig(item, "status", "phase") in {"Succeeded", "Failed"}
    ):
        return 0
    asked = wanted.get("gracePeriodSeconds")
    return dig(item, "spec", "terminationGracePeriodSeconds") or 0 if asked is None else asked


def _key(resource: ServedResource, namespace: str, name: str) -> Key:
    return (namespace if resource.namespaced else ""), name


def _place_of(definition: Object) -> Place:
    return definition["spec"]["group"], definition["spec"]["names"]["plural"]
