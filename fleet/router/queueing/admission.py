"""Admission: which requests may wait when no worker has room, in which position, and for how long.

Rules:

1. A request that would wait longer than the settings or its deadline allow is rejected at once; that is better than a rejection after
   a wait. The predicted wait follows from the rate at which other requests have left the queue (`admission_queue`, rule 5).
2. If more requests wait than allowed, the last request of the tenant with the largest backlog is rejected. A request that was admitted
   before and lost its worker stays.
3. A request that is rejected for want of room gets a retry hint: about the time in which all queued requests will have left.
"""

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.messages import Arrived
from fleet.router.queueing.admission_queue import AdmissionQueue, QueuedRequest, rank
from fleet.router.queueing.wait_groups import BusyWorkers
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest

MAX_RETRY_AFTER_MS = 60_000  # longest retry hint; today's load says little about later


class QueueAdmission:
    """The admission queue of one router and the rules for entering it."""

    def __init__(self, settings: RouterSettings):
        self.settings = settings
        self.queue = AdmissionQueue({name: tenant.weight for name, tenant in settings.tenants.items()})

    def enqueue(self, live: LiveRequest, now: Nanos, busy: BusyWorkers) -> None:
        """Add a request to the queue. Its position depends on its arrival, so a request that returns goes before all newer ones.

        Args:
            live: The request.
            now: The instant.
            busy: The workers that it waits for, if they are known.
        """
        arrived, prompt_tokens = live.arrived, live.prompt_tokens
        waiting = QueuedRequest(
            request_id=live.id,
            model=arrived.model,
            tenant=arrived.tenant,
            rank=self._rank(live),
            seq=live.seq,
            tokens=prompt_tokens,
            whole_tokens=prompt_tokens + live.remaining_tokens,
            wait_key=live.wait_key(),
            session=live.session_key if arrived.session and self.settings.session_affinity == "hard" else None,
            stays=live.failures > 0,
        )
        self.queue.add(waiting, now, busy)

    def _rank(self, live: LiveRequest) -> int:
        settings = self.settings
        return rank(
            live.since,
            live.arrived.priority,
            live.prompt_tokens,
            priority_seconds=settings.priority_seconds,
            size_seconds=settings.size_seconds,
        )

    def seconds_to_wait(self, live: LiveRequest, now: Nanos) -> float | None:
        """Return about how long a request would wait in the queue; None if too little was measured."""
        return self.queue.seconds_to_wait(live.arrived.model, live.arrived.tenant, now, self._rank(live))

    def too_long(self, live: LiveRequest, seconds: float | None, now: Nanos) -> str | None:
        """Return why a request with this wait should be rejected at once (rule 1); None if it should not."""
        arrived = live.arrived
        if seconds is None:
            return None
        if seconds > self.settings.max_queue_seconds:
            return f"it would wait about {seconds:.0f} s for a worker, longer than this router lets requests wait"
        if arrived.deadline is not None and now + seconds * SECOND > arrived.deadline:
            return f"it would wait about {seconds:.0f} s for a worker, past its deadline"
        return None

    def too_many(self) -> RequestId | None:
        """Return the request that has to go (rule 2), or None."""
        return self.queue.request_to_drop() if len(self.queue) > self.settings.max_queued else None

    def retry_after_ms(self, arrived: Arrived, now: Nanos) -> int:
        """Return the retry hint for a request (rule 3)."""
        seconds = self.queue.seconds_to_wait(arrived.model, arrived.tenant, now)
        return self.settings.retry_after_ms if seconds is None else self.hint_ms(seconds)

    def hint_ms(self, seconds: float) -> int:
        """Return the retry hint for a predicted wait."""
        return round(min(max(self.settings.retry_after_ms, seconds * 1000), MAX_RETRY_AFTER_MS))
