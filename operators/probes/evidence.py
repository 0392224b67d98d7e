"""Probe evidence: a deployment is Ready when probes have shown that its workers answer through its routers. Pure.

Rules:

1. Every worker that answers requests has to answer one that names it. If prefill workers compute prompts, one of them
   computes the probe's prompt, and the answering worker has to report that it took the blocks over.
2. A pod whose container has restarted counts as another pod, and so does a recreated pod with the same name, as
   StatefulSets make it. If routers or prefill workers differ from those at the last answer, one worker of each
   answering role is probed again.
3. Evidence is kept in the status as a digest of the pods. While they stay the same nothing is sent, not by the next
   leader either.
4. One failure may come from a Service that does not know its pods yet. The second failure of its kind in a row is
   reported, until there is an answer, or two failures of the other kind in a row.
5. A router that demands an API key which the operator does not have has shown nothing: the result is unknown, not a
   failure.
6. A router that rejects a probe like any other request, because it has no room (`ProbeFailure.busy`), is no failure
   either: it lives, and is busy with other requests. If all workers have answered before behind other routers, that is
   enough; for a worker that never has, it shows nothing.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct

TOLD_AFTER = 2
"""Failures in a row before one is reported."""

HALF = 8
"""Characters of each half of a digest: the pods behind the routers, and the routers."""


class RunningPod(Struct, frozen=True, order=True):
    """A pod and the number of its containers' restarts. A pod's name may be used again, its uid is not."""

    pod: str
    restarts: int = 0
    uid: str = ""


class ProbeTarget(Struct, frozen=True, order=True):
    """One request that has to be answered."""

    role: str
    worker: RunningPod
    """The worker that has to answer."""

    pair: bool = False
    """True if a prefill worker has to compute the prompt."""


class ProbeSubject(Struct, frozen=True, kw_only=True):
    """The pods through which requests pass."""

    service: str
    """The routers' Service for clients."""

    model: str
    routers: tuple[RunningPod, ...]
    prefills: tuple[RunningPod, ...]
    targets: tuple[ProbeTarget, ...]
    addresses: tuple[str, ...] = ()
    """IP addresses of the routers, to which an API key is sent. They are in no digest, because a router at another address
    is the same router."""

    @property
    def around(self) -> str:
        """Digest of the routers and prefill workers before the answering workers."""
        return _digest([self.model, self.routers, self.prefills])

    @property
    def pools(self) -> str:
        """The same digest without the routers."""
        return _digest([self.model, self.prefills])

    @property
    def behind(self) -> str:
        """Digest of everything behind the routers; the whole digest begins with it."""
        return _digest([self.model, self.prefills, self.targets])[:HALF]

    @property
    def digest(self) -> str:
        return self.behind + _digest(self.routers)[:HALF]


class Probe(Struct, frozen=True, kw_only=True):
    """One request."""

    namespace: str
    deployment: str
    service: str
    """The routers' Service for clients."""

    model: str
    worker: str
    pair: bool
    router_address: str = ""
    """IP address of a router; empty: none is known."""


class ProbeCompletion(Struct, frozen=True):
    """The completion that a probe got."""

    handed: bool | None = None
    """True if the prompt's blocks came from another worker; None: unknown, or not demanded."""


class ProbeFailure(Struct, frozen=True):
    """The failure of a probe that got no completion."""

    status: int
    """HTTP status; 0: no answer."""

    text: str
    """A short text that is safe for conditions: no secrets."""

    wants_key: bool = False
    busy: bool = False
    """True if a router rejected the probe because it has no room, or because the sender has reached its limit."""

    def __str__(self) -> str:
        return f"{self.status} {self.text}" if self.status else self.text


class ProbeEvidence(Struct, frozen=True, kw_only=True):
    """Evidence from the probes of one deployment."""

    through: frozenset[tuple[str, str, str]] = frozenset()
    """Roles with the digests (`ProbeSubject.around`, `ProbeSubject.pools`) at their last answers."""

    answered: frozenset[ProbeTarget] = frozenset()
    unhanded: frozenset[ProbeTarget] = frozenset()
    """Answered targets that computed a prompt which they should have taken over."""

    unclear: frozenset[ProbeTarget] = frozenset()
    """Answered targets for which that is unknown."""

    failure: ProbeFailure | None = None
    """The failure of the last probe."""

    about: str = ""
    """Digest of the subject of the failure."""

    failures: int = 0
    """The number of failures of this kind, busy or not, in a row."""

    reported: ProbeFailure | None = None
    """The failure to report."""

    failed: str = ""
    """The worker that failed."""


