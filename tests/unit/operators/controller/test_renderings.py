"""The revision of workers is computed once for each specification of a deployment."""

import msgspec

from operators.api.disagg_deployment import DisaggDeploymentSpec
from operators.controller.worker_revisions import WorkerRevisions
from operators.keys import deployment_key
from operators.manifests.names import DesiredDeployment

KEY, OTHER = deployment_key("ns", "one"), deployment_key("ns", "two")


def desired(name="one", **spec):
    """Return a deployment that equals others with the same specification, and is none of them."""
    content = {"model": {"name": "m"}, "roles": [{"name": "decode", "type": "decode"}]} | spec
    return DesiredDeployment(name=name, namespace="ns", uid="1", spec=msgspec.convert(content, DisaggDeploymentSpec))


def test_revision_is_computed_once_for_each_specification():
    computed = []

    def compute(deployment):
        computed.append(deployment)
        return f"revision-{len(computed)}"

    revisions = WorkerRevisions(compute)
    assert [revisions.of(KEY, desired()) for _ in range(3)] == ["revision-1"] * 3
    assert revisions.of(OTHER, desired("two")) == "revision-2"
    assert revisions.of(KEY, desired()) == "revision-1"
    changed = desired(image="another")
    assert [revisions.of(KEY, changed), revisions.of(KEY, desired(image="another"))] == ["revision-3"] * 2
    assert revisions.of(KEY, desired()) == "revision-4"
    assert computed == [desired(), desired("two"), changed, desired()]


def test_revision_of_a_deleted_deployment_is_computed_again():
    computed = []
    revisions = WorkerRevisions(lambda deployment: computed.append(deployment) or "revision")
    revisions.of(KEY, desired())
    revisions.forget(KEY)
    revisions.of(KEY, desired())
    assert len(computed) == 2
