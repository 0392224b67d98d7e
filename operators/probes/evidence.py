"""What has to be shown before a deployment is called Ready: that its workers answer requests that come through its routers. Pure.

Rules:

1. Every worker that answers requests has to have answered one, asked for by name. Where prefill workers compute prompts, one of them
   computes the probe's, and the worker that answers has to say that it took the blocks over.
2. A pod whose container has begun anew is another one, and so is one that was made anew with the same name, as StatefulSets do. When routers or
   prefill workers are others than at the last answer, one worker of each role that answers is asked again.
3. What was shown is kept in the status as a digest of the pods. As long as these are the same nothing is sent, not by the next leader either.
4. One failure may be a Service that has not heard of its pods yet: the second one of its sort in a row is told, and is so until there is an answer, or
   two in a row of the other sort.
5. A router that wants a key which nobody has given has shown nothing: that is not known, and not a failure.
6. Nor is it one when a router lets a probe in no more than anybody else, since it has no room (`ProbeFailure.busy`): such a router lives, and is busy with
   requests of others. Where all workers have answered before, behind other routers, that is enough; of a worker that never has, it says nothing.
"""

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct

TOLD_AFTER = 2
"""Failures in a row."""

HALF = 8
"""Characters of a digest: what is behind the routers, and then the routers."""


class RunningPod(Struct, frozen=True, order=True):
    """A pod, and how often its containers have begun anew. Names of pods may come again, uids do not."""

    pod: str
    restarts: int = 0
    uid: str = ""


class ProbeTarget(Struct, frozen=True, order=True):
    """One request that is to be answered."""

    role: str
    worker: RunningPod
    """That has to answer."""

    pair: bool = False
    """A prefill worker has to compute the prompt."""


class ProbeSubject(Struct, frozen=True, kw_only=True):
    """The pods that requests pass through."""

    service: str
    """Of the routers, for clients."""

    model: str
    routers: tuple[RunningPod, ...]
    prefills: tuple[RunningPod, ...]
    aims: tuple[ProbeTarget, ...]
    doors: tuple[str, ...] = ()
    """IP addresses of the routers: where a key is sent. In no digest: who answers is no other one at another address."""

    @property
    def around(self) -> str:
        """What stands before those who answer."""
        return _digest([self.model, self.routers, self.prefills])

    @property
    def pools(self) -> str:
        """The same without the routers."""
        return _digest([self.model, self.prefills])

    @property
    def behind(self) -> str:
        """All that is behind the routers. The digest begins with it."""
        return _digest([self.model, self.prefills, self.aims])[:HALF]

    @property
    def digest(self) -> str:
        return self.behind + _digest(self.routers)[:HALF]


class Probe(Struct, frozen=True, kw_only=True):
    """One request."""

    namespace: str
    deployment: str
    service: str
    """Of the routers, for clients."""

    model: str
    worker: str
    pair: bool
    door: str = ""
    """IP address of a router; empty: none is known."""


class ProbeCompletion(Struct, frozen=True):
    """A completion."""

    handed: bool | None = None
    """Whether the blocks of the prompt came from another worker; None: that cannot be told, or was not asked for."""


class ProbeFailure(Struct, frozen=True):
    """No completion."""

    status: int
    """Of HTTP; 0: nobody answered."""

    text: str
    """Short, and fit for conditions: no secrets."""

    wants_key: bool = False
    busy: bool = False
    """A router refused it since there is no room, or since whoever asks has had enough of it."""

    def __str__(self) -> str:
        return f"{self.status} {self.text}" if self.status else self.text


class ProbeEvidence(Struct, frozen=True, kw_only=True):
    """What the probes of one deployment have shown so far."""

    through: frozenset[tuple[str, str, str]] = frozenset()
    """Roles, and what stood before them (`ProbeSubject.around`, `ProbeSubject.pools`) at their last answers."""

    answered: frozenset[ProbeTarget] = frozenset()
    unhanded: frozenset[ProbeTarget] = frozenset()
    """Of these: those that computed a prompt which they should have taken over."""

    unclear: frozenset[ProbeTarget] = frozenset()
    """And those of which it cannot be told."""

    failure: ProbeFailure | None = None
    """Of the last probe."""

    about: str = ""
    """Digest of what was to be shown."""

    failures: int = 0
    """Of its sort, busy or not, in a row."""

    told: ProbeFailure | None = None
    """The failure that may be told."""

    failed: str = ""
    """The worker that it is about."""


