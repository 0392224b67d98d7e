"""ServingRequest: computes the DisaggDeployment for a ServingRequest, and the status of the request. Pure.

Rules:

1. The deployment has the request's name and is owned by it, so that it is deleted together with the request. A
   deployment of that name that the request does not own stays unchanged. The deployment is written if the digest of its
   manifest differs from the digest in its annotation. Like every child object, it is also written without a difference at
   each resync (`operators.settings.OperatorSettings.resync_seconds`).
2. If the goals of a request cannot be reached any more, or if its field `apply` is set back to false, its deployment
   stays unchanged.
3. A role that the present proposal does not contain any more is scaled to 0 first. It is removed when the deployment
   reports that the last pod of the role has gone. Roles that somebody else has added stay; an annotation of the
   deployment names the roles that the request has made.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from fleet.net.kubernetes.kinds import GROUP, VERSION
from fleet.net.kubernetes.views import CustomObject
from operators.api.disagg_deployment import RoleType
from operators.api.serving_request import ServingRequestSpec, ServingRequestStatus
from operators.controller.reconcile import Apply
from operators.imports.assembly import said
from operators.manifests.objects import DIGEST, with_digest
from operators.observed.observe import conditions_of
from operators.observed.state import ApiRefusal
from operators.proposals import Infeasible, Proposal, Reply
from operators.status.deployment import FALSE, TRUE, ConditionUpdate, condition

Manifest = dict[str, Any]

ROLES = f"{GROUP}/roles"
"""Annotation of a deployment with the names of the roles that the ServingRequest has made, separated by commas."""


def proposed(name: str, reply: Reply) -> Manifest:
    """Return the manifest of the proposed DisaggDeployment without default values; empty if there is no proposal."""
    if isinstance(reply, Infeasible):
        return {}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DisaggDeployment",
        "metadata": {"name": name},
        "spec": said(reply.spec),
    }


def actions(
    request: CustomObject, asked: ServingRequestSpec, reply: Reply, there: CustomObject | None, *, afresh: bool = False
) -> tuple[Apply, ...]:
    """Return the writes to the DisaggDeployment that the request needs.

    Args:
        request: The ServingRequest as it is on the API server.
        asked: The request's specification.
        reply: The proposal, or the reason why there is none.
        there: The existing DisaggDeployment with the request's name, whoever owns it, or None if it does not exist.
        afresh: If true, write the deployment even if it looks unchanged.
    """
    if not asked.apply or isinstance(reply, Infeasible) or _foreign(request, there):
        return ()
    made = _manifest(request, reply, there)
    return (
        (Apply(made),) if afresh or there is None or _digest(there) != made["metadata"]["annotations"][DIGEST] else ()
    )


def status(
    request: CustomObject,
    asked: ServingRequestSpec,
    reply: Reply,
    there: CustomObject | None,
    refusals: Sequence[ApiRefusal],
    now: str,
) -> ServingRequestStatus:
    """Return the new status of the ServingRequest.

    Args:
        request: The ServingRequest as it is on the API server.
        asked: The request's specification.
        reply: The proposal, or the reason why there is none.
        there: The DisaggDeployment with the request's name after the actions of this reconcile, whoever owns it, or
            None if it does not exist.
        refusals: The actions that the API server has refused.
        now: The present time as RFC 3339.
    """
    feasible = isinstance(reply, Proposal)
    conditions: list[ConditionUpdate] = [
        ("Feasible", TRUE if feasible else FALSE, reply.reason, reply.message),
        ("Proposed", TRUE, "Proposed", "") if feasible else ("Proposed", FALSE, reply.reason, "nothing to propose"),
        _applied(request, asked, reply, there, refusals),
    ]
    if asked.apply:
        conditions.append(_ready(conditions[-1], there))
    ready = asked.apply and conditions[-1][1] == TRUE
    return ServingRequestStatus(
        observed_generation=request.metadata.generation,
        phase="Infeasible" if not feasible else "Ready" if ready else "Deploying" if asked.apply else "Proposed",
        deployment=there.metadata.name if there is not None and not _foreign(request, there) else "",
        figures=reply.figures,
        basis=reply.basis,
        proposal=proposed(request.metadata.name, reply),
        conditions=_dated(request, conditions, now),
    )


def unreadable_status(request: CustomObject, problem: str, now: str) -> ServingRequestStatus:
    """Return the status of a ServingRequest whose specification this version of the operator cannot read."""
    return ServingRequestStatus(
        observed_generation=request.metadata.generation,
        phase="Infeasible",
        conditions=_dated(request, [("Feasible", FALSE, "SpecificationRefused", problem)], now),
    )


def _dated(request: CustomObject, conditions: Sequence[ConditionUpdate], now: str) -> tuple[Any, ...]:
    before, generation = conditions_of(request), request.metadata.generation
    return tuple(condition(before, generation, now, each) for each in conditions)


def _foreign(request: CustomObject, there: CustomObject | None) -> bool:
    return there is not None and there.metadata.owner_uid != request.metadata.uid


def _digest(there: CustomObject) -> str:
    return there.metadata.annotations.get(DIGEST, "")


def _manifest(request: CustomObject, reply: Proposal, there: CustomObject | None) -> Manifest:
    made = proposed(request.metadata.name, reply)
    made["metadata"] |= {
        "namespace": request.metadata.namespace,
        "ownerReferences": [
            {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": "ServingRequest",
                "name": request.metadata.name,
                "uid": request.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": False,  # `operators.rbac`, rule 4, says why it is False
            }
        ],
    }
    made["spec"]["roles"] += _leaving(made["spec"]["roles"], there)
    whole = with_digest(made)
    whole["metadata"]["annotations"][ROLES] = ",".join(role["name"] for role in made["spec"]["roles"])
    return whole


def _leaving(roles: Sequence[Manifest], there: CustomObject | None) -> Iterator[Manifest]:
    """Yield, with 0 replicas, the roles of workers that the request has made and that the proposal no longer contains.

    A role is left out as soon as the deployment reports that its pods have gone.
    """
    if there is None:
        return
    named = {role["name"] for role in roles}
    made = there.metadata.annotations.get(ROLES, "").split(",")
    current = there.status.get("observedGeneration") == there.metadata.generation
    pods = {role["name"]: role.get("replicas", 0) + role.get("draining", 0) for role in there.status.get("roles", ())}
    for role in there.spec.get("roles", ()):
        if role["name"] in made and role["name"] not in named and role["type"] != RoleType.ROUTER:
            gone = current and not role.get("replicas", 1) and not pods.get(role["name"], 0)
            if not gone:
                yield role | {"replicas": 0}


def _applied(
    request: CustomObject,
    asked: ServingRequestSpec,
    reply: Reply,
    there: CustomObject | None,
    refusals: Sequence[ApiRefusal],
) -> ConditionUpdate:
    if _foreign(request, there):
        text = "a DisaggDeployment of this name is not of this request; delete it, or give the request another name"
        return "Applied", FALSE, "NameTaken", text
    if not asked.apply:
        text = "spec.apply is false" if there is None else "spec.apply is false; the deployment stays as it is"
        return "Applied", FALSE, "NotAskedFor", text
    if isinstance(reply, Infeasible):
        text = "" if there is None else "the deployment stays as it was made before"
        return "Applied", FALSE, reply.reason, text
    if refusals:
        return "Applied", FALSE, refusals[0].reason, refusals[0].message
    if there is None or there.metadata.deleted:
        return "Applied", FALSE, "Pending", "the deployment is being deleted, and is created again after that"
    return "Applied", TRUE, "Applied", ""


def _ready(applied: ConditionUpdate, there: CustomObject | None) -> ConditionUpdate:
    """Return the condition Ready of the request.

    It is the condition Ready of the request's deployment, with two exceptions. If the proposal was not applied to the
    deployment, the result is False with the reason of the condition Applied. If the deployment has no condition Ready
    for its present specification, the result is False too.
    """
    _, holds, reason, message = applied
    if holds != TRUE or there is None:
        return "Ready", FALSE, reason, message
    found = next((each for each in conditions_of(there) if each.type == "Ready"), None)
    if found is None or found.observed_generation != there.metadata.generation:
        return "Ready", FALSE, "NotTold", "the deployment does not say yet how it is"
    return "Ready", found.status, found.reason, found.message
