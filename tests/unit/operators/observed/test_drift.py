"""Drift of child objects: it is found by the owners of their fields, and each change of an owner counts once."""

import msgspec

from fleet.net.kubernetes.views import ChildMetadata, ChildObject, FieldOwnership
from operators.observed.drift import DriftDetector

SPEC = {"f:spec": {"f:template": {}}}


def an_entry(manager, fields=SPEC, *, operation="Update", subresource="", time="2026-01-01T00:00:00Z"):
    return {
        "manager": manager,
        "operation": operation,
        "subresource": subresource,
        "time": time,
        "fieldsV1": fields,
    }


OURS = an_entry("fleet-operator", operation="Apply")


def a_child(*entries):
    metadata = {"name": "dd", "uid": "1", "managedFields": list(entries)}
    return msgspec.json.decode(msgspec.json.encode({"metadata": metadata}), type=ChildObject)


def test_managed_fields_are_summed_up_and_dropped():
    metadata = a_child(OURS, an_entry("kubectl-set"), an_entry("kubectl-label", {"f:metadata": {}})).metadata

    assert metadata.managed_fields == ()
    assert metadata.ownership.managers == ("kubectl-set",)
    assert msgspec.structs.replace(metadata, resource_version="9").ownership == metadata.ownership
    assert ChildMetadata(name="dd").ownership == FieldOwnership()


def test_controllers_that_write_a_status_own_nothing_of_ours():
    status = an_entry("kube-controller-manager", {"f:spec": {}, "f:status": {}}, subresource="status")

    assert not DriftDetector().drifted(a_child(OURS, status))


def test_foreign_owner_at_the_first_sight_is_drift():
    detector = DriftDetector()

    assert detector.drifted(a_child(OURS, an_entry("kubectl-set")))
    assert DriftDetector().drifted(a_child(OURS, an_entry("kubectl-edit", {"f:data": {}})))


def test_field_that_our_apply_lost_is_drift():
    detector = DriftDetector()
    detector.applied(a_child(OURS))

    assert not detector.drifted(a_child(OURS))
    assert detector.drifted(a_child(an_entry("fleet-operator", {"f:spec": {}}, operation="Apply")))


def test_fields_left_to_others_are_no_drift_until_they_change():
    detector = DriftDetector()
    theirs = an_entry("kubectl-annotate", {"f:spec": {"f:extra": {}}})
    assert detector.drifted(a_child(OURS, theirs))
    detector.applied(a_child(OURS, theirs))

    assert not detector.drifted(a_child(OURS, theirs))
    assert detector.drifted(a_child(OURS, theirs | {"time": "2026-01-02T00:00:00Z"}))


def test_our_change_of_replicas_hides_no_edit():
    detector = DriftDetector()
    detector.applied(a_child(OURS))
    lost = an_entry("fleet-operator", {"f:spec": {}}, operation="Apply")

    detector.scaled(a_child(lost))
    assert not detector.drifted(a_child(lost))
    detector.scaled(a_child(lost, an_entry("kubectl-set")))
    assert detector.drifted(a_child(lost, an_entry("kubectl-set")))
    detector.check()
