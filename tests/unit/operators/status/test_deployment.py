"""Status of a deployment: Ready only after answered probes, the KV path that was last observed, and changes of roles."""

import msgspec
import pytest

from operators.controller.reconcile import reconcile
from operators.observed.state import ObservedRouter
from operators.probes.evidence import ProbeCompletion, ProbeEvidence, ProbeFailure, RunningPod, answered, failed
from operators.replica_steps import RevisionReplicas
from tests.unit.operators.controller.test_reconcile import IMAGES, LATER, NOW, Cluster, condition, desired_deployment

DIRECT = {"kvTransfer": {"paths": ["direct"]}}
DOWN = ProbeFailure(503, "no_worker: nobody serves it")
FULL = ProbeFailure(429, "queue_full", busy=True)


def settled(desired):
    """Return the state that a deployment reaches without obstacles, with named pods."""
    cluster = Cluster()
    cluster.settle(desired)
    observed = cluster.observed()
    children = tuple(
        msgspec.structs.replace(
            each, serving=tuple(RunningPod(f"{each.role}-{at}") for at in range(each.replicas.ready))
        )
        for each in observed.children
    )
    router = msgspec.structs.replace(observed.router, pods=(RunningPod("router-0"),))
    return msgspec.structs.replace(observed, children=children, router=router, evidence=ProbeEvidence())


def reconciled(observed, desired=None, now=NOW, **changes):
    return reconcile(desired or desired_deployment(), msgspec.structs.replace(observed, **changes), IMAGES, now)


def ready(outcome):
    found = condition(outcome.status, "Ready")
    return found.status, found.reason


def all_answered(subject, handed=True):
    evidence = ProbeEvidence()
    for target in subject.targets:
        evidence = answered(evidence, subject, target, ProbeCompletion(handed))
    return evidence


def test_ready_needs_an_answer_of_every_worker():
    observed = settled(desired_deployment())

    first = reconciled(observed)
    subject = first.wanted.subject
    half = reconciled(observed, evidence=answered(ProbeEvidence(), subject, subject.targets[0], ProbeCompletion(True)))
    whole = reconciled(observed, evidence=all_answered(subject))

    assert [(target.worker.pod, target.pair) for target in subject.targets] == [("decode-0", True), ("decode-1", True)]
    assert (ready(first), ready(half)) == (("False", "ServedProbePending"), ("False", "ServedProbePending"))
    assert condition(half.status, "Ready").message == "1 of 2 workers have answered a request"
    assert ready(whole) == ("True", "AllRolesReady")
    assert (half.status.proved, whole.status.proved) == ("", subject.digest)


def test_deployment_that_is_not_up_is_not_probed():
    observed = settled(desired_deployment())
    [prefill, decode] = sorted(observed.children, key=lambda each: each.role == "decode")
    missing = msgspec.structs.replace(decode, ready_pods=1)

    outcome = reconciled(observed, children=(prefill, missing))

    assert (ready(outcome), outcome.wanted) == (("False", "RolesNotReady"), None)


def test_deployment_that_answers_errors_is_not_ready():
    observed = settled(desired_deployment())
    subject = reconciled(observed).wanted.subject
    evidence = ProbeEvidence()
    for _ in range(9):
        evidence = failed(evidence, subject, subject.targets[0], DOWN)
        assert ready(reconciled(observed, evidence=evidence))[0] == "False"

    found = condition(reconciled(observed, evidence=evidence).status, "Ready")
    assert (found.reason, found.message) == ("ServedProbeFailed", "decode-0: 503 no_worker: nobody serves it")


@pytest.mark.parametrize(
    ("withheld", "remedy"),
    [
        (False, "give the operator one for ns/dd: probe.keys"),
        (True, "set the operator's probe.insecure on a network that nobody else is on"),
    ],
)
def test_missing_api_key_leaves_ready_unknown(withheld, remedy):
    observed = settled(desired_deployment())
    subject = reconciled(observed).wanted.subject
    evidence = ProbeEvidence()
    for _ in range(2):
        failure = ProbeFailure(401, "its routers want an API key", wants_key=True, key_withheld=withheld)
        evidence = failed(evidence, subject, subject.targets[0], failure)

    found = condition(reconciled(observed, evidence=evidence).status, "Ready")

    assert (found.status, found.reason) == ("Unknown", "ServedProbeNeedsKey")
    assert found.message == f"401 its routers want an API key; {remedy}"


