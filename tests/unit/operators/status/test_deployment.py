"""What stands in a status: Ready only after answers, the way of blocks as it was seen, and how pools move."""

import msgspec
import pytest

from operators.controller.reconcile import reconcile
from operators.observed.state import ObservedRouter
from operators.probes.evidence import ProbeCompletion, ProbeEvidence, ProbeFailure, RunningPod, answered, failed
from operators.scaling import RevisionReplicas
from tests.unit.operators.controller.test_reconcile import IMAGES, LATER, NOW, Cluster, a_wish, condition

DIRECT = {"kvTransfer": {"paths": ["direct"]}}
DOWN = ProbeFailure(503, "no_worker: nobody serves it")
FULL = ProbeFailure(429, "queue_full", busy=True)


def settled(wish):
    """Of a deployment in whose way nothing stands, with pods by name."""
    cluster = Cluster()
    cluster.settle(wish)
    seen = cluster.seen()
    children = tuple(
        msgspec.structs.replace(
            each, serving=tuple(RunningPod(f"{each.role}-{at}") for at in range(each.replicas.ready))
        )
        for each in seen.children
    )
    router = msgspec.structs.replace(seen.router, pods=(RunningPod("router-0"),))
    return msgspec.structs.replace(seen, children=children, router=router, shown=ProbeEvidence())


def look(seen, wish=None, now=NOW, **changes):
    return reconcile(wish or a_wish(), msgspec.structs.replace(seen, **changes), IMAGES, now)


def ready(outcome):
    found = condition(outcome.status, "Ready")
    return found.status, found.reason


def all_answered(subject, handed=True):
    shown = ProbeEvidence()
    for aim in subject.aims:
        shown = answered(shown, subject, aim, ProbeCompletion(handed))
    return shown


def test_ready_needs_an_answer_of_every_worker():
    seen = settled(a_wish())

    first = look(seen)
    subject = first.wanted.subject
    half = look(seen, shown=answered(ProbeEvidence(), subject, subject.aims[0], ProbeCompletion(True)))
    whole = look(seen, shown=all_answered(subject))

    assert [(aim.worker.pod, aim.pair) for aim in subject.aims] == [("decode-0", True), ("decode-1", True)]
    assert (ready(first), ready(half)) == (("False", "ServedProbePending"), ("False", "ServedProbePending"))
    assert condition(half.status, "Ready").message == "1 of 2 workers have answered a request"
    assert ready(whole) == ("True", "AllRolesReady")
    assert (half.status.proved, whole.status.proved) == ("", subject.digest)


def test_deployment_that_is_not_up_is_not_probed():
    seen = settled(a_wish())
    [prefill, decode] = sorted(seen.children, key=lambda each: each.role == "decode")
    missing = msgspec.structs.replace(decode, ready_pods=1)

    outcome = look(seen, children=(prefill, missing))

    assert (ready(outcome), outcome.wanted) == (("False", "RolesNotReady"), None)


def test_deployment_that_answers_errors_is_not_ready():
    seen = settled(a_wish())
    subject = look(seen).wanted.subject
    shown = ProbeEvidence()
    for _ in range(9):
        shown = failed(shown, subject, subject.aims[0], DOWN)
        assert ready(look(seen, shown=shown))[0] == "False"

    found = condition(look(seen, shown=shown).status, "Ready")
    assert (found.reason, found.message) == ("ServedProbeFailed", "decode-0: 503 no_worker: nobody serves it")


def test_missing_api_key_leaves_ready_unknown():
    seen = settled(a_wish())
    subject = look(seen).wanted.subject
    shown = ProbeEvidence()
    for _ in range(2):
        shown = failed(
            shown, subject, subject.aims[0], ProbeFailure(401, "its routers want an API key", wants_key=True)
        )

    found = condition(look(seen, shown=shown).status, "Ready")

    assert (found.status, found.reason) == ("Unknown", "ServedProbeNeedsKey")
    assert found.message == "401 its routers want an API key; give the operator one for ns/dd: probe.keys"


def test_proved_deployment_stays_ready_for_a_new_operator():
    seen = settled(a_wish())
    proved = look(seen, shown=all_answered(look(seen).wanted.subject)).status

    again = look(seen, now=LATER, proved=proved.proved, conditions=proved.conditions)
    other = look(
        seen,
        proved=proved.proved,
        conditions=proved.conditions,
        router=msgspec.structs.replace(seen.router, pods=(RunningPod("router-0", 1),)),
    )

    assert again.status == proved
    assert ready(other) == ("False", "ServedProbePending")


def behind_other_routers(seen, **changes):
    """The same, once its routers are others."""
    router = msgspec.structs.replace(seen.router, pods=(RunningPod("router-1"),))
    return msgspec.structs.replace(seen, router=router, **changes)


def full(subject, shown, times=2):
    for _ in range(times):
        shown = failed(shown, subject, subject.aims[0], FULL)
    return shown


def test_full_new_routers_keep_a_proved_deployment_ready():
    seen = settled(a_wish())
    shown = all_answered(look(seen).wanted.subject)
    other = behind_other_routers(seen, shown=shown)
    subject = look(other).wanted.subject

    once = look(other, shown=full(subject, shown, times=1))
    twice = look(other, shown=full(subject, shown))
    found = condition(twice.status, "Ready")

    assert (ready(look(other)), ready(once)) == (("False", "ServedProbePending"),) * 2
    assert (found.status, found.reason) == ("True", "Saturated")
    assert found.message.startswith("1 of 2 workers have answered a request; decode-0: 429 queue_full; ")
    assert twice.status.proved == "", "it is asked for all the same"
    assert twice.wanted.subject == subject


