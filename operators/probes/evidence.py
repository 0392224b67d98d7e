"""Probe evidence: records the results of probes, and decides which further probes a deployment needs to be Ready.

Pure.

Rules:

1. Every answering worker (one that is no prefill worker) has to answer one probe that names this worker. If the deployment has prefill
   workers and the KV path `direct`, one prefill worker has to compute the prompt of a decode worker's probe. Whether the decode worker
   then loaded the prompt's blocks from the prefill worker decides the condition KVPathReady, but not whether the deployment is Ready.
2. A pod whose container has restarted counts as another pod. So does a pod that a StatefulSet has created again with
   the same name. If the routers or the prefill workers have changed since the last answer, one worker of each role of answering workers
   is probed again.
3. The status of the deployment keeps the evidence as a digest of the pods. As long as the pods stay the same, no
   further probe is sent, not even by the next leader. There is one exception: decode workers that computed the prompt of
   a probe themselves (`ProbeEvidence.unhanded`) are probed again.
4. There are two kinds of failed probes: a busy router rejected the probe (`ProbeFailure.busy`), or anything else went
   wrong. A single failure may only mean that the Service does not know its pods yet. So a failure is reported only after
   two failures of the same kind in a row. The report stays until a probe is answered, until there are two failures of
   the other kind in a row, or until a pod of the deployment changes.
5. If a router demands an API key that the operator does not have, it is unknown whether the deployment serves. So the
   status reports Unknown, and not that the deployment fails.
6. If a busy router rejects a probe, the status does not report that the deployment fails either, because the router
   works. If all workers have already answered through other routers, the deployment counts as serving. A worker that has
   never answered still needs a probe.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct

TOLD_AFTER = 2
"""A failure is reported after this number of failures of the same kind in a row (rule 4)."""

HALF = 8
"""Number of characters of each half of a digest. The first half covers the workers behind the routers, and the second
half the routers."""


class RunningPod(Struct, frozen=True, order=True):
    """Identifies one run of a pod's containers, by the uid of the pod and the number of restarts."""

    pod: str
    restarts: int = 0
    uid: str = ""


class ProbeTarget(Struct, frozen=True, order=True):
    """Describes one probe that a worker has to answer, with or without a prefill worker."""

    role: str
    worker: RunningPod
    """The worker that has to answer."""

    pair: bool = False
    """True if a prefill worker has to compute the prompt of the probe."""


class ProbeSubject(Struct, frozen=True, kw_only=True):
    """Describes what is probed: the routers, the prefill workers and the answering workers of one deployment."""

    service: str
    """Name of the Service through which clients reach the routers."""

    model: str
    routers: tuple[RunningPod, ...]
    prefills: tuple[RunningPod, ...]
    targets: tuple[ProbeTarget, ...]
    tls: bool = False
    """True if the routers speak TLS to clients. Digests do not cover this field, because its change replaces the router
    pods, which the digests cover."""

    wants_vector: bool = False
    """True if probes ask for a vector, because the model does not generate."""

    addresses: tuple[str, ...] = ()
    """IP addresses of the routers, to which probes with an API key are sent. Digests do not cover them, because a
    router stays the same router if its address changes."""

    @property
    def around(self) -> str:
        """Digest of the model's name, the routers and the prefill workers. It does not cover the answering workers."""
        return _digest([self.model, self.routers, self.prefills])

    @property
    def pools(self) -> str:
        """Digest of the model's name and the prefill workers, without the routers."""
        return _digest([self.model, self.prefills])

    @property
    def behind(self) -> str:
        """Digest of the model's name and all prefill and answering workers. It is the first half of `digest`."""
        return _digest([self.model, self.prefills, self.targets])[:HALF]

    @property
    def digest(self) -> str:
        return self.behind + _digest(self.routers)[:HALF]


class Probe(Struct, frozen=True, kw_only=True):
    """Describes one request that the operator sends to find out whether a worker answers."""

    namespace: str
    deployment: str
    service: str
    """Name of the Service through which clients reach the routers."""

    model: str
    worker: str
    pair: bool
    tls: bool = False
    """True if the routers speak TLS to clients."""

    wants_vector: bool = False
    """True if the probe asks for a vector, because the model does not generate."""

    router_address: str = ""
    """IP address of the router that gets the probe if routers demand an API key; empty: no address is known."""


