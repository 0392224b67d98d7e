"""Discovery documents: the groups, versions and resources of the server, in a document each or aggregated."""

import itertools

from tests.support.kube.api.kinds import builtin as builtin_kinds
from tests.support.kube.api.kinds.resources import ResourceCatalogue, ServedResource
from tests.support.kube.api.values import Object

VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
OF_SUBRESOURCES = ["get", "patch", "update"]


def version() -> Object:
    major, minor, _ = builtin_kinds.VERSION.split(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"v{builtin_kinds.VERSION}",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "linux/amd64",
    }


def groups(catalogue: ResourceCatalogue) -> list[Object]:
    found: dict[str, list[str]] = {}
    for each in catalogue:
        if each.group and each.version not in found.setdefault(each.group, []):
            found[each.group].append(each.version)
    return [group(name, versions) for name, versions in found.items()]


def group(name: str, versions: list[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{each}", "version": each} for each in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def resource_list(catalogue: ResourceCatalogue, group: str, version: str) -> Object | None:
    """Return the resources that one version of a group serves; None if there is no such version."""
    found = [each for each in catalogue if (each.group, each.version) == (group, version)]
    if not found:
        return None
    listed = list(itertools.chain.from_iterable(_listed(each) for each in found))
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": found[0].api_version, "resources": listed}


def _listed(resource: ServedResource) -> list[Object]:
    whole = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": VERBS,
    }
    if resource.short_names:
        whole["shortNames"] = list(resource.short_names)
    if resource.categories:
        whole["categories"] = list(resource.categories)
    parts = [
        {"name": f"{resource.plural}/{name}", "singularName": "", "namespaced": resource.namespaced} | part
        for name, part in _parts(resource)
    ]
    return [whole, *parts]


def _parts(resource: ServedResource) -> list[tuple[str, Object]]:
    parts: list[tuple[str, Object]] = []
    if resource.has_status:
        parts.append(("status", {"kind": resource.kind, "verbs": OF_SUBRESOURCES}))
    if resource.scale:
        parts.append(("scale", {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": OF_SUBRESOURCES}))
    if resource.place == ("", "pods"):
        parts.append(("eviction", {"group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]}))
        parts.append(("binding", {"kind": "Binding", "verbs": ["create"]}))
    return parts


def aggregated(catalogue: ResourceCatalogue, *, legacy: bool, version: str) -> Object:
    """Return one document for all groups except the core group, or (`legacy`) for the core group alone.

    Clients request these documents since Kubernetes 1.26.
    """
    names = list(dict.fromkeys(each.group for each in catalogue if bool(each.group) != legacy))
    items = []
    for name in names:
        versions = list(dict.fromkeys(each.version for each in catalogue if each.group == name))
        listed = [
            {
                "version": each,
                "freshness": "Current",
                "resources": [
                    _described(resource) for resource in catalogue if (resource.group, resource.version) == (name, each)
                ],
            }
            for each in versions
        ]
        items.append({"metadata": {"name": name} if name else {}, "versions": listed})
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{version}",
        "metadata": {},
        "items": items,
    }


def _described(resource: ServedResource) -> Object:
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    parts = [
        {
            "subresource": name,
            "responseKind": {
                "group": part.get("group", resource.group),
                "version": part.get("version", resource.version),
                "kind": part["kind"],
            },
            "verbs": part["verbs"],
        }
        for name, part in _parts(resource)
    ]
    found: Object = {
        "resource": resource.plural,
        "responseKind": kind,
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": VERBS,
    }
    if resource.short_names:
        found["shortNames"] = list(resource.short_names)
    if resource.categories:
        found["categories"] = list(resource.categories)
    return found | ({"subresources": parts} if parts else {})
