"""Attempts: which part of a request runs on which worker, from the beginning of an attempt to its end or loss.

Rules:

1. A request has one attempt at a time. Each attempt has an id that is used once: late messages of an attempt that was given up find
   nothing, and a client may reuse the id of a request that has ended.
2. A prompt may wait in the prefill queue of its worker (`fleet.router.queueing.prefill_queues`). Its attempt has then begun, but the
   worker has not been sent anything.
3. What follows the loss of a worker, such as another attempt elsewhere, is decided in `fleet.router.machine` (its rule 4).
"""

from collections.abc import Mapping

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.roles import Phase
from fleet.core.work import Handoff, Start
from fleet.router.messages import CancelAttempt, Command, Dispatch, attempt_id
from fleet.router.placement.decision import Decision
from fleet.router.queueing.admission_queue import queue_position
from fleet.router.queueing.prefill_queues import PrefillQueues, PrefillRate
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import Attempt, LiveRequest

_PREFILL, _DECODE = Phase.PREFILL, Phase.DECODE  # module variables are ten times as fast as enum attributes


class Attempts:
    """All attempts of one router."""

    def __init__(self, settings: RouterSettings):
        self.settings = settings
        self._queues = PrefillQueues(settings.prefill_window_tokens)
        self._attempts: dict[RequestId, Attempt] = {}
        self._rates: dict[WorkerId, PrefillRate] = {}  # by worker that was sent a prompt
        self._begun = 0
        self.opened = self._queues.opened  # `move` may send something while it is not empty
        self.get = self._attempts.get
        """Return the attempt with this id, or None."""

    @property
    def waiting(self) -> int:
        """The number of prompts in prefill queues."""
        return len(self._queues)

    def begin(
        self,
        live: LiveRequest,
        worker_id: WorkerId,
        phase: Phase,
        now: Nanos,
        out: list[Command],
        *,
        handoff: Handoff | None = None,
    ) -> None:
        """Begin an attempt of a request on a worker; it is sent now or as soon as the prefill queue allows."""
        self._begun += 1
        attempt = Attempt(id=attempt_id(live.id, self._begun), request_id=live.id, worker_id=worker_id, phase=phase)
        live.attempt = attempt
        self._attempts[attempt.id] = attempt
        if phase is _DECODE or self._goes_at_once(live, worker_id, now):
            self._send(live, attempt, now, out, handoff)

    def computed(self, live: LiveRequest, now: Nanos) -> None:
        """Note that a prompt is computed, so the next one in the worker's prefill queue may go."""
        if (tokens := self._queues.leave(live.id)) and live.attempt is not None:
            self._rates[live.attempt.worker_id].computed(tokens, now)
            self._note_idle(live.attempt.worker_id)

    def _note_idle(self, worker_id: WorkerId) -> None:
        """Stop the worker's prefill clock if it has nothing more to compute."""
        if not self._queues.sent_tokens(worker_id):
            self._rates[worker_id].idle()

    def seconds_to_wait(self, live: LiveRequest, placed: Decision, now: Nanos) -> float | None:
        """Return about how long a prompt would wait for the chosen worker to compute it.

        The result is None if the prompt would not wait in the prefill queue, or if too little was measured.
        """
        worker_id = placed.prefill or placed.decode
        if live.arrived.external or not self._queues.full(worker_id):
            return None
        held = self._queues.held_tokens(worker_id, live.arrived.priority)
        return self._rates[worker_id].seconds_to_wait(self._queues.sent_tokens(worker_id), held, now)

    def forget(self, worker_id: WorkerId) -> None:
        """Forget the prefill rate of a worker that has left."""
        self._rates.pop(worker_id, None)

    def stop(self, live: LiveRequest, out: list[Command]) -> None:
        """Cancel the attempt on its worker, if the worker was sent it."""
        if live.attempt is not None and not self._queues.holds(live.id):
            out.append(CancelAttempt(worker_id=live.attempt.worker_id, request_id=live.attempt.id))

    def end(self, live: LiveRequest) -> None:
        """End the attempt of a request; nothing happens if it has none."""
        if live.attempt is not None:
            if self._queues.leave(live.id) and live.attempt.worker_id in self._rates:
                self._note_idle(live.attempt.worker_id)
            del self._attempts[live.attempt.id]
            live.attempt = None

    def move(self, requests: Mapping[RequestId, LiveRequest], now: Nanos, out: list[Command]) -> None:
        """Send the prompts that their workers are about to compute.

        Args:
            requests: All live requests.
            now: The instant.
            out: The list that gets the commands.
        """
        while (request_id := self._queues.next()) is not None:
            live = requests[request_id]
            assert live.attempt is not None
            self._rates[live.attempt.worker_id].busy(now)
            self._send(live, live.attempt, now, out)

    def _goes_at_once(self, live: LiveRequest, worker_id: WorkerId, now: Nanos) -> bool:
        """Return whether a prompt is sent to its worker now; else `move` sends it later."""
        arrived, settings = live.arrived, self.settings
        if arrived.only_end or arrived.external:
            return True  # the router may never hear when this prompt is computed
        assert live.placed is not None
        tokens = live.placed.prefill_tokens
        if self._queues.enter(live.id, worker_id, tokens):
            if tokens and settings.prefill_window_tokens:
                if (rate := self._rates.get(worker_id)) is None:
                    rate = self._rates[worker_id] = PrefillRate()
                rate.busy(now)
            return True
        place = queue_position(
            live.since,
            arrived.priority,
            tokens,
            priority_seconds=settings.priority_seconds,
            size_seconds=settings.prefill_size_seconds,
        )
        self._queues.wait(live.id, worker_id, tokens, rank=place, seq=live.seq, priority=arrived.priority)
        return False

    def _send(
        self, live: LiveRequest, attempt: Attempt, now: Nanos, out: list[Command], handoff: Handoff | None = None
    ) -> None:
        if not live.sent_at:
            live.sent_at = now or Nanos(1)
        arrived, phase, placed = live.arrived, attempt.phase, live.placed
        assert placed is not None
        prefills = phase is _PREFILL
        start = Start(
            request_id=attempt.id,
            phase=phase,
            tokens=live.prompt,
            sampling=live.sampling(max_tokens=1 if prefills else live.remaining_tokens),
            salt=arrived.salt,
            handoff=handoff,
            kv_path=placed.kv_path if prefills else None,
            priority=arrived.priority,
            timeout_ms=0 if arrived.deadline is None else max(1, (arrived.deadline - now) // MILLISECOND),
            session=arrived.session,
            adapter="" if arrived.adapter is None else arrived.adapter.name,
            parsing=arrived.parsing,
            generated_tokens=len(live.sent),
        )
        out.append(Dispatch(worker_id=attempt.worker_id, start=start))

    def check(self, requests: Mapping[RequestId, LiveRequest]) -> None:
        """Assert that these requests have exactly these attempts, and that no prompt waits without a cause."""
        self._queues.check()
        assert {
            live.attempt.id: live.attempt for live in requests.values() if live.attempt is not None
        } == self._attempts
