"""Custom kinds: checks of CustomResourceDefinitions, and the resources that they define."""

from collections.abc import Iterator

from tests.support.kube.api import errors
from tests.support.kube.api.errors import ErrorCause
from tests.support.kube.api.kinds import ages
from tests.support.kube.api.kinds import cel_rules as rules
from tests.support.kube.api.kinds.builtin import META, shapes
from tests.support.kube.api.kinds.jsonpath import BadPath, steps
from tests.support.kube.api.kinds.resources import ResourceCatalogue, ScaleSubresource, ServedResource, TableColumn
from tests.support.kube.api.kinds.schemas import StructuralSchema
from tests.support.kube.api.values import Object, clone, dig, within

PLACE = ("apiextensions.k8s.io", "customresourcedefinitions")
CLEANUP = "customresourcecleanup.apiextensions.k8s.io"
BOOLEANS = frozenset({"n", "y", "no", "yes", "on", "off"})
"""Field names that YAML 1.1, and so kubectl, reads as booleans.

A real server accepts these names. This server refuses them, so that Fleet's own kinds never have such a field."""


def resources_of(definition: Object) -> list[ServedResource]:
    """Return one resource for each served version of a CustomResourceDefinition."""
    spec, names = definition["spec"], definition["spec"]["names"]
    return [_resource(definition, spec, names, version) for version in spec["versions"] if version.get("served")]


def _resource(definition: Object, spec: Object, names: Object, version: Object) -> ServedResource:
    schema = dig(version, "schema", "openAPIV3Schema") or {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    root = schema | {"properties": dict(schema.get("properties") or {})}
    root["properties"] |= {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"$ref": f"#/definitions/{META}ObjectMeta"},
    }
    subresources = version.get("subresources") or {}
    scale = subresources.get("scale")
    columns = tuple(
        TableColumn(
            each["name"],
            each["jsonPath"],
            type=each["type"],
            priority=each.get("priority", 0),
            description=each.get("description", ""),
            format=each.get("format", ""),
        )
        for each in version.get("additionalPrinterColumns") or ()
    )
    return ServedResource(
        group=spec["group"],
        version=version["name"],
        plural=names["plural"],
        kind=names["kind"],
        singular=names.get("singular") or names["kind"].lower(),
        namespaced=spec["scope"] == "Namespaced",
        shape=StructuralSchema(root, shapes()),
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        columns=columns or (TableColumn("Age", ".metadata.creationTimestamp", type="date"),),
        selectable=(
            "metadata.name",
            "metadata.namespace",
            *(each["jsonPath"].removeprefix(".") for each in version.get("selectableFields") or ()),
        ),
        has_status="status" in subresources,
        has_generation=True,
        scale=None
        if scale is None
        else ScaleSubresource(
            _path(scale["specReplicasPath"]),
            _path(scale["statusReplicasPath"]),
            _path(scale["labelSelectorPath"]) if scale.get("labelSelectorPath") else None,
        ),
        custom=True,
        ruled=rules.has_rules(schema),
        schema=schema,
    )


def _path(text: str) -> tuple[str, ...]:
    return tuple(text.removeprefix(".").split("."))


def complete(definition: Object) -> None:
    """Fill in the fields that a server adds to a new or changed CustomResourceDefinition."""
    names = dig(definition, "spec", "names")
    if isinstance(names, dict) and isinstance(kind := names.get("kind"), str):
        names.setdefault("singular", kind.lower())
        names.setdefault("listKind", f"{kind}List")
    if isinstance(definition.get("spec"), dict):
        definition["spec"].setdefault("conversion", {"strategy": "None"})


def establish(definition: Object) -> Object:
    """Return the definition with a status that says that the server serves it."""
    since = ages.now()
    stored = next(each["name"] for each in definition["spec"]["versions"] if each.get("storage"))
    before = dig(definition, "status", "storedVersions") or []
    conditions = [
        {
            "type": "NamesAccepted",
            "status": "True",
            "reason": "NoConflicts",
            "message": "no conflicts found",
            "lastTransitionTime": since,
        },
        {
            "type": "Established",
            "status": "True",
            "reason": "InitialNamesAccepted",
            "message": "the initial names have been accepted",
            "lastTransitionTime": since,
        },
    ]
    found = clone(definition)
    conditions = dig(definition, "status", "conditions") or conditions
    found["status"] = {
        "conditions": conditions,
        "acceptedNames": definition["spec"]["names"],
        "storedVersions": [*before, *([stored] if stored not in before else [])],
    }
    return found


