"""Pieces of work: what of a request is on which worker, from its beginning there until its end or loss.

Rules:

1. A request has one piece of work at a time. Each has an id of its own, used once: what arrives late for one that was given up finds
   nothing, and a client may use the id of a request that has ended.
2. A prompt may wait in its worker's lane (`fleet.router.queueing.prefill_queues`): then its work has begun, and the worker has not heard of it.
"""

from collections.abc import Mapping

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.roles import Phase
from fleet.core.work import Handoff, Start
from fleet.router.messages import CancelAttempt, Command, Dispatch, attempt_id
from fleet.router.placement.decision import Decision
from fleet.router.queueing.admission_queue import rank
from fleet.router.queueing.prefill_queues import PrefillQueues
from fleet.router.queueing.prefill_rate import PrefillRate
from fleet.router.settings.router import RouterSettings
from fleet.router.state.live_requests import Attempt, LiveRequest

_PREFILL, _DECODE = Phase.PREFILL, Phase.DECODE  # looked up in the enum they take ten times as long


class Attempts:
    """Those of one router."""

    def __init__(self, settings: RouterSettings):
        """Nothing is under way.

        Args:
            settings: The router's.
        """
        self.settings = settings
        self._queues = PrefillQueues(settings.prefill_window_tokens)
        self._attempts: dict[RequestId, Attempt] = {}
        self._rates: dict[WorkerId, PrefillRate] = {}  # of workers that were sent something to compute
        self._begun = 0
        self.get = self._attempts.get
        """The piece of work of this id, if it is under way."""

    @property
    def waiting(self) -> int:
        """Prompts in lanes."""
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
        """A worker works for a request from now on, or as soon as its lane allows."""
        self._begun += 1
        attempt = Attempt(id=attempt_id(live.id, self._begun), request_id=live.id, worker_id=worker_id, phase=phase)
        live.attempt = attempt
        self._attempts[attempt.id] = attempt
        if phase is _DECODE or self._goes_at_once(live, worker_id, now):
            self._send(live, attempt, now, out, handoff)

    def computed(self, live: LiveRequest, now: Nanos) -> None:
        """The prompt is: the next one may go where it was."""
        if (tokens := self._queues.leave(live.id)) and live.attempt is not None:
            self._rates[live.attempt.worker_id].computed(tokens, now)
            self._rest(live.attempt.worker_id)

    def _rest(self, worker_id: WorkerId) -> None:
        """Note it if a worker has nothing more to compute."""
        if not self._queues.sent_tokens(worker_id):
            self._rates[worker_id].idle()

    def seconds_to_wait(self, live: LiveRequest, placed: Decision, now: Nanos) -> float | None:
        """Return about how long a prompt would wait in the lane of the worker that was chosen, and there until it is its turn.

        None is returned for one that does not have to wait in the lane, and where nobody can say.
        """
        worker_id = placed.prefill or placed.decode
        if live.arrived.external or not self._queues.full(worker_id):
            return None
        held = self._queues.held_tokens(worker_id, live.arrived.priority)
        return self._rates[worker_id].seconds_to_wait(self._queues.sent_tokens(worker_id), held, now)

    def forget(self, worker_id: WorkerId) -> None:
        """Forget the pace of a worker that has left."""
        self._rates.pop(worker_id, None)

    def stop(self, live: LiveRequest, out: list[Command]) -> None:
        """Tell the worker, if it has heard of the work, that nobody wants it any more."""
        if live.attempt is not None and not self._queues.holds(live.id):
            out.append(CancelAttempt(worker_id=live.attempt.worker_id, request_id=live.attempt.id))

    def over(self, live: LiveRequest) -> None:
        """The work of a request is done or lost; nothing happens if it has none."""
        if live.attempt is not None:
            if self._queues.leave(live.id) and live.attempt.worker_id in self._rates:
                self._rest(live.attempt.worker_id)
            del self._attempts[live.attempt.id]
            live.attempt = None

    @property
    def opened(self) -> bool:
        """Whether `move` may send something."""
        return self._queues.opened

    def move(self, requests: Mapping[RequestId, LiveRequest], now: Nanos, out: list[Command]) -> None:
        """Send the prompts that their workers are about to compute.

        Args:
            requests: All that live.
            now: The instant.
            out: Gets the commands.
        """
        while (request_id := self._queues.next()) is not None:
            live = requests[request_id]
            assert live.attempt is not None
            self._rates[live.attempt.worker_id].busy(now)
            self._send(live, live.attempt, now, out)

    def _goes_at_once(self, live: LiveRequest, worker_id: WorkerId, now: Nanos) -> bool:
        """Whether a prompt that was placed on a worker is sent there now, or later by `move`."""
        arrived, settings = live.arrived, self.settings
        if arrived.only_end or arrived.external:
            return True  # nobody may tell when its prompt is computed
        assert live.placed is not None
        tokens = live.placed.prefill_tokens
        if self._queues.enter(live.id, worker_id, tokens):
            if tokens and settings.prefill_window_tokens:
                if (rate := self._rates.get(worker_id)) is None:
                    rate = self._rates[worker_id] = PrefillRate()
                rate.busy(now)
            return True
        place = rank(
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
        )
        out.append(Dispatch(worker_id=attempt.worker_id, start=start))

    def check(self, requests: Mapping[RequestId, LiveRequest]) -> None:
        """Assert that these requests have this work, and that nobody waits in a lane without a cause."""
        self._queues.check()
        assert {
            live.attempt.id: live.attempt for live in requests.values() if live.attempt is not None
        } == self._attempts