def test_proved_deployment_stays_ready_for_a_new_operator():
    observed = settled(desired_deployment())
    proved = reconciled(observed, evidence=all_answered(reconciled(observed).wanted.subject)).status

    again = reconciled(observed, now=LATER, proved=proved.proved, conditions=proved.conditions)
    other = reconciled(
        observed,
        proved=proved.proved,
        conditions=proved.conditions,
        router=msgspec.structs.replace(observed.router, pods=(RunningPod("router-0", 1),)),
    )

    assert again.status == proved
    assert ready(other) == ("False", "ServedProbePending")


def behind_other_routers(observed, **changes):
    """Return the same state with another router pod."""
    router = msgspec.structs.replace(observed.router, pods=(RunningPod("router-1"),))
    return msgspec.structs.replace(observed, router=router, **changes)


def full(subject, evidence, times=2):
    for _ in range(times):
        evidence = failed(evidence, subject, subject.targets[0], FULL)
    return evidence


def test_full_new_routers_keep_a_proved_deployment_ready():
    observed = settled(desired_deployment())
    evidence = all_answered(reconciled(observed).wanted.subject)
    other = behind_other_routers(observed, evidence=evidence)
    subject = reconciled(other).wanted.subject

    once = reconciled(other, evidence=full(subject, evidence, times=1))
    twice = reconciled(other, evidence=full(subject, evidence))
    found = condition(twice.status, "Ready")

    assert (ready(reconciled(other)), ready(once)) == (("False", "ServedProbePending"),) * 2
    assert (found.status, found.reason) == ("True", "Saturated")
    assert found.message.startswith("1 of 2 workers have answered a request; decode-0: 429 queue_full; ")
    assert twice.status.proved == "", "it is asked for all the same"
    assert twice.wanted.subject == subject


def test_full_routers_prove_nothing_of_unproved_workers():
    observed = settled(desired_deployment())
    subject = reconciled(observed).wanted.subject
    half = answered(ProbeEvidence(), subject, subject.targets[0], ProbeCompletion(True))
    for evidence in (ProbeEvidence(), half):
        assert ready(reconciled(observed, evidence=full(subject, evidence))) == ("Unknown", "Saturated")


def test_failure_is_not_taken_for_saturation():
    observed = settled(desired_deployment())
    evidence = all_answered(reconciled(observed).wanted.subject)
    other = behind_other_routers(observed)
    subject = reconciled(other, evidence=evidence).wanted.subject
    for _ in range(2):
        evidence = failed(evidence, subject, subject.targets[0], DOWN)

    assert ready(reconciled(other, evidence=evidence)) == ("False", "ServedProbeFailed")
    assert ready(reconciled(other, evidence=full(subject, evidence, times=1))) == ("False", "ServedProbeFailed")


def test_next_leader_keeps_saturated_deployment_ready():
    observed = settled(desired_deployment())
    evidence = all_answered(reconciled(observed).wanted.subject)
    proved = reconciled(observed, evidence=evidence).status.proved
    other = behind_other_routers(observed, proved=proved)
    subject = reconciled(other, evidence=evidence).wanted.subject
    said = reconciled(other, evidence=full(subject, evidence)).status
    assert said.proved == proved

    begun = reconciled(other, now=LATER, evidence=ProbeEvidence(), conditions=said.conditions)
    assert condition(begun.status, "Ready") == condition(said, "Ready")
    knows = begun.wanted.evidence
    for _ in range(2):
        knows = failed(knows, subject, subject.targets[0], DOWN)
    assert ready(reconciled(other, evidence=knows, conditions=said.conditions)) == ("False", "ServedProbeFailed")

    strange = reconciled(other, proved="", evidence=ProbeEvidence(), conditions=said.conditions)
    assert ready(strange) == ("Unknown", "Saturated"), "nothing shows that anybody has answered"


def test_without_probes_ready_says_so():
    found = condition(reconciled(settled(desired_deployment()), evidence=None).status, "Ready")

    assert found.status == "True"
    assert "probe.enabled is off" in found.message

    observed = settled(desired_deployment())
    before = reconciled(observed, evidence=all_answered(reconciled(observed).wanted.subject)).status.conditions
    assert condition(reconciled(observed, evidence=None, conditions=before).status, "KVPathReady").status == "Unknown"


def available(outcome):
    found = condition(outcome.status, "Available")
    return found.status, found.reason


def with_ready(observed, **ready):
    """Return the same state with these numbers of ready replicas, by role."""
    children = tuple(
        msgspec.structs.replace(each, replicas=msgspec.structs.replace(each.replicas, ready=ready[each.role]))
        if each.role in ready
        else each
        for each in observed.children
    )
    return msgspec.structs.replace(observed, children=children)


