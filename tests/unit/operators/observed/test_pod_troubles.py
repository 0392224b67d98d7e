"""Pod troubles: texts that say why pods do not run; they never contain output of pods."""

import msgspec
import pytest

from fleet.net.kubernetes.views import (
    ContainerState,
    ContainerStatus,
    ContainerTerminated,
    ContainerWaiting,
    ObjectCondition,
    ObjectMetadata,
    Pod,
    PodSchedulingGate,
    PodStatus,
    WorkloadResource,
    WorkloadStatus,
)
from operators.manifests.names import DOMAIN, GATE, GROUP_LABEL, ROLE
from operators.observed.pod_troubles import TroubleReason, troubles


def a_pod(*containers, conditions=(), deleted=None, name="pod"):
    metadata = ObjectMetadata(name=name, deletion_timestamp=deleted)
    return Pod(metadata=metadata, status=PodStatus(conditions=conditions, container_statuses=containers))


def waiting(reason, message="", last=None):
    return ContainerStatus(
        name="main",
        state=ContainerState(waiting=ContainerWaiting(reason, message)),
        last_state=ContainerState(terminated=last),
    )


def unschedulable(message):
    return (ObjectCondition(type="PodScheduled", status="False", reason="Unschedulable", message=message),)


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (
            a_pod(conditions=unschedulable("0/3 nodes are available: 3 Insufficient amd.com/gpu.")),
            TroubleReason.InsufficientCapacity,
        ),
        (
            a_pod(conditions=unschedulable("1 node(s) didn't match Pod's node affinity/selector.")),
            TroubleReason.NoSuchGpu,
        ),
        (
            a_pod(conditions=unschedulable("0/3 nodes are available: 3 node(s) had untolerated taint.")),
            TroubleReason.Unschedulable,
        ),
        (a_pod(waiting("ErrImagePull")), TroubleReason.ImagePull),
        (a_pod(waiting("CreateContainerConfigError", 'secret "hf" not found')), TroubleReason.ConfigurationMissing),
        (
            a_pod(waiting("CrashLoopBackOff", last=ContainerTerminated(exit_code=137, reason="OOMKilled"))),
            TroubleReason.OutOfMemory,
        ),
        (a_pod(waiting("CrashLoopBackOff", last=ContainerTerminated(exit_code=1))), TroubleReason.CrashLooping),
        (
            a_pod(
                waiting(
                    "CrashLoopBackOff",
                    last=ContainerTerminated(exit_code=3, message="fleet: model_dir: '/m' is not a folder"),
                )
            ),
            TroubleReason.ModelNotFound,
        ),
    ],
    ids=lambda each: each.name if isinstance(each, TroubleReason) else "",
)
def test_each_trouble_has_its_reason(pod, reason):
    [found] = troubles([pod], [], ["NVIDIA-H100"], {})

    assert found.reason is reason


def a_member(rank, conditions, **annotations):
    made = a_pod(conditions=conditions, name=f"dd-wide-r1-0-{rank}")
    labels = {ROLE: "wide", GROUP_LABEL: "0"}
    metadata = msgspec.structs.replace(made.metadata, labels=labels, annotations=annotations)
    return msgspec.structs.replace(made, metadata=metadata)


def test_group_without_any_node_fits_no_domain():
    full = unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    group = [a_member(0, full), a_member(1, full)]

    found, *others = troubles(group, [], [], {"wide": "rack"})
    assert (found.reason, found.where) == (TroubleReason.NoDomainFits, "dd-wide-r1-0")
    assert found.message.startswith("2 pods need room in one rack; the scheduler found none: 0/3 nodes")
    assert {each.reason for each in others} == {TroubleReason.InsufficientCapacity}

    half = troubles([a_member(0, ()), a_member(1, full)], [], [], {"wide": "rack"})
    elsewhere = troubles(group, [], [], {"other": "rack"})
    placed = troubles([a_member(rank, full, **{DOMAIN: "rack=a"}) for rank in (0, 1)], [], [], {"wide": "rack"})
    assert {each.reason for each in (*half, *elsewhere, *placed)} == {TroubleReason.InsufficientCapacity}


