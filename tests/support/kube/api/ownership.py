"""Field ownership: server-side apply and `metadata.managedFields`.

A set of fields is a frozen set of paths. A path is a tuple of elements as `fieldsV1` writes them: `f:name` is a field,
`k:{...}` is an item of a list-map by its keys, and `v:...` is a member of a set.

Rules:

1. A manager that writes (create, replace, patch) owns the fields that it changed, and all other managers lose them.
2. A manager that applies owns exactly the fields of its last apply. If another manager owns one of these fields with an
equal value, both managers own it. If the values differ, the apply is a conflict; a forced apply takes the field over.
3. If the next apply of a manager no longer lists a field that the manager owned, and no other manager owns the field,
the field is removed.

The rules are those of Kubernetes' server-side apply documentation; the corner cases follow
sigs.k8s.io/structured-merge-diff.
"""

import json
from collections.abc import Iterator

import msgspec

from tests.support.kube.api.errors import ApiError
from tests.support.kube.api.kinds.schemas import StructuralSchema
from tests.support.kube.api.values import Json, Object, clone

Path = tuple[str, ...]
Fields = frozenset[Path]
NOTHING: Fields = frozenset()

UNOWNED = frozenset(
    [("f:apiVersion",), ("f:kind",), ("f:metadata",)]
    + [
        ("f:metadata", f"f:{name}")
        for name in (
            "name",
            "namespace",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "generation",
            "managedFields",
            "resourceVersion",
            "selfLink",
            "uid",
        )
    ]
)
"""Fields that no manager owns, because they identify the object or because the server writes them."""


class Manager(msgspec.Struct, frozen=True):
    name: str
    operation: str
    version: str
    subresource: str = ""

    def __str__(self) -> str:
        text = f'"{self.name}"'
        if self.subresource:
            text += f' with subresource "{self.subresource}"'
        return text if self.operation == "Apply" else f"{text} using {self.version}"


class FieldClaim(msgspec.Struct, frozen=True):
    fields: Fields
    time: str


Claims = dict[Manager, FieldClaim]


def claims_of(metadata: Object) -> Claims:
    found: Claims = {}
    for entry in metadata.get("managedFields") or ():
        manager = Manager(
            entry.get("manager", ""),
            entry.get("operation", "Update"),
            entry.get("apiVersion", ""),
            entry.get("subresource", ""),
        )
        found[manager] = FieldClaim(frozenset(_paths(entry.get("fieldsV1") or {})), entry.get("time", ""))
    return found


def write_claims(metadata: Object, claims: Claims) -> None:
    entries = []
    for manager, claim in claims.items():
        if not claim.fields:
            continue
        entry = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": manager.version,
            "time": claim.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(claim.fields),
        }
        entries.append(entry | ({"subresource": manager.subresource} if manager.subresource else {}))
    entries.sort(key=lambda entry: (entry["operation"], entry["time"], entry["manager"]))
    if entries:
        metadata["managedFields"] = entries
    else:
        metadata.pop("managedFields", None)


def claims_after_write(
    claims: Claims, manager: Manager, old: Object, new: Object, shape: StructuralSchema, now: str
) -> Claims:
    """Return the ownership after a write (rule 1)."""
    before, after = _with_values(old, shape), _with_values(new, shape)
    changed = frozenset(path for path, value in after.items() if path not in before or before[path] != value) - UNOWNED
    gone = frozenset(before) - frozenset(after)
    kept = {
        each: FieldClaim(claim.fields - gone - (NOTHING if each == manager else changed), claim.time)
        for each, claim in claims.items()
    }
    mine = kept.get(manager, FieldClaim(NOTHING, now))
    fields = mine.fields | changed
    kept[manager] = FieldClaim(fields, now if changed else mine.time)
    return kept


def apply(
    live: Object | None, applied: Object, manager: Manager, shape: StructuralSchema, now: str, *, force: bool
) -> tuple[Object, Claims]:
    """Apply a configuration; return the resulting object and its ownership.

    `applied` is the configuration as sent, without the fields that an apply may not set.

    Raises:
        ApiError: Another manager owns a field that the apply would change, and `force` is False (409).
    """
    claims = claims_of((live or {}).get("metadata", {}))
    listed = frozenset(_owned(applied, shape)) - UNOWNED
    merged = _merge(live or {}, applied, shape)
    before, after = _with_values(live or {}, shape), _with_values(merged, shape)
    changed = frozenset(path for path, value in after.items() if before.get(path, _ABSENT) != value)
    others = {each: claim for each, claim in claims.items() if each != manager}
    contested = {each: common for each, claim in others.items() if (common := claim.fields & changed & listed)}
    if contested and not force:
        raise _conflict(contested)
    others = {
        each: FieldClaim(claim.fields - contested.get(each, NOTHING), claim.time) for each, claim in others.items()
    }

    mine = claims.get(manager, FieldClaim(NOTHING, now))
    still_owned = {
        path[:length] for claim in others.values() for path in claim.fields for length in range(1, len(path) + 1)
    }
    still_owned |= {path[:length] for path in listed for length in range(1, len(path) + 1)}
    dropped = {path[:length] for path in mine.fields for length in range(1, len(path) + 1)} - still_owned - UNOWNED
    for path in sorted(dropped, key=len):  # an item is removed before its key fields, by which it is found
        _remove(merged, path, shape)

    after = _with_values(merged, shape)
    others = {each: FieldClaim(claim.fields & frozenset(after), claim.time) for each, claim in others.items()}
    return merged, others | {manager: FieldClaim(listed, now if listed != mine.fields else mine.time)}