def test_available_needs_one_answer_and_ready_needs_all():
    observed = settled(desired_deployment())
    first = reconciled(observed, conditions=())
    subject = first.wanted.subject
    half = answered(ProbeEvidence(), subject, subject.targets[0], ProbeCompletion(True))

    assert (available(first), ready(first)) == (("False", "ServedProbePending"),) * 2
    assert available(reconciled(observed, evidence=half)) == ("True", "Serving")
    assert ready(reconciled(observed, evidence=half))[0] == "False"


@pytest.mark.parametrize(
    ("replicas", "status"),
    [
        ({"decode": 1}, ("True", "Serving")),
        ({"prefill": 0}, ("True", "Serving")),
        ({"decode": 0}, ("False", "NoWorkerReady")),
    ],
)
def test_available_deployment_may_lack_replicas(replicas, status):
    observed = settled(desired_deployment())
    before = reconciled(observed, evidence=all_answered(reconciled(observed).wanted.subject)).status.conditions
    fewer = with_ready(observed, **replicas)
    short = tuple(msgspec.structs.replace(each, ready_pods=each.replicas.ready) for each in fewer.children)

    outcome = reconciled(fewer, children=short, conditions=before)

    assert (ready(outcome)[0], available(outcome)) == ("False", status)


def test_deployment_stays_available_during_a_rollout():
    observed = settled(desired_deployment())
    before = reconciled(observed, evidence=all_answered(reconciled(observed).wanted.subject)).status.conditions

    rolling = reconciled(observed, desired_deployment(image="next"), conditions=before)

    assert ready(rolling) == ("False", "RollingOut")
    assert available(rolling) == ("True", "Serving")


def test_deployment_without_a_ready_router_is_not_available():
    observed = settled(desired_deployment())

    assert available(reconciled(observed, router=None)) == ("False", "NoRouterReady")
    assert available(reconciled(observed, router=ObservedRouter(name="dd-router", asked=1))) == (
        "False",
        "NoRouterReady",
    )


def test_failed_probes_count_until_another_is_answered():
    observed = settled(desired_deployment())
    subject = reconciled(observed).wanted.subject
    evidence = ProbeEvidence()
    for target in subject.targets * 2:
        evidence = failed(evidence, subject, target, DOWN)
    broken = reconciled(observed, evidence=evidence)
    conditions = broken.status.conditions
    found = condition(broken.status, "Available")

    assert (found.status, found.reason) == ("False", "ServedProbeFailed")
    assert "503 no_worker" in found.message
    rolling = reconciled(observed, desired_deployment(image="next"), conditions=conditions, evidence=evidence)
    assert available(rolling) == ("False", "ServedProbeFailed"), "nothing has shown that it serves"
    mended = reconciled(observed, evidence=all_answered(subject), conditions=conditions)
    assert available(mended) == ("True", "Serving")


def test_probes_without_a_key_leave_available_unknown():
    observed = settled(desired_deployment())
    subject = reconciled(observed).wanted.subject
    evidence = ProbeEvidence()
    for _ in range(2):
        evidence = failed(evidence, subject, subject.targets[0], ProbeFailure(401, "a key", wants_key=True))

    assert available(reconciled(observed, evidence=evidence)) == ("Unknown", "ServedProbeNeedsKey")
    assert available(reconciled(observed, evidence=full(subject, ProbeEvidence()))) == ("Unknown", "Saturated")


def test_changed_routers_leave_a_proved_deployment_available():
    observed = settled(desired_deployment())
    evidence = all_answered(reconciled(observed).wanted.subject)
    before = reconciled(observed, evidence=evidence).status.conditions

    other = reconciled(behind_other_routers(observed, evidence=evidence), conditions=before)

    assert (ready(other), available(other)) == (("False", "ServedProbePending"), ("True", "Serving"))


def test_probes_wait_until_router_pods_that_leave_are_gone():
    observed = settled(desired_deployment())
    two = msgspec.structs.replace(observed.router, pods=(RunningPod("router-0"), RunningPod("router-1")))

    rolling = reconciled(observed, router=two)

    assert (rolling.wanted, ready(rolling)) == (None, ("False", "RolesNotReady"))
    assert "1 of 1 ready, 1 new, 1 draining" in condition(rolling.status, "Ready").message
    assert reconciled(observed).wanted is not None


def test_suspended_deployment_is_not_available_at_the_end():
    suspended = desired_deployment(suspend=True)
    observed = with_ready(settled(desired_deployment()), prefill=0, decode=0)

    assert available(reconciled(settled(desired_deployment()), suspended)) == ("True", "Serving")
    assert available(reconciled(observed, suspended)) == ("False", "Suspended")


