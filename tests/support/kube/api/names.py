"""Rules for names, labels and finalizers."""

import random
import re
from collections.abc import Iterator

from tests.support.kube.api import errors
from tests.support.kube.api.errors import ErrorCause
from tests.support.kube.api.kinds.resources import ServedResource
from tests.support.kube.api.values import Json, Object

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
RULES = {
    "subdomain": (
        rf"{LABEL}(\.{LABEL})*",
        253,
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.'",
    ),
    "label": (LABEL, 63, "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"),
    "service": (
        r"[a-z]([-a-z0-9]*[a-z0-9])?",
        63,
        "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character",
    ),
    "segment": (r"(?!\.{1,2}$)[^/%]+", 253, "may not contain '/' or '%', nor be '.' or '..'"),
}
BY_KIND = {
    "Namespace": "label",
    "Service": "service",
    "Role": "segment",
    "RoleBinding": "segment",
    "ClusterRole": "segment",
    "ClusterRoleBinding": "segment",
    "APIService": "segment",
}
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUALIFIED = re.compile(rf"({LABEL}(\.{LABEL})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
"""The characters of generated names, as in apimachinery. There are no vowels, so that generated names contain no words."""
ANNOTATIONS_BYTES = 256 * 1024


def generated(prefix: str, chance: random.Random) -> str:
    return prefix[:58] + "".join(chance.choices(ALPHABET, k=5))


def metadata_violations(resource: ServedResource, metadata: Object) -> Iterator[ErrorCause]:
    name = metadata.get("name", "")
    pattern, longest, words = RULES[BY_KIND.get(resource.kind, "subdomain") if not resource.custom else "subdomain"]
    if not re.fullmatch(pattern, name):
        yield errors.invalid_value("metadata.name", name, words)
    elif len(name) > longest:
        yield errors.invalid_value("metadata.name", name, f"must be no more than {longest} bytes")
    for key, value in (metadata.get("labels") or {}).items():
        if not QUALIFIED.fullmatch(key):
            yield errors.invalid_value(
                "metadata.labels", key, "name part must consist of alphanumeric characters, '-', '_' or '.'"
            )
        if not isinstance(value, str) or not LABEL_VALUE.fullmatch(value):
            text = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and be no more than 63 characters"
            yield errors.invalid_value("metadata.labels", value, text)
    if (
        sum(len(key) + len(str(value)) for key, value in (metadata.get("annotations") or {}).items())
        > ANNOTATIONS_BYTES
    ):
        yield errors.too_long("metadata.annotations", ANNOTATIONS_BYTES)
    for each in metadata.get("finalizers") or ():
        if not QUALIFIED.fullmatch(each):
            yield errors.invalid_value(
                "metadata.finalizers", each, "name part must consist of alphanumeric characters, '-', '_' or '.'"
            )
        elif resource.custom and "/" not in each and each not in {"orphan", "foregroundDeletion"}:
            yield errors.invalid_value(
                "metadata.finalizers", each, "name is neither a standard finalizer name nor is it fully qualified"
            )
    owners = metadata.get("ownerReferences") or []
    for index, owner in enumerate(owners):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield errors.invalid_value(
                    f"metadata.ownerReferences[{index}].{field}", "", f"{field} must not be empty"
                )
    if sum(bool(each.get("controller")) for each in owners) > 1:
        yield errors.invalid_value(
            "metadata.ownerReferences", _brief(owners), "Only one reference can have Controller set to true"
        )


def _brief(owners: Json) -> Json:
    return [each.get("name") for each in owners]