def violations(definition: Object, catalogue: ResourceCatalogue) -> Iterator[ErrorCause]:
    spec = definition.get("spec") or {}
    group, names = spec.get("group", ""), spec.get("names") or {}
    wanted = f"{names.get('plural')}.{group}"
    if definition["metadata"].get("name") != wanted:
        yield errors.invalid_value(
            "metadata.name", definition["metadata"].get("name"), f'must be spec.names.plural+"."+spec.group: {wanted}'
        )
    versions = spec.get("versions") or []
    if sum(bool(each.get("storage")) for each in versions) != 1:
        yield errors.invalid_value(
            "spec.versions",
            [each.get("name") for each in versions],
            "must have exactly one version marked as storage version",
        )
    for each in catalogue:
        if each.group == group and each.kind == names.get("kind") and each.plural != names.get("plural"):
            yield errors.invalid_value("spec.names.kind", each.kind, f'"{each.kind}" is already in use')
    for index, version in enumerate(versions):
        at = f"spec.versions[{index}]"
        schema = dig(version, "schema", "openAPIV3Schema")
        if schema is None:
            yield errors.required(f"{at}.schema.openAPIV3Schema", "schemas are required")
        else:
            if schema.get("type") != "object":
                yield errors.invalid_value(
                    f"{at}.schema.openAPIV3Schema.type", schema.get("type"), "must be object at the root"
                )
            yield from _schema_violations(schema, f"{at}.schema.openAPIV3Schema")
        for number, column in enumerate(version.get("additionalPrinterColumns") or ()):
            try:
                steps(column.get("jsonPath", ""))
            except BadPath as error:
                yield errors.invalid_value(
                    f"{at}.additionalPrinterColumns[{number}].jsonPath", column.get("jsonPath"), str(error)
                )


def _schema_violations(node: Object, path: str) -> Iterator[ErrorCause]:
    """Yield the reasons why a schema is not structural, or why its rules do not compile."""
    if (
        not node.get("type")
        and not node.get("x-kubernetes-int-or-string")
        and not node.get("x-kubernetes-preserve-unknown-fields")
    ):
        yield errors.required(f"{path}.type", "must not be empty for specified object fields")
    if node.get("type") == "array" and "items" not in node:
        yield errors.required(f"{path}.items", "must be specified")
    if node.get("x-kubernetes-list-type") == "map":
        items = node.get("items") or {}
        for key in node.get("x-kubernetes-list-map-keys") or ():
            field = (items.get("properties") or {}).get(key)
            if field is None:
                yield errors.invalid_value(
                    f"{path}.x-kubernetes-list-map-keys", key, "entries must all be names of item properties"
                )
            elif key not in (items.get("required") or ()) and "default" not in field:
                yield errors.required(
                    f"{path}.items.properties[{key}].default",
                    "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property",
                )
    for index, rule in enumerate(node.get("x-kubernetes-validations") or ()):
        at = f"{path}.x-kubernetes-validations[{index}]"
        if rule.get("optionalOldSelf"):
            yield errors.not_supported(f"{at}.optionalOldSelf", True, [False])
        for name in ("rule", "messageExpression"):
            try:
                if rule.get(name):
                    rules.compiled(rule[name])
            except rules.BadRule as error:
                yield errors.invalid_value(f"{at}.{name}", rule[name], f"compilation failed: {error}")
    for name, each in (node.get("properties") or {}).items():
        if name.lower() in BOOLEANS:
            yield errors.invalid_value(
                f"{path}.properties[{name}]", name, "YAML 1.1 reads this name as a boolean; choose another"
            )
        yield from _schema_violations(each, f"{path}.properties[{name}]")
    for name in ("items", "additionalProperties"):
        if isinstance(each := node.get(name), dict):
            yield from _schema_violations(each, within(path, name))
