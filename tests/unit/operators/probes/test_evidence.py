"""What has to be shown before a deployment is called Ready, and what is not asked twice."""

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


def a_subject(*aims, routers=("r",), prefills=("p",)):
    return ProbeSubject(
        service="dd-router",
        model="m",
        routers=tuple(map(RunningPod, routers)),
        prefills=tuple(map(RunningPod, prefills)),
        aims=aims,
    )


def after(subject, *workers, shown=None, handed=True):
    shown = shown or ProbeEvidence()
    for aim in subject.aims:
        if aim.worker.pod in workers:
            shown = answered(shown, subject, aim, ProbeCompletion(handed))
    return shown


def asked(subject, shown):
    return [aim.worker.pod for aim in wanted(subject, kept(subject, shown))]


def test_every_answering_worker_is_probed_once():
    subject = a_subject(an_aim("a"), an_aim("b"))

    assert asked(subject, ProbeEvidence()) == ["a", "b"]
    assert asked(subject, after(subject, "a")) == ["b"]
    assert asked(subject, after(subject, "a", "b")) == []


def test_only_new_and_restarted_pods_are_probed():
    before = a_subject(an_aim("a"), an_aim("b"))
    shown = after(before, "a", "b")

    assert asked(a_subject(an_aim("a"), an_aim("b"), an_aim("c")), shown) == ["c"]
    assert asked(a_subject(an_aim("a", restarts=1), an_aim("b")), shown) == ["a"]
    assert asked(a_subject(an_aim("a")), shown) == []


def test_recreated_pod_with_the_same_name_is_probed():
    before, after_it = (a_subject(ProbeTarget("wide", RunningPod("dd-0-0", 0, uid))) for uid in ("u-1", "u-2"))

    assert asked(after_it, after(before, "dd-0-0")) == ["dd-0-0"]
    assert before.digest != after_it.digest, "what the status proves is of the one before"


def test_changed_routers_cause_one_probe_for_each_role():
    aims = (an_aim("a"), an_aim("b"), an_aim("x", "whole", pair=False), an_aim("y", "whole", pair=False))
    shown = after(a_subject(*aims), "a", "b", "x", "y")

    for changed in (a_subject(*aims, routers=("other",)), a_subject(*aims, prefills=("p", "q"))):
        assert [each.worker.pod for each in unanswered(changed, shown)] == ["a", "x"]
        part = answered(shown, changed, aims[1], ProbeCompletion(True))
        assert asked(changed, part) == ["x"], "one answer of a role is enough"
        assert asked(changed, answered(part, changed, aims[2], ProbeCompletion())) == []


def test_worker_that_took_no_blocks_over_is_probed_again():
    subject = a_subject(an_aim("a"), an_aim("b"))
    shown = after(subject, "b", shown=after(subject, "a", handed=False))

    assert unanswered(subject, shown) == ()
    assert asked(subject, shown) == ["a"]
    assert asked(subject, after(subject, "a", shown=shown)) == []
    assert after(subject, "a", handed=None).unclear == {subject.aims[0]}


def test_second_failure_is_reported_until_an_answer():
    subject = a_subject(an_aim("a"))
    once = failed(ProbeEvidence(), subject, subject.aims[0], REFUSED)
    twice = failed(once, subject, subject.aims[0], REFUSED)

    assert (once.told, twice.told, twice.failed) == (None, REFUSED, "a")
    assert answered(twice, subject, subject.aims[0], ProbeCompletion()).told is None
    assert kept(a_subject(an_aim("b")), twice).told is None
    assert kept(subject, twice).told == REFUSED


def told_after(subject, *failures, shown=None):
    shown = shown or ProbeEvidence()
    for failure in failures:
        shown = failed(shown, subject, subject.aims[0], failure)
    return shown.told


def test_report_changes_with_two_failures_of_the_other_kind():
    subject = a_subject(an_aim("a"))

    assert told_after(subject, FULL) is None
    assert told_after(subject, REFUSED, FULL, REFUSED, FULL) is None
    assert told_after(subject, FULL, FULL) == FULL
    assert told_after(subject, REFUSED, REFUSED, FULL, REFUSED, FULL) == REFUSED
    assert told_after(subject, REFUSED, REFUSED, FULL, FULL) == FULL
    assert told_after(subject, FULL, FULL, REFUSED, REFUSED) == REFUSED


def test_answers_behind_former_routers_still_count():
    aims = (an_aim("a"), an_aim("b"))
    shown = after(a_subject(*aims), "a", "b")

    assert missing_only_routers(a_subject(*aims, routers=("other",)), shown)
    assert not missing_only_routers(a_subject(*aims, prefills=("q",)), shown), "who computes prompts is another one"
    assert not missing_only_routers(a_subject(*aims, an_aim("c"), routers=("other",)), shown)
    assert not missing_only_routers(a_subject(an_aim("a", restarts=1), aims[1], routers=("other",)), shown)
    assert not missing_only_routers(a_subject(*aims), ProbeEvidence())


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
    assert msgspec.structs.replace(subject, doors=("10.0.0.1",)).digest == subject.digest
    assert subject.digest == a_subject(an_aim("a")).digest
