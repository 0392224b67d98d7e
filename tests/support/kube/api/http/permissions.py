"""Role-based access control for service accounts.

A request with the bearer token `system:serviceaccount:NAMESPACE:NAME` has the rights of the roles that are bound to this
account. A request without such a token has all rights, so that tests can make and check objects without roles.
"""

from collections.abc import Iterator

from tests.support.kube.api.cluster import ObjectStore
from tests.support.kube.api.faults import Request
from tests.support.kube.api.kinds.resources import Place
from tests.support.kube.api.values import Object

GROUP = "rbac.authorization.k8s.io"
ACCOUNT = "system:serviceaccount:"


def allowed(cluster: ObjectStore, request: Request) -> bool:
    if not request.user.startswith(ACCOUNT):
        return True
    namespace, _, name = request.user.removeprefix(ACCOUNT).partition(":")
    return any(_covers(rule, request) for rule in _rules(cluster, namespace, name, request.namespace))


def refusal(request: Request) -> str:
    """Return the text that follows `is forbidden: ` in kube-apiserver's error."""
    scope = f'in the namespace "{request.namespace}"' if request.namespace else "at the cluster scope"
    return f'User "{request.user}" cannot {request.verb} resource "{request.resource}" in API group "{request.group}" {scope}'


def _rules(cluster: ObjectStore, account_namespace: str, account: str, namespace: str) -> Iterator[Object]:
    bindings: list[tuple[Place, str]] = [((GROUP, "clusterrolebindings"), "")]
    if namespace:
        bindings.append(((GROUP, "rolebindings"), namespace))
    for place, where in bindings:
        for binding in cluster.storage.items(place, where):
            if not any(_is(subject, account_namespace, account) for subject in binding.get("subjects") or ()):
                continue
            reference = binding["roleRef"]
            key = ("", reference["name"]) if reference["kind"] == "ClusterRole" else (where, reference["name"])
            role = cluster.storage.get((GROUP, f"{reference['kind'].lower()}s"), key)
            yield from (role or {}).get("rules") or ()


def _is(subject: Object, namespace: str, name: str) -> bool:
    if subject.get("kind") == "Group":
        return subject.get("name") in {
            "system:serviceaccounts",
            f"system:serviceaccounts:{namespace}",
            "system:authenticated",
        }
    return (subject.get("kind"), subject.get("namespace"), subject.get("name")) == ("ServiceAccount", namespace, name)


def _covers(rule: Object, request: Request) -> bool:
    def listed(field: str, value: str) -> bool:
        return bool({"*", value} & set(rule.get(field) or ()))

    names = rule.get("resourceNames")
    return (
        listed("verbs", request.verb)
        and listed("apiGroups", request.group)
        and listed("resources", request.resource)
        and (not names or request.name in names)
    )
