"""Probe evidence: which answers are needed before a deployment is Ready, and when no new probe is sent."""

import msgspec

from operators.probes.evidence import (
    ProbeCompletion,
    ProbeEvidence,
    ProbeFailure,
    ProbeSubject,
    ProbeTarget,
    RunningPod,
    answered,
    evidence_from_status,
    failed,
    kept,
    missing_only_routers,
    unanswered,
    wanted,
)

REFUSED = ProbeFailure(503, "no_worker: nobody serves it")
FULL = ProbeFailure(429, "queue_full", busy=True)


def an_aim(worker, role="decode", restarts=0, pair=True):
    return ProbeTarget(role, RunningPod(worker, restarts), pair)


def a_subject(*targets, routers=("r",), prefills=("p",)):
    return ProbeSubject(
        service="dd-router",
        model="m",
        routers=tuple(map(RunningPod, routers)),
        prefills=tuple(map(RunningPod, prefills)),
        targets=targets,
    )


def after(subject, *workers, evidence=None, handed=True):
    evidence = evidence or ProbeEvidence()
    for target in subject.targets:
        if target.worker.pod in workers:
            evidence = answered(evidence, subject, target, ProbeCompletion(handed))
    return evidence


def asked(subject, evidence):
    return [target.worker.pod for target in wanted(subject, kept(subject, evidence))]


def test_every_answering_worker_is_probed_once():
    subject = a_subject(an_aim("a"), an_aim("b"))

    assert asked(subject, ProbeEvidence()) == ["a", "b"]
    assert asked(subject, after(subject, "a")) == ["b"]
    assert asked(subject, after(subject, "a", "b")) == []


def test_only_new_and_restarted_pods_are_probed():
    before = a_subject(an_aim("a"), an_aim("b"))
    evidence = after(before, "a", "b")

    assert asked(a_subject(an_aim("a"), an_aim("b"), an_aim("c")), evidence) == ["c"]
    assert asked(a_subject(an_aim("a", restarts=1), an_aim("b")), evidence) == ["a"]
    assert asked(a_subject(an_aim("a")), evidence) == []


def test_recreated_pod_with_the_same_name_is_probed():
    before, after_it = (a_subject(ProbeTarget("wide", RunningPod("dd-0-0", 0, uid))) for uid in ("u-1", "u-2"))

    assert asked(after_it, after(before, "dd-0-0")) == ["dd-0-0"]
    assert before.digest != after_it.digest, "what the status proves is of the one before"


def test_changed_routers_cause_one_probe_for_each_role():
    targets = (an_aim("a"), an_aim("b"), an_aim("x", "whole", pair=False), an_aim("y", "whole", pair=False))
    evidence = after(a_subject(*targets), "a", "b", "x", "y")

    for changed in (a_subject(*targets, routers=("other",)), a_subject(*targets, prefills=("p", "q"))):
        assert [each.worker.pod for each in unanswered(changed, evidence)] == ["a", "x"]
        part = answered(evidence, changed, targets[1], ProbeCompletion(True))
        assert asked(changed, part) == ["x"], "one answer of a role is enough"
        assert asked(changed, answered(part, changed, targets[2], ProbeCompletion())) == []


def test_worker_that_took_no_blocks_over_is_probed_again():
    subject = a_subject(an_aim("a"), an_aim("b"))
    evidence = after(subject, "b", evidence=after(subject, "a", handed=False))

    assert unanswered(subject, evidence) == ()
    assert asked(subject, evidence) == ["a"]
    assert asked(subject, after(subject, "a", evidence=evidence)) == []
    assert after(subject, "a", handed=None).unclear == {subject.targets[0]}


def test_second_failure_is_reported_until_an_answer():
    subject = a_subject(an_aim("a"))
    once = failed(ProbeEvidence(), subject, subject.targets[0], REFUSED)
    twice = failed(once, subject, subject.targets[0], REFUSED)

    assert (once.reported, twice.reported, twice.failed) == (None, REFUSED, "a")
    assert answered(twice, subject, subject.targets[0], ProbeCompletion()).reported is None
    assert kept(a_subject(an_aim("b")), twice).reported is None
    assert kept(subject, twice).reported == REFUSED


def told_after(subject, *failures, evidence=None):
    evidence = evidence or ProbeEvidence()
    for failure in failures:
        evidence = failed(evidence, subject, subject.targets[0], failure)
    return evidence.reported


def test_report_changes_with_two_failures_of_the_other_kind():
    subject = a_subject(an_aim("a"))

    assert told_after(subject, FULL) is None
    assert told_after(subject, REFUSED, FULL, REFUSED, FULL) is None
    assert told_after(subject, FULL, FULL) == FULL
    assert told_after(subject, REFUSED, REFUSED, FULL, REFUSED, FULL) == REFUSED
    assert told_after(subject, REFUSED, REFUSED, FULL, FULL) == FULL
    assert told_after(subject, FULL, FULL, REFUSED, REFUSED) == REFUSED


def test_answers_behind_former_routers_still_count():
    targets = (an_aim("a"), an_aim("b"))
    evidence = after(a_subject(*targets), "a", "b")

    assert missing_only_routers(a_subject(*targets, routers=("other",)), evidence)
    assert not missing_only_routers(a_subject(*targets, prefills=("q",)), evidence), (
        "who computes prompts is another one"
    )
    assert not missing_only_routers(a_subject(*targets, an_aim("c"), routers=("other",)), evidence)
    assert not missing_only_routers(a_subject(an_aim("a", restarts=1), targets[1], routers=("other",)), evidence)
    assert not missing_only_routers(a_subject(*targets), ProbeEvidence())


def test_next_leader_trusts_the_status_evidence():
    subject = a_subject(an_aim("a"), an_aim("b"))

    assert asked(subject, evidence_from_status(subject, subject.digest, "True")) == []
    assert asked(subject, evidence_from_status(subject, subject.digest, "False")) == ["a", "b"]
    assert unanswered(subject, evidence_from_status(subject, subject.digest, "False")) == ()


def test_next_leader_knows_answers_behind_other_routers():
    subject = a_subject(an_aim("a"), an_aim("b"))
    before = a_subject(an_aim("a"), an_aim("b"), routers=("other",)).digest

    assert asked(subject, evidence_from_status(subject, before, "True")) == ["a"]
    assert missing_only_routers(subject, evidence_from_status(subject, before, "True"))
    for unlike in ("", "x", a_subject(an_aim("a"), routers=("r",)).digest):
        assert evidence_from_status(subject, unlike, "True") is None


def test_digest_covers_all_pods_of_a_request():
    subject = a_subject(an_aim("a"))
    others = [
        a_subject(an_aim("a"), routers=("other",)),
        a_subject(an_aim("a"), prefills=()),
        a_subject(an_aim("a", restarts=1)),
        a_subject(an_aim("a", pair=False)),
        msgspec.structs.replace(subject, model="n"),
    ]

    assert len({each.digest for each in (subject, *others)}) == 6
    assert msgspec.structs.replace(subject, addresses=("10.0.0.1",)).digest == subject.digest
    assert subject.digest == a_subject(an_aim("a")).digest