class PendingProbes(Struct, frozen=True):
    """The probes that are needed, and what is known already; none is sent if everything is known."""

    subject: ProbeSubject
    evidence: ProbeEvidence


def unanswered(subject: ProbeSubject, evidence: ProbeEvidence) -> tuple[ProbeTarget, ...]:
    """Return the targets that must still answer before the deployment is Ready, in the order of the subject."""
    found: dict[str, list[ProbeTarget]] = {}
    for target in subject.targets:
        asked = found.setdefault(target.role, [])
        if target not in evidence.answered:
            asked.append(target)
    around = subject.around
    for target in subject.targets:
        if not found[target.role] and (target.role, around, subject.pools) not in evidence.through:
            found[target.role].append(target)
    return tuple(target for role in found.values() for target in role)


def missing_only_routers(subject: ProbeSubject, evidence: ProbeEvidence) -> bool:
    """Return whether only an answer through these routers is missing; the workers have answered before."""
    before = {(role, pools) for role, _, pools in evidence.through}
    return all(
        target in evidence.answered and (target.role, subject.pools) in before
        for target in unanswered(subject, evidence)
    )


def wanted(subject: ProbeSubject, evidence: ProbeEvidence) -> tuple[ProbeTarget, ...]:
    """Return the targets to probe, in order: those that have not answered, and those that did not take blocks over."""
    missing = unanswered(subject, evidence)
    return missing + tuple(
        target for target in subject.targets if target in evidence.unhanded and target not in missing
    )


def answered(
    evidence: ProbeEvidence, subject: ProbeSubject, target: ProbeTarget, answer: ProbeCompletion
) -> ProbeEvidence:
    """Return the evidence after an answer."""
    others = {each for each in evidence.through if each[0] != target.role}
    through = others | {(target.role, subject.around, subject.pools)}
    unhanded, unclear = evidence.unhanded - {target}, evidence.unclear - {target}
    if target.pair and answer.handed is False:
        unhanded |= {target}
    if target.pair and answer.handed is None:
        unclear |= {target}
    return ProbeEvidence(
        through=frozenset(through), answered=evidence.answered | {target}, unhanded=unhanded, unclear=unclear
    )


def failed(evidence: ProbeEvidence, subject: ProbeSubject, target: ProbeTarget, failure: ProbeFailure) -> ProbeEvidence:
    """Return the evidence after a failure; earlier evidence stays."""
    alike = evidence.failure is not None and evidence.failure.busy == failure.busy
    failures = evidence.failures + 1 if alike else 1
    evidence = msgspec.structs.replace(evidence, failure=failure, failures=failures, about=subject.digest)
    if failures < TOLD_AFTER:
        return evidence
    return msgspec.structs.replace(evidence, reported=failure, failed=target.worker.pod)


def kept(subject: ProbeSubject, evidence: ProbeEvidence) -> ProbeEvidence:
    """Return the evidence that still counts: answers of pods that exist, and failures of exactly these pods."""
    if evidence.failure is not None and evidence.about != subject.digest:
        evidence = msgspec.structs.replace(evidence, failure=None, about="", failures=0, reported=None, failed="")
    there = frozenset(subject.targets)
    if evidence.answered <= there:
        return evidence
    return msgspec.structs.replace(
        evidence,
        answered=evidence.answered & there,
        unhanded=evidence.unhanded & there,
        unclear=evidence.unclear & there,
    )


def evidence_from_status(subject: ProbeSubject, proved: str, handed: str) -> ProbeEvidence | None:
    """Return the evidence of whoever wrote the status; None: the status has no evidence for this subject.

    Args:
        subject: The subject of the probes.
        proved: The digest in the status.
        handed: Status of the condition KVPathReady.
    """
    if not proved.startswith(subject.behind):
        return None
    around = subject.around if proved == subject.digest else ""
    pairs = frozenset(target for target in subject.targets if target.pair)
    return ProbeEvidence(
        through=frozenset((target.role, around, subject.pools) for target in subject.targets),
        answered=frozenset(subject.targets),
        unhanded=pairs if handed == "False" else frozenset(),
        unclear=pairs if handed == "Unknown" else frozenset(),
    )


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]