class ProbeCompletion(Struct, frozen=True):
    """Holds the result of a probe that was answered by a completion or a vector."""

    handed: bool | None = None
    """True if the answering worker loaded the prompt's blocks from a prefill worker, and False if it computed them itself.
    None if this is unknown, or if no prefill worker had to take part."""


class ProbeFailure(Struct, frozen=True):
    """Describes the failure of a probe that was not answered by a completion or a vector."""

    status: int
    """HTTP status of the answer, or 0 if there was no answer."""

    text: str
    """A short description without secrets, which conditions may show."""

    wants_key: bool = False
    key_withheld: bool = False
    """True if the operator has a key that the routers want, but must not send it in the clear."""

    busy: bool = False
    """True if a router rejected the probe because its queue is full or a rate limit was reached."""

    def __str__(self) -> str:
        return f"{self.status} {self.text}" if self.status else self.text


class ProbeEvidence(Struct, frozen=True, kw_only=True):
    """Holds the results of the probes of one deployment."""

    through: frozenset[tuple[str, str, str]] = frozenset()
    """One entry for each role that has a worker which has answered: the name of the role, and the digests
    `ProbeSubject.around` and `ProbeSubject.pools` at the last answer."""

    answered: frozenset[ProbeTarget] = frozenset()
    unhanded: frozenset[ProbeTarget] = frozenset()
    """Targets that have answered, but computed the prompt themselves instead of taking its blocks from a prefill
    worker."""

    unclear: frozenset[ProbeTarget] = frozenset()
    """Targets that have answered, and for which it is unknown whether they loaded the prompt's blocks from a prefill
    worker."""

    failure: ProbeFailure | None = None
    """The failure of the last probe, or None if it was answered or no probe was sent yet."""

    about: str = ""
    """Digest of the probed pods (`ProbeSubject.digest`) at the last failure."""

    failures: int = 0
    """The number of failures of the same kind in a row, up to the last failure (rule 4)."""

    reported: ProbeFailure | None = None
    """The failure that the status reports, or None if it reports none."""

    failed: str = ""
    """Name of the pod of the worker in the reported failure."""


class PendingProbes(Struct, frozen=True):
    """Describes the probes that a deployment may need: the pods to probe, and the evidence so far.

    If the evidence is complete, no probe is sent.
    """

    subject: ProbeSubject
    evidence: ProbeEvidence


def unanswered(subject: ProbeSubject, evidence: ProbeEvidence) -> tuple[ProbeTarget, ...]:
    """Return the targets that must still answer before the deployment is Ready."""
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
    """Return True if no answers to probes are missing, or only answers through the present routers.

    In both cases, all workers have answered through some router, and a worker of each role has answered since the
    prefill workers last changed.
    """
    before = {(role, pools) for role, _, pools in evidence.through}
    return all(
        target in evidence.answered and (target.role, subject.pools) in before
        for target in unanswered(subject, evidence)
    )


def wanted(subject: ProbeSubject, evidence: ProbeEvidence) -> tuple[ProbeTarget, ...]:
    """Return the targets to probe: first targets that have not answered, then targets that computed the prompt themselves."""
    missing = unanswered(subject, evidence)
    return missing + tuple(
        target for target in subject.targets if target in evidence.unhanded and target not in missing
    )


def answered(
    evidence: ProbeEvidence, subject: ProbeSubject, target: ProbeTarget, answer: ProbeCompletion
) -> ProbeEvidence:
    """Return the evidence with the answer of a target added, and without the earlier failures."""
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
    """Return the evidence with a failed probe added; earlier answers still count."""
    alike = evidence.failure is not None and evidence.failure.busy == failure.busy
    failures = evidence.failures + 1 if alike else 1
    evidence = msgspec.structs.replace(evidence, failure=failure, failures=failures, about=subject.digest)
    if failures < TOLD_AFTER:
        return evidence
    return msgspec.structs.replace(evidence, reported=failure, failed=target.worker.pod)


def kept(subject: ProbeSubject, evidence: ProbeEvidence) -> ProbeEvidence:
    """Return the part of the evidence that still counts for the present pods.

    An answer counts if the pod that gave it still exists. A failure counts only if no pod has changed since the
    failure.
    """
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
    """Return the evidence that an earlier leader has written into the status, or None if it is about other workers.

    If only the routers have changed since then, a worker of each role still has to answer again.

    Args:
        subject: The pods that are probed now.
        proved: The digest in the status.
        handed: Status of the condition KVPathReady: "True", "False" or "Unknown".
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