class PendingProbes(Struct, frozen=True):
    """What is still to be shown, and what is known already; nothing is sent where all is."""

    subject: ProbeSubject
    shown: ProbeEvidence


def unanswered(subject: ProbeSubject, shown: ProbeEvidence) -> tuple[ProbeTarget, ...]:
    """Those without whose answers it is not Ready, in order."""
    found: dict[str, list[ProbeTarget]] = {}
    for aim in subject.aims:
        asked = found.setdefault(aim.role, [])
        if aim not in shown.answered:
            asked.append(aim)
    around = subject.around
    for aim in subject.aims:
        if not found[aim.role] and (aim.role, around, subject.pools) not in shown.through:
            found[aim.role].append(aim)
    return tuple(aim for role in found.values() for aim in role)


def missing_only_routers(subject: ProbeSubject, shown: ProbeEvidence) -> bool:
    """Whether nothing is missing but an answer through these routers: workers, and what computes their prompts, have answered before."""
    before = {(role, pools) for role, _, pools in shown.through}
    return all(aim in shown.answered and (aim.role, subject.pools) in before for aim in unanswered(subject, shown))


def wanted(subject: ProbeSubject, shown: ProbeEvidence) -> tuple[ProbeTarget, ...]:
    """Those to be asked, in order: they have not answered yet, or did without taking blocks over."""
    missing = unanswered(subject, shown)
    return missing + tuple(aim for aim in subject.aims if aim in shown.unhanded and aim not in missing)


def answered(shown: ProbeEvidence, subject: ProbeSubject, aim: ProbeTarget, answer: ProbeCompletion) -> ProbeEvidence:
    """After an answer."""
    others = {each for each in shown.through if each[0] != aim.role}
    through = others | {(aim.role, subject.around, subject.pools)}
    unhanded, unclear = shown.unhanded - {aim}, shown.unclear - {aim}
    if aim.pair and answer.handed is False:
        unhanded |= {aim}
    if aim.pair and answer.handed is None:
        unclear |= {aim}
    return ProbeEvidence(
        through=frozenset(through), answered=shown.answered | {aim}, unhanded=unhanded, unclear=unclear
    )


def failed(shown: ProbeEvidence, subject: ProbeSubject, aim: ProbeTarget, failure: ProbeFailure) -> ProbeEvidence:
    """After a failure: what was shown before stays so."""
    alike = shown.failure is not None and shown.failure.busy == failure.busy
    failures = shown.failures + 1 if alike else 1
    shown = msgspec.structs.replace(shown, failure=failure, failures=failures, about=subject.digest)
    if failures < TOLD_AFTER:
        return shown
    return msgspec.structs.replace(shown, told=failure, failed=aim.worker.pod)


def kept(subject: ProbeSubject, shown: ProbeEvidence) -> ProbeEvidence:
    """What counts of it: answers of pods that are there, and failures of just these."""
    if shown.failure is not None and shown.about != subject.digest:
        shown = msgspec.structs.replace(shown, failure=None, about="", failures=0, told=None, failed="")
    there = frozenset(subject.aims)
    if shown.answered <= there:
        return shown
    return msgspec.structs.replace(
        shown, answered=shown.answered & there, unhanded=shown.unhanded & there, unclear=shown.unclear & there
    )


def evidence_from_status(subject: ProbeSubject, proved: str, handed: str) -> ProbeEvidence | None:
    """What was shown by whoever wrote the status; None: nothing of this.

    Args:
        subject: What is to be shown.
        proved: The digest in the status.
        handed: Status of its condition KVPathReady.
    """
    if not proved.startswith(subject.behind):
        return None
    around = subject.around if proved == subject.digest else ""
    pairs = frozenset(aim for aim in subject.aims if aim.pair)
    return ProbeEvidence(
        through=frozenset((aim.role, around, subject.pools) for aim in subject.aims),
        answered=frozenset(subject.aims),
        unhanded=pairs if handed == "False" else frozenset(),
        unclear=pairs if handed == "Unknown" else frozenset(),
    )


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]
