"""Prober: decides when deployments are probed, and limits how many probes run at the same time.

`operators.probes.http_probes` sends the requests.

Rules:

1. At most one probe of a deployment runs at a time, and at most `at_once` probes of all deployments. At most half of
   these probes, but at least one, may be for deployments whose last probe failed. A probe of such a deployment may run
   until its time limit, and without this rule it could make other deployments wait. No reconcile waits for a probe.
2. A probe is repeated if it failed, or if the worker computed the prompt itself although it should have loaded the
   blocks from a prefill worker. Before the repetition, the prober sends no probe to the deployment for a pause of
   FIRST_PAUSE_SECONDS at first. The pause doubles with each repetition, up to `longest_seconds`. It is reset to the shortest
   pause after a probe that need not be repeated, and when the pods of the deployment change.
3. Only the leader sends probes.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import Never, Protocol

from operators.keys import ReconcileKey
from operators.probes import evidence as probing
from operators.probes.evidence import (
    PendingProbes,
    Probe,
    ProbeCompletion,
    ProbeEvidence,
    ProbeFailure,
    ProbeSubject,
    ProbeTarget,
)

FIRST_PAUSE_SECONDS = 0.5


class ProbeSender(Protocol):
    """Port that sends probes to the routers of deployments over HTTP, as clients do."""

    async def ask(self, probe: Probe) -> ProbeCompletion | ProbeFailure:
        """Send a probe, and return the completion or the failure.

        The call ends within a time limit, and raises no errors.
        """
        ...


class Prober:
    def __init__(
        self,
        clients: ProbeSender,
        at_once: int,
        longest_seconds: float,
        leads: Callable[[], bool],
        on_change: Callable[[ReconcileKey], None],
    ) -> None:
        """Create the prober.

        `on_change` is called with the key of a deployment when the reported failure has changed, and after each probe that
        leaves no target unanswered.
        """
        self._clients = clients
        self._longest_seconds = longest_seconds
        self._leads = leads
        self._on_change = on_change
        self._asking = asyncio.Semaphore(at_once)
        self._asking_again = asyncio.Semaphore(max(1, at_once // 2))
        self._shown: dict[ReconcileKey, ProbeEvidence] = {}
        self._subjects: dict[ReconcileKey, ProbeSubject] = {}
        self._tasks: dict[ReconcileKey, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    def of(self, key: ReconcileKey) -> ProbeEvidence:
        """Return the evidence about a deployment; it is empty before the first probe."""
        return self._shown.get(key, ProbeEvidence())

    def want(self, key: ReconcileKey, wanted: PendingProbes | None) -> None:
        """Start to send the probes that a deployment needs, or stop probing the deployment if `wanted` is None."""
        if wanted is None:
            self._end(key)
            return
        if self._subjects.get(key) == wanted.subject:
            return  # the probes of these pods run already, or have ended
        self._end(key)
        self._subjects[key] = wanted.subject
        self._shown[key] = wanted.evidence
        self._begin(key, wanted.subject)

    def forget(self, key: ReconcileKey) -> None:
        self._end(key)
        self._shown.pop(key, None)

    async def run(self) -> Never:
        """Send probes until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for key, subject in self._subjects.items():
                self._begin(key, subject)
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._group = None
        raise AssertionError("the wait has no end")

    def _begin(self, key: ReconcileKey, subject: ProbeSubject) -> None:
        if self._group is not None and probing.wanted(subject, self.of(key)):
            self._tasks[key] = self._group.create_task(self._show(key, subject))

    def _end(self, key: ReconcileKey) -> None:
        self._subjects.pop(key, None)
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    async def _show(self, key: ReconcileKey, subject: ProbeSubject) -> None:
        shortest = min(FIRST_PAUSE_SECONDS, self._longest_seconds)
        pause, asked = shortest, 0
        while targets := probing.wanted(subject, self.of(key)):
            async with self._asking_again if self.of(key).failures else nullcontext(), self._asking:
                if not self._leads():
                    # This process does not lead any more, so it stops; the next leader sends its own probes.
                    self._subjects.pop(key, None)
                    return
                answer = await self._clients.ask(_probe(key, subject, targets[0], asked))
            asked += 1
            if self._learn(key, subject, targets[0], answer):
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._longest_seconds)
            else:
                pause = shortest

    def _learn(
        self, key: ReconcileKey, subject: ProbeSubject, target: ProbeTarget, answer: ProbeCompletion | ProbeFailure
    ) -> bool:
        """Add the result of a probe to the evidence.

        Return True if the probe has to be repeated after a pause.
        """
        before = self.of(key)
        if isinstance(answer, ProbeFailure):
            after = probing.failed(before, subject, target, answer)
        else:
            after = probing.answered(before, subject, target, answer)
        self._shown[key] = after
        if after.reported != before.reported or not probing.unanswered(subject, after):
            self._on_change(key)
        return isinstance(answer, ProbeFailure) or target in after.unhanded


def _probe(key: ReconcileKey, subject: ProbeSubject, target: ProbeTarget, number: int) -> Probe:
    """Return the next probe.

    `number` is the number of earlier probes; it selects the router, so that the routers take turns.
    """
    return Probe(
        namespace=key.namespace,
        deployment=key.name,
        service=subject.service,
        model=subject.model,
        worker=target.worker.pod,
        pair=target.pair,
        tls=subject.tls,
        wants_vector=subject.wants_vector,
        router_address=subject.addresses[number % len(subject.addresses)] if subject.addresses else "",
    )
