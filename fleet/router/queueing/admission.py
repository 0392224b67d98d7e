"""Requests that cannot be placed now: who may wait, where, and how long that would take.

Rules:

1. A request that would wait longer than settings allow, or than its deadline, is better refused at once than after it has waited in
   vain. How long that is follows from the pace at which others have left (`fleet.router.queueing.admission_queue`).
2. When more wait than may, the last of the tenant that has most waiting goes. Who was admitted before, and lost its worker, stays.
3. Who is refused for want of room is told when a retry may find some: about when all who wait now have left.
"""

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.router.messages import Arrived
from fleet.router.queueing.admission_queue import AdmissionQueue, QueuedRequest, rank
from fleet.router.queueing.wait_groups import BusyWorkers
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import LiveRequest

MAX_RETRY_AFTER_MS = 60_000  # of a hint; what is known of the load is too old by then


class QueueAdmission:
    """The queues of one router, and the way into them."""

    def __init__(self, settings: RouterSettings):
        """Nobody waits.

        Args:
            settings: The router's.
        """
        self.settings = settings
        self.queue = AdmissionQueue({name: tenant.weight for name, tenant in settings.tenants.items()})

    def enqueue(self, live: LiveRequest, now: Nanos, busy: BusyWorkers) -> None:
        """It waits from now on; where it stands is by its arrival, so one that comes back goes before all newer ones.

        Args:
            live: The request.
            now: The instant.
            busy: For whom it waits, as far as that is known.
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
        """Return about how long a request would wait in the queue; None if nobody can say."""
        return self.queue.seconds_to_wait(live.arrived.model, live.arrived.tenant, now, self._rank(live))

    def too_long(self, live: LiveRequest, seconds: float | None, now: Nanos) -> str | None:
        """Say why a request that would wait so long is better refused at once (rule 1); None: it is not."""
        arrived = live.arrived
        if seconds is None:
            return None
        if seconds > self.settings.max_queue_seconds:
            return f"it would wait about {seconds:.0f} s for a worker, longer than this router lets requests wait"
        if arrived.deadline is not None and now + seconds * SECOND > arrived.deadline:
            return f"it would wait about {seconds:.0f} s for a worker, past its deadline"
        return None

    def too_many(self) -> RequestId | None:
        """Who has to go (rule 2); None: nobody."""
        return self.queue.request_to_drop() if len(self.queue) > self.settings.max_queued else None

    def retry_after_ms(self, arrived: Arrived, now: Nanos) -> int:
        """When a retry may find room (rule 3)."""
        seconds = self.queue.seconds_to_wait(arrived.model, arrived.tenant, now)
        return self.settings.retry_after_ms if seconds is None else self.hint_ms(seconds)

    def hint_ms(self, seconds: float) -> int:
        """Return the hint to whom would have to wait so long."""
        return round(min(max(self.settings.retry_after_ms, seconds * 1000), MAX_RETRY_AFTER_MS))