def test_pod_with_a_foreign_gate_names_it():
    def gated(*gates):
        made = a_pod()
        gates = tuple(PodSchedulingGate(each) for each in gates)
        return msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, scheduling_gates=gates))

    [found] = troubles([gated(GATE, "example.com/quota")], [], [], {})

    assert (found.reason, found.message) == (
        TroubleReason.SchedulingGated,
        "waits for the scheduling gate example.com/quota",
    )
    assert troubles([gated(GATE)], [], [], {}) == (), "the operator's own is no trouble"


def test_only_our_own_output_lines_are_repeated():
    written = "token=hunter2\nfleet: vllm: out of memory\nTraceback hunter2"
    [found] = troubles(
        [a_pod(waiting("CrashLoopBackOff", last=ContainerTerminated(exit_code=1, message=written)))], [], [], {}
    )

    assert "vllm: out of memory" in found.message
    assert "hunter2" not in found.message


def test_deleted_pods_and_recovered_containers_are_no_trouble():
    ended = ContainerState(terminated=ContainerTerminated(exit_code=1))
    again = ContainerStatus(name="main", last_state=ended)

    assert troubles([a_pod(waiting("ErrImagePull"), deleted="now"), a_pod(again)], [], [], {}) == ()


def test_unreachable_hub_is_reported_while_retrying():
    text = "fleet: hub.endpoint: nothing of owner/name came from https://hub for 120 s (ConnectError); see that it can be reached"
    ended = ContainerState(terminated=ContainerTerminated(exit_code=3, message=f"hunter2\n{text}"))
    again = ContainerStatus(name="main", last_state=ended, restart_count=1)
    ready = (ObjectCondition(type="Ready", status="True"),)

    for pod in (a_pod(waiting("CrashLoopBackOff", last=ended.terminated)), a_pod(again)):
        [found] = troubles([pod], [], [], {})
        assert (found.reason, found.message) == (TroubleReason.HubUnreachable, text.removeprefix("fleet: "))
    assert troubles([a_pod(again, conditions=ready)], [], [], {}) == ()


def test_quota_comes_before_its_consequences():
    text = 'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8'
    failed = ObjectCondition(type="ReplicaFailure", status="True", reason="FailedCreate", message=text)
    child = WorkloadResource(metadata=ObjectMetadata(name="dd"), status=WorkloadStatus(conditions=(failed,)))

    first, *_ = troubles([a_pod(waiting("ErrImagePull"))], [child], [], {})

    assert (first.reason, first.message) == (
        TroubleReason.QuotaExceeded,
        "exceeded quota: gpus, requested: requests.nvidia.com/gpu=8",
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('pods "x" is forbidden: [maximum cpu usage per Container is 2, but limit is 4]', "[maximum cpu usage"),
        ('pods "x" is forbidden: failed quota: q: must specify cpu for: main', "failed quota: q: must specify cpu"),
        (
            "pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: name a team",
            "ValidatingAdmissionPolicy 'p' with binding 'b' denied request: name a team",
        ),
        (
            'Pod "x" is invalid: spec.containers[0].env[0].name: Invalid value: "hunter2": hunter2',
            "spec.containers[0].env[0].name",
        ),
        ("something else with hunter2", "FailedCreate"),
    ],
)
def test_refused_pods_say_why_without_values(message, said):
    failed = ObjectCondition(type="ReplicaFailure", status="True", reason="FailedCreate", message=message)
    child = WorkloadResource(metadata=ObjectMetadata(name="dd"), status=WorkloadStatus(conditions=(failed,)))

    [found] = troubles([], [child], [], {})

    assert found.reason is TroubleReason.PodsRefused
    assert found.message.startswith(said)
    assert "hunter2" not in found.message