_ABSENT = object()


def _conflict(contested: dict[Manager, Fields]) -> ApiError:
    found = [(str(each), readable(path)) for each, paths in contested.items() for path in sorted(paths)]
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {who}", "field": path} for who, path in found
    ]
    many = "conflict" if len(found) == 1 else "conflicts"
    if len(contested) == 1 and len(found) == 1:
        said = f"conflict with {found[0][0]}: {found[0][1]}"
    else:
        said = "".join(
            f"conflicts with {each}:\n" + "".join(f"- {readable(path)}\n" for path in sorted(paths))
            for each, paths in contested.items()
        )
    return ApiError("Conflict", f"Apply failed with {len(found)} {many}: {said}", details={"causes": causes})


def readable(path: Path) -> str:
    text = ""
    for element in path:
        kind, _, rest = element.partition(":")
        if kind == "f":
            text += f".{rest}"
        elif kind == "k":
            text += "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(rest).items()) + "]"
        else:
            text += f"[={rest}]"
    return text


def _key(shape: StructuralSchema, item: Object) -> str:
    return "k:" + json.dumps(dict(sorted(shape.keys_of(item).items())), separators=(",", ":"))


def _member(value: Json) -> str:
    return "v:" + json.dumps(value, separators=(",", ":"))


def _owned(value: Object, shape: StructuralSchema, path: Path = ()) -> Iterator[Path]:
    """Yield the paths that the manager of an applied object owns: leaves, empty maps, entries of maps, and items of lists."""
    for name, each in value.items():
        at = (*path, f"f:{name}")
        child = shape.field(name) or _UNTYPED
        if isinstance(each, dict) and each and not child.atomic:
            if not shape.named:
                yield at
            yield from _owned(each, child, at)
        elif isinstance(each, list) and each and not child.atomic and child.type == "array":
            yield from _owned_items(each, child, at)
        else:
            yield at


def _owned_items(items: list[Json], shape: StructuralSchema, path: Path) -> Iterator[Path]:
    for item in items:
        if shape.list_type == "map" and isinstance(item, dict):
            at = (*path, _key(shape, item))
            yield at
            yield from _owned(item, shape.item, at)
        else:
            yield (*path, _member(item))


_UNTYPED = StructuralSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})


def _with_values(value: Json, shape: StructuralSchema) -> dict[Path, Json]:
    """Return every path of an object with its value.

    Maps and lists that are not atomic count as empty, because their entries have paths of their own.
    """
    found: dict[Path, Json] = {}

    def walk(value: Json, shape: StructuralSchema, path: Path) -> None:
        if isinstance(value, dict) and not shape.atomic:
            if path:
                found[path] = "{}"
            for name, each in value.items():
                walk(each, shape.field(name) or _UNTYPED, (*path, f"f:{name}"))
        elif isinstance(value, list) and shape.type == "array" and not shape.atomic:
            found[path] = "[]"
            for item in value:
                if shape.list_type == "map" and isinstance(item, dict):
                    walk(item, shape.item, (*path, _key(shape, item)))
                else:
                    found[(*path, _member(item))] = item
        else:
            found[path] = value

    walk(value, shape, ())
    return found


def _merge(live: Json, applied: Json, shape: StructuralSchema) -> Json:
    if isinstance(applied, dict) and isinstance(live, dict) and not shape.atomic:
        merged = clone(live)
        for name, each in applied.items():
            merged[name] = _merge(live.get(name), each, shape.field(name) or _UNTYPED)
        return merged
    if isinstance(applied, list) and isinstance(live, list) and shape.type == "array" and not shape.atomic:
        if shape.list_type == "set":
            return [*live, *(each for each in applied if each not in live)]
        items = {_key(shape, each): each for each in live}
        for each in applied:
            key = _key(shape, each)
            items[key] = _merge(items.get(key), each, shape.item)
        return list(items.values())
    return clone(applied)


def _remove(value: Json, path: Path, shape: StructuralSchema) -> None:
    """Remove the value at a path, if it exists."""
    for element in path[:-1]:
        kind, _, rest = element.partition(":")
        if kind == "f" and isinstance(value, dict):
            value, shape = value.get(rest), shape.field(rest) or _UNTYPED
        elif kind == "k" and isinstance(value, list):
            value, shape = next((each for each in value if _key(shape, each) == element), None), shape.item
        else:
            return
    kind, _, rest = path[-1].partition(":")
    if kind == "f" and isinstance(value, dict):
        value.pop(rest, None)
    elif kind == "k" and isinstance(value, list):
        value[:] = [each for each in value if _key(shape, each) != path[-1]]
    elif kind == "v" and isinstance(value, list):
        value[:] = [each for each in value if _member(each) != path[-1]]


def _tree(fields: Fields) -> Object:
    root: Object = {}
    for path in sorted(fields):
        node = root
        for length, element in enumerate(path):
            if element not in node:
                if not node and path[:length] in fields:
                    node["."] = {}
                node[element] = {}
            node = node[element]
    return root


def _paths(tree: Object, path: Path = ()) -> Iterator[Path]:
    if path and (not tree or "." in tree):
        yield path
    for element, below in tree.items():
        if element != ".":
            yield from _paths(below, (*path, element))
