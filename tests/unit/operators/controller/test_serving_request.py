"""ServingRequests on a cluster: the objects that the operator makes of them, and their status."""

import msgspec

from fleet.net.kubernetes.views import CustomObject, ObjectMetadata, OwnerReference
from operators.api.serving_request import ServingRequestSpec
from operators.controller.reconcile import Apply
from operators.controller.serving_request import actions, status, unreadable_status
from operators.manifests.objects import DIGEST
from operators.observed.state import ApiRefusal
from operators.proposals import propose

NOW = "2026-01-01T00:00:00Z"
SPEC = {
    "model": {"name": "llama", "uri": "meta-llama/Llama-3.3-70B-Instruct"},
    "hardware": {"gpu": "h100", "count": 32},
    "workload": {"promptTokens": 2048, "answerTokens": 256, "requestsPerMinute": 600},
    "objective": {"ttftMs": 1000, "tpotMs": 50},
    "apply": True,
}
APART = {"objective": {"ttftMs": 1000, "tpotMs": 20}}
IMPOSSIBLE = {"objective": {"ttftMs": 1, "tpotMs": 1}}


def a_request(generation=1, **changes):
    metadata = ObjectMetadata(name="please", namespace="models", uid="request-uid", generation=generation)
    return CustomObject(metadata=metadata, spec=SPEC | changes)


def decided(request, there=None, **options):
    asked = msgspec.convert(request.spec, ServingRequestSpec)
    return actions(request, asked, propose(asked), there, **options)


def told(request, there=None, refusals=()):
    asked = msgspec.convert(request.spec, ServingRequestSpec)
    return status(request, asked, propose(asked), there, refusals, NOW)


def as_made(made, *, owner="request-uid", status=None, generation=1):
    """Return the object that the API server has after this manifest was applied."""
    metadata = made.manifest["metadata"]
    return CustomObject(
        metadata=ObjectMetadata(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid="deployment-uid",
            generation=generation,
            annotations=metadata["annotations"],
            owner_references=(OwnerReference(kind="ServingRequest", name="please", uid=owner, controller=True),)
            if owner
            else (),
        ),
        spec=made.manifest["spec"],
        status=status or {},
    )


def conditions(said):
    return {each.type: (each.status, each.reason) for each in said.conditions}


def test_applied_request_creates_one_owned_deployment():
    [made] = decided(a_request())

    assert isinstance(made, Apply)
    [owner] = made.manifest["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("ServingRequest", "request-uid", True)
    assert (made.manifest["metadata"]["name"], made.manifest["metadata"]["namespace"]) == ("please", "models")
    assert decided(a_request(), as_made(made)) == ()
    assert decided(a_request(), as_made(made), afresh=True) == (made,)


def test_unapplied_request_only_proposes():
    request = a_request(apply=False)

    assert decided(request) == ()
    said = told(request)
    assert conditions(said) == {
        "Feasible": ("True", "GoalsWithinError"),
        "Proposed": ("True", "Proposed"),
        "Applied": ("False", "NotAskedFor"),
    }
    assert (said.phase, said.deployment) == ("Proposed", "")
    [made] = decided(a_request())
    assert said.proposal["spec"] == made.manifest["spec"]
    assert set(said.proposal["metadata"]) == {"name"}


def test_new_proposal_replaces_the_former():
    [before] = decided(a_request())
    [after] = decided(a_request(workload=SPEC["workload"] | {"requestsPerMinute": 60}), as_made(before))

    assert after.manifest["metadata"]["annotations"][DIGEST] != before.manifest["metadata"]["annotations"][DIGEST]
    assert (roles(before)["workers"], roles(after)["workers"]) == (3, 1)


def test_foreign_deployment_is_left_alone():
    [made] = decided(a_request())
    for owner in ("", "another-uid"):
        theirs = as_made(made, owner=owner)

        assert decided(a_request(generation=2, **APART), theirs, afresh=True) == ()
        said = told(a_request(), theirs)
        assert conditions(said)["Applied"] == ("False", "NameTaken")
        assert conditions(said)["Ready"] == ("False", "NameTaken")
        assert said.deployment == ""


def test_infeasible_request_keeps_its_deployment():
    [made] = decided(a_request())
    request = a_request(generation=2, **IMPOSSIBLE)

    assert decided(request, as_made(made), afresh=True) == ()
    said = told(request, as_made(made))
    assert conditions(said) == {
        "Feasible": ("False", "TtftOutOfReach"),
        "Proposed": ("False", "TtftOutOfReach"),
        "Applied": ("False", "TtftOutOfReach"),
        "Ready": ("False", "TtftOutOfReach"),
    }
    assert (said.phase, said.deployment, said.proposal) == ("Infeasible", "please", {})
    assert all(each.observed_generation == 2 for each in said.conditions)


def roles(made):
    return {role["name"]: role.get("replicas", 1) for role in made.manifest["spec"]["roles"]}


def test_former_roles_are_emptied_before_removal():
    request = a_request(generation=2, **APART)
    [before] = decided(a_request())
    running = {"observedGeneration": 1, "roles": [{"name": "workers", "replicas": 3, "draining": 0}]}

    none_yet = {"observedGeneration": 1, "roles": [{"name": "workers", "replicas": 0, "draining": 0}]}
    assert decided(request, as_made(before, status=none_yet)) == decided(request, as_made(before, status=running))
    [emptied] = decided(request, as_made(before, status=running))
    assert roles(emptied) == {"router": 2, "prefill": 2, "decode": 1, "workers": 0}

    not_told = as_made(emptied, status=running, generation=2)
    draining = as_made(
        emptied,
        status={"observedGeneration": 2, "roles": [{"name": "workers", "replicas": 0, "draining": 1}]},
        generation=2,
    )
    of_before = as_made(emptied, status=none_yet, generation=2)
    assert decided(request, not_told) == decided(request, of_before) == decided(request, draining) == ()

    gone = {"observedGeneration": 2, "roles": [{"name": "workers", "replicas": 0, "draining": 0}]}
    [left] = decided(request, as_made(emptied, status=gone, generation=2))
    assert roles(left) == {"router": 2, "prefill": 2, "decode": 1}
    assert decided(request, as_made(left, status=gone, generation=3)) == ()


def test_request_is_ready_with_its_current_deployment():
    [made] = decided(a_request())
    ready = {"type": "Ready", "status": "True", "reason": "AllRolesReady", "observedGeneration": 1}

    assert conditions(told(a_request(), as_made(made)))["Ready"] == ("False", "NotTold")
    stale = as_made(made, status={"conditions": [ready]}, generation=2)
    assert conditions(told(a_request(), stale))["Ready"] == ("False", "NotTold")
    said = told(a_request(), as_made(made, status={"conditions": [ready]}))
    assert conditions(said)["Ready"] == ("True", "AllRolesReady")
    assert (said.phase, said.deployment) == ("Ready", "please")


def test_api_refusal_is_the_requests_reason():
    refusal = ApiRefusal("DisaggDeployment", "please", "Invalid", "spec.roles: too many")

    said = told(a_request(), None, (refusal,))

    assert conditions(said)["Applied"] == ("False", "Invalid")
    assert next(each.message for each in said.conditions if each.type == "Applied") == "spec.roles: too many"


def test_request_of_a_later_version_is_refused():
    said = unreadable_status(a_request(), "spec.objective: Object contains unknown field", NOW)
    assert conditions(said) == {"Feasible": ("False", "SpecificationRefused")}