def test_kv_path_is_ready_when_each_worker_took_blocks_over():
    observed = settled(desired_deployment())
    subject = reconciled(observed).wanted.subject

    def said(handed):
        found = condition(reconciled(observed, evidence=all_answered(subject, handed)).status, "KVPathReady")
        return found.status, found.reason

    assert said(True) == ("True", "HandedOver")
    assert said(False) == ("False", "NotHandedOver")
    assert said(None) == ("Unknown", "NotObserved")
    before = condition(reconciled(observed).status, "KVPathReady")
    assert (before.status, before.reason) == ("Unknown", "NotObserved")


@pytest.mark.parametrize("speaks", [True, False])
@pytest.mark.parametrize("secret", ["", "tls"])
def test_probes_speak_as_the_routers_that_exist(secret, speaks):
    wanted = desired_deployment(routing={"tlsSecret": secret})
    observed = settled(wanted)

    outcome = reconciled(observed, wanted, router=msgspec.structs.replace(observed.router, tls=speaks))

    assert outcome.wanted.subject.tls is speaks


def test_kv_path_keeps_its_state_between_probes():
    observed = settled(desired_deployment())
    conditions = reconciled(observed, evidence=all_answered(reconciled(observed).wanted.subject)).status.conditions

    rolling = reconciled(observed, conditions=conditions, router=ObservedRouter(name="dd-router", asked=1), now=LATER)

    assert ready(rolling)[0] == "False"
    assert condition(rolling.status, "KVPathReady") == condition(
        reconciled(observed, conditions=conditions).status, "KVPathReady"
    )
    assert condition(rolling.status, "KVPathReady").reason == "HandedOver"


def test_without_direct_path_decode_workers_are_probed_alone():
    store = desired_deployment(kvTransfer={"paths": ["store"]})
    whole = desired_deployment({"name": "all", "type": "aggregated", "replicas": 2})

    assert [target.pair for target in reconciled(settled(store), store).wanted.subject.targets] == [False, False]
    assert [target.pair for target in reconciled(settled(whole), whole).wanted.subject.targets] == [False, False]
    assert reconciled(settled(whole), whole).wanted.subject.prefills == ()


def test_partly_unknown_worker_is_named_with_its_routers():
    observed = settled(desired_deployment())
    children = tuple(msgspec.structs.replace(each, registered=each.ready_pods - 1) for each in observed.children)

    outcome = reconciled(observed, children=children, partly_known={"decode-1": ("router-b",)})

    found = condition(outcome.status, "RolesRegistered")
    assert (found.status, found.reason, ready(outcome)[1]) == ("False", "NotRegistered", "NotRegistered")
    assert "decode: 1 of 2 known to all routers; decode-1 is not known to router-b" in found.message


def test_silent_router_leaves_registration_unknown():
    outcome = reconciled(settled(desired_deployment()), silent_routers=("router-b",))

    found = condition(outcome.status, "RolesRegistered")
    assert (found.status, found.reason, ready(outcome)) == ("Unknown", "NotTold", ("False", "RouterSilent"))
    assert found.message == "router-b: has not said which workers it knows"


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "reason"),
    [
        ((1, 0), (2, 0), "False", "Settled"),
        ((2, 0), (2, 0), "True", "Shrinking"),
        ((1, 1), (2, 0), "True", "Draining"),
        ((1, 1), (1, 0), "True", "Draining"),
        ((1, 0), (1, 0), "True", "Growing"),
        ((0, 0), (1, 0), "False", "Settled"),
    ],
)
def test_change_of_both_sides_is_called_rebalancing(prefill, decode, status, reason):
    observed = settled(desired_deployment())

    def moved(child, asked, leaving):
        replicas = RevisionReplicas(
            revision=child.replicas.revision, asked=asked, pods=asked, ready=asked, leaving=leaving
        )
        return msgspec.structs.replace(child, replicas=replicas)

    counts = {"prefill": prefill, "decode": decode}
    outcome = reconciled(observed, children=tuple(moved(each, *counts[each.role]) for each in observed.children))

    found = condition(outcome.status, "Rebalancing")
    assert (found.status, found.reason) == (status, reason)
    if status == "True":
        assert found.message == f"prefill to decode: {prefill[0]}:{decode[0]}, to be 1:2"


def test_rollout_alone_is_no_rebalancing():
    cluster = Cluster()
    cluster.settle(desired_deployment())
    said = []
    for _ in range(60):
        outcome = reconcile(desired_deployment(image="another"), cluster.observed(), IMAGES, NOW)
        said.append(condition(outcome.status, "Rebalancing").status)
        for action in outcome.actions:
            cluster.do(action)
        cluster.pass_time()

    assert condition(outcome.status, "Ready").status == "True"
    assert set(said) == {"False"}