def test_full_routers_prove_nothing_of_unproved_workers():
    seen = settled(a_wish())
    subject = look(seen).wanted.subject
    half = answered(ProbeEvidence(), subject, subject.aims[0], ProbeCompletion(True))
    for shown in (ProbeEvidence(), half):
        assert ready(look(seen, shown=full(subject, shown))) == ("Unknown", "Saturated")


def test_failure_is_not_taken_for_saturation():
    seen = settled(a_wish())
    shown = all_answered(look(seen).wanted.subject)
    other = behind_other_routers(seen)
    subject = look(other, shown=shown).wanted.subject
    for _ in range(2):
        shown = failed(shown, subject, subject.aims[0], DOWN)

    assert ready(look(other, shown=shown)) == ("False", "ServedProbeFailed")
    assert ready(look(other, shown=full(subject, shown, times=1))) == ("False", "ServedProbeFailed")


def test_next_leader_keeps_saturated_deployment_ready():
    seen = settled(a_wish())
    shown = all_answered(look(seen).wanted.subject)
    proved = look(seen, shown=shown).status.proved
    other = behind_other_routers(seen, proved=proved)
    subject = look(other, shown=shown).wanted.subject
    said = look(other, shown=full(subject, shown)).status
    assert said.proved == proved

    begun = look(other, now=LATER, shown=ProbeEvidence(), conditions=said.conditions)
    assert condition(begun.status, "Ready") == condition(said, "Ready")
    knows = begun.wanted.shown
    for _ in range(2):
        knows = failed(knows, subject, subject.aims[0], DOWN)
    assert ready(look(other, shown=knows, conditions=said.conditions)) == ("False", "ServedProbeFailed")

    strange = look(other, proved="", shown=ProbeEvidence(), conditions=said.conditions)
    assert ready(strange) == ("Unknown", "Saturated"), "nothing shows that anybody has answered"


def test_without_probes_ready_says_so():
    found = condition(look(settled(a_wish()), shown=None).status, "Ready")

    assert found.status == "True"
    assert "probe.enabled is off" in found.message

    seen = settled(a_wish())
    before = look(seen, shown=all_answered(look(seen).wanted.subject)).status.conditions
    assert condition(look(seen, shown=None, conditions=before).status, "KVPathReady").status == "Unknown"


def test_kv_path_is_ready_when_each_worker_took_blocks_over():
    seen = settled(a_wish())
    subject = look(seen).wanted.subject

    def said(handed):
        found = condition(look(seen, shown=all_answered(subject, handed)).status, "KVPathReady")
        return found.status, found.reason

    assert said(True) == ("True", "HandedOver")
    assert said(False) == ("False", "NotHandedOver")
    assert said(None) == ("Unknown", "NotObserved")
    before = condition(look(seen).status, "KVPathReady")
    assert (before.status, before.reason) == ("Unknown", "NotObserved")


def test_kv_path_keeps_its_state_between_probes():
    seen = settled(a_wish())
    conditions = look(seen, shown=all_answered(look(seen).wanted.subject)).status.conditions

    rolling = look(seen, conditions=conditions, router=ObservedRouter(name="dd-router", asked=1), now=LATER)

    assert ready(rolling)[0] == "False"
    assert condition(rolling.status, "KVPathReady") == condition(
        look(seen, conditions=conditions).status, "KVPathReady"
    )
    assert condition(rolling.status, "KVPathReady").reason == "HandedOver"


def test_without_direct_path_decode_workers_are_probed_alone():
    store = a_wish(kvTransfer={"paths": ["store"]})
    whole = a_wish({"name": "all", "type": "aggregated", "replicas": 2})

    assert [aim.pair for aim in look(settled(store), store).wanted.subject.aims] == [False, False]
    assert [aim.pair for aim in look(settled(whole), whole).wanted.subject.aims] == [False, False]
    assert look(settled(whole), whole).wanted.subject.prefills == ()


def test_partly_unknown_worker_is_named_with_its_routers():
    seen = settled(a_wish())
    children = tuple(msgspec.structs.replace(each, registered=each.ready_pods - 1) for each in seen.children)

    outcome = look(seen, children=children, partly={"decode-1": ("router-b",)})

    found = condition(outcome.status, "RolesRegistered")
    assert (found.status, found.reason, ready(outcome)[1]) == ("False", "NotRegistered", "NotRegistered")
    assert "decode: 1 of 2 known to all routers; decode-1 is not known to router-b" in found.message


def test_silent_router_leaves_registration_unknown():
    outcome = look(settled(a_wish()), silent=("router-b",))

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
    seen = settled(a_wish())

    def moved(child, asked, leaving):
        replicas = RevisionReplicas(
            revision=child.replicas.revision, asked=asked, pods=asked, ready=asked, leaving=leaving
        )
        return msgspec.structs.replace(child, replicas=replicas)

    counts = {"prefill": prefill, "decode": decode}
    outcome = look(seen, children=tuple(moved(each, *counts[each.role]) for each in seen.children))

    found = condition(outcome.status, "Rebalancing")
    assert (found.status, found.reason) == (status, reason)
    if status == "True":
        assert found.message == f"prefill to decode: {prefill[0]}:{decode[0]}, to be 1:2"


def test_rollout_alone_is_no_rebalancing():
    cluster = Cluster()
    cluster.settle(a_wish())
    said = []
    for _ in range(60):
        outcome = reconcile(a_wish(image="another"), cluster.seen(), IMAGES, NOW)
        said.append(condition(outcome.status, "Rebalancing").status)
        for action in outcome.actions:
            cluster.do(action)
        cluster.pass_time()

    assert condition(outcome.status, "Ready").status == "True"
    assert set(said) == {"False"}
