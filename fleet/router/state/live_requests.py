"""Live requests of a router: their stages, their attempts on workers, the prefill queues of workers, and the order of waiting requests.

        Dispatched            HandedOver            FirstToken
QUEUED ------------> PREFILLING ----------> HANDED_OVER ----------> DECODING
   ^                     | |  FirstToken (one worker does it all)      ^
   |                     | +-------------------------------------------+
   +---------- Lost -----+------------------ Lost ---------------------+      any stage: ends

A request is in exactly one stage. The table `NEXT` lists every allowed transition.

Rules:

1. A request has at most one attempt at a time. An attempt's id is never used again. So the router recognises and ignores late messages
   of an aborted attempt, and a client may reuse the id of a request that has ended.
2. An engine computes prompts in the order in which it gets them, and a long prompt delays all later prompts. So a worker is sent prompts
   only while it has fewer than `prefill_window_tokens` tokens to compute (0: there is no limit). The other prompts wait in the worker's
   prefill queue in this router, where another prompt can still overtake them. The attempts of waiting prompts have
   begun, but nothing was sent to the worker for them. If the router may never learn when a prompt is computed, the prompt is sent at once,
   even if the worker has more tokens to compute. A request that has no worker waits in the admission queue instead
   (`fleet.router.placement.wait_or_reject`).
3. A prompt in a prefill queue holds the same reservations as a sent one, and its request is in the same stage; only the command
   `Dispatch` is delayed. So placement sees the same loads with prefill queues and without.
4. The prompt with the lowest queue position (`queue_position`) is sent first, if it makes no other one late
   (`fleet.router.state.prefill_order`). The position depends on the arrival, on the priority and, if the settings say so, on the length
   of the prompt. It is an instant that never changes, so no prompt is overtaken for ever.
5. The tokens of a sent prompt count against the window until the prompt is computed, or until its attempt ends for another reason. A prompt
   that is longer than the window is also sent as soon as the worker has fewer tokens to compute than the window.
6. The predicted wait of a prompt in a prefill queue is computed from the worker's prefill rate: the computed prompt tokens, divided by the
   seconds in which the worker had tokens to compute. Recent tokens count more. The router does not know how many tokens of the prompts that
   were sent are computed already. But it knows when the worker began to compute these prompts, and subtracts the time since then from their
   predicted time.
7. What follows the loss of a worker, such as another attempt elsewhere, is decided in `fleet.router.machine` (its rule 4).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import IntEnum, auto
from math import exp

from msgspec import Struct, structs

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import Incarnation, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, KvPhase, KvReport, Sampling, TokenBytes, state_fields
from fleet.core.roles import KvPath, Phase, Placement
from fleet.core.work import Handoff, Start
from fleet.router.kv_index.prefix_index import keys_of
from fleet.router.messages import Arrived, CancelAttempt, Command, Dispatch
from fleet.router.placement.decision import Decision
from fleet.router.policy import PlacementRequest
from fleet.router.sessions import SessionKey
from fleet.router.settings.router import RouterSettings
from fleet.router.state.prefill_order import MOST_COMPARED, PrefillPace, WaitingPrompt, due_at, next_prompt
from kvstore.block import chain

# Larger values of `priority_seconds` and `size_seconds` count as this value, because infinity cannot be used in sums.
MAX_SECONDS = 1e9
# Seconds of computing after which the weight of a measurement has fallen to 1/e. A worker computes about 100,000 prompt tokens in
# this time.
MEMORY_SECONDS = 20.0
# Number of a worker's prompts that are measured before its prefill rate is used. The first measurement may include a compilation in the
# engine.
EVIDENCE = 3

QueuePosition = tuple[int, int, RequestId]
"""The rank of a request (`queue_position`), its number in the order of arrival, and its id. The lowest position goes first."""

Pace = Callable[[WorkerId, int, Nanos], PrefillPace | None]
"""A function that returns the pace of a worker, or None if it is unknown or does not count. It gets the worker, the tokens that the worker was
sent and has not computed, and the present instant."""

PromptHasher = Callable[[TokenBytes, int, bytes], tuple[int, ...]]
"""A function that returns the block keys of a prompt's full blocks. It gets the prompt, the number of tokens of a block, and the salt."""


def hash_prompt(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:
    """Return the block keys of a prompt. This is the default `PromptHasher`, which computes them from the prompt's tokens."""
    return keys_of(chain(tokens, block_tokens, salt=salt))


# This is an IntEnum, because `advance` looks up stages in a dict at every event, and integers hash fast.
class RequestStage(IntEnum):
    QUEUED = auto()  # the request has no attempt: it was not placed yet, or its last attempt has failed
    PREFILLING = auto()  # the worker that has to compute the prompt was chosen, and has not computed the prompt yet
    HANDED_OVER = auto()  # the decode worker was sent the handoff, and has sent no token yet
    DECODING = auto()  # the worker that answers has sent its first token


class RequestTransition(IntEnum):
    """The events that move a request to its next stage."""

    DISPATCHED = auto()
    HANDED_OVER = auto()
    FIRST_TOKEN = auto()  # the first token of the worker that answers, not of a prefill worker
    # The attempt failed: the worker left, rejected or cancelled it, could not be reached, or sent no usable handoff.
    LOST = auto()


NEXT: dict[tuple[RequestStage, RequestTransition], RequestStage] = {
    (RequestStage.QUEUED, RequestTransition.DISPATCHED): RequestStage.PREFILLING,
    (RequestStage.PREFILLING, RequestTransition.FIRST_TOKEN): RequestStage.DECODING,
    (RequestStage.PREFILLING, RequestTransition.HANDED_OVER): RequestStage.HANDED_OVER,
    (RequestStage.HANDED_OVER, RequestTransition.FIRST_TOKEN): RequestStage.DECODING,
    (RequestStage.PREFILLING, RequestTransition.LOST): RequestStage.QUEUED,
    (RequestStage.HANDED_OVER, RequestTransition.LOST): RequestStage.QUEUED,
    (RequestStage.DECODING, RequestTransition.LOST): RequestStage.QUEUED,
}


class IllegalRequestTransition(Exception):
    """Error: `NEXT` does not contain this transition. This is a bug of the router."""

    def __init__(self, stage: RequestStage, turn: RequestTransition):
        super().__init__(f"{turn.name} in {stage.name}")


def advance(stage: RequestStage, turn: RequestTransition) -> RequestStage:
    if (following := NEXT.get((stage, turn))) is None:
        raise IllegalRequestTransition(stage, turn)
    return following


# These names exist because reading a module variable is three to ten times as fast as reading an enum attribute.
_AUTO, _AGGREGATED = Placement.AUTO, Placement.AGGREGATED
_PREFILL, _DECODE = Phase.PREFILL, Phase.DECODE


class Attempt(Struct, frozen=True, kw_only=True):
    """One try to run one phase of a request on one worker. Its id is used once, so late messages of other attempts are recognised."""

    id: RequestId
    request_id: RequestId
    worker_id: WorkerId
    phase: Phase


def attempt_id(request_id: RequestId, number: int) -> RequestId:
    """Return the id of an attempt: the id of its request, followed by the attempt's number in this router."""
    return RequestId(f"{request_id}#{number}")


def request_of(attempt: RequestId) -> RequestId:
    """Return the id of the request to which an attempt belongs."""
    return RequestId(attempt.rpartition("#")[0])


class LiveRequest(Struct):
    """The state of one request in the router, from its arrival until the request ends."""

    arrived: Arrived
    seq: int  # number of the request in the order of arrival at this router
    since: Nanos
    hasher: PromptHasher = hash_prompt
    handed_over_at: Nanos = Nanos(0)
    sent_at: Nanos = Nanos(0)  # instant at which an attempt was first sent to a worker; 0: none was sent yet
    # Predicted instant of the first token, or the due instant of the prompt if it waits in a prefill queue and that is later; 0: none was
    # predicted.
    expected_at: Nanos = Nanos(0)
    deferred: bool = False  # True if the prompt was deferred in favour of others that could be in time
    first_token_at: Nanos = Nanos(0)  # instant of the answer's first token; 0: there is none yet
    stage: RequestStage = RequestStage.QUEUED
    failures: int = 0
    failed_on: dict[tuple[WorkerId, Incarnation], None] = {}
    placed: Decision | None = None
    attempt: Attempt | None = None
    reserved_on: list[WorkerId] = []
    # Tokens of the answer so far: passed to the client by this or another router, kept for a client that gets the answer in one piece, or
    # only counted (`Arrived.only_end`).
    sent: list[int] = []
    fingerprint: str = ""  # fingerprint of the worker that sent the first token in `sent`; empty: no token, or unknown
    kv: tuple[KvPhase, ...] = ()  # the latest KV report of each attempt so far, in the order of the first reports
    cached_tokens: int = 0  # number of the prompt's tokens that were cached; also 0 while no worker has reported
    kv_reports: dict[RequestId, KvPhase] = {}  # the latest KV report of each attempt, by the attempt's id
    chains: dict[int, tuple[int, ...]] = {}  # block keys of `prompt`, by block size; computed when `keys` is called
    id: RequestId = RequestId("")  # `id` and `own_tokens` repeat fields of `arrived`, because they are read often
    own_tokens: int = 0  # number of tokens of the client's prompt

    def __post_init__(self) -> None:
        self.id = self.arrived.request_id
        self.own_tokens = len(self.arrived.tokens) // TOKEN_BYTES
        if self.arrived.answered:
            self.sent, self.fingerprint = list(self.arrived.answered), self.arrived.fingerprint

    @property
    def session_key(self) -> SessionKey:
        return self.arrived.tenant, self.arrived.session

    @property
    def prompt(self) -> TokenBytes:
        """The prompt for the next attempt: the client's prompt, followed by the tokens of the answer so far."""
        if not self.sent:
            return self.arrived.tokens
        return self.arrived.tokens + b"".join([token.to_bytes(TOKEN_BYTES, "little") for token in self.sent])

    @property
    def prompt_tokens(self) -> int:
        return self.own_tokens + len(self.sent)

    @property
    def answer_key(self) -> int:
        """The key under which the worker of the next attempt keeps the tokens of the answer; 0: it keeps none.

        Each attempt that generates the answer has a key of its own. If attempts shared a key, two workers could keep different tokens under
        it: a failed attempt may have generated tokens that did not arrive at the router, and the next attempt generates others.
        """
        key = self.arrived.answer_key
        return key + self.failures if key else 0

    @property
    def remaining_tokens(self) -> int:
        """The maximum number of tokens that may still be generated for the answer."""
        return self.arrived.sampling.max_tokens - len(self.sent)

    def wait_key(self) -> Hashable:
        """Return a value that describes what a request demands of its worker.

        Requests with equal values may be served by the same workers, except for workers that a request's session or length excludes. None:
        the request demands nothing.
        """
        arrived = self.arrived
        if (
            arrived.pin is None
            and not arrived.labels
            and arrived.among is None
            and arrived.adapter is None
            and arrived.sampling.form is None
            and not arrived.needs
            and arrived.placement is _AUTO
            and arrived.kv_path is None
            and not self.failures
            and not self.sent
        ):
            return None  # the most frequent case
        return (
            arrived.pin,
            arrived.labels,
            arrived.among,
            arrived.adapter,
            arrived.sampling.form is not None,
            arrived.needs,
            arrived.placement,
            arrived.kv_path,
            self.fingerprint,
            self.continued_fields,
            self.failures > 0,
            frozenset(self.failed_on),
        )

    @property
    def may_continue(self) -> bool:
        """False if the answer has begun and does not pass through this router, which then cannot know the tokens that the client has."""
        return not self.sent or not (self.arrived.only_end or self.arrived.external)

    @property
    def continued_fields(self) -> tuple[str, ...]:
        """The sampling fields whose state the next worker has to rebuild, because the answer has begun."""
        return state_fields(self.arrived.sampling) if self.sent else ()

    def start_over(self) -> None:
        """Forget the answer so far; the next attempt generates it anew. This is allowed only if the client has seen nothing of it."""
        assert self.arrived.whole, self.id
        self.sent.clear()
        self.fingerprint = ""

    def sampling(self, *, max_tokens: int) -> Sampling:
        sampling = self.arrived.sampling
        if max_tokens == sampling.max_tokens:
            return sampling
        min_tokens = max(0, min(max_tokens, sampling.min_tokens - len(self.sent)))
        # the log probabilities of the prompt came with the first tokens, so the client has them already
        prompt_logprobs = None if self.sent else sampling.prompt_logprobs
        return structs.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs)

    def keys(self, block_tokens: int) -> tuple[int, ...]:
        """Return the block keys of `prompt`. If tokens were added to the answer since an earlier call, `forget_chains` must be called first.

        For a prompt with images, return the keys of the client's prompt that arrived with the request; empty if there are none for this
        block size.
        """
        if (keys := self.chains.get(block_tokens)) is None:
            arrived = self.arrived
            if arrived.images:  # without the images, prompts with different images would have equal keys
                keys = arrived.keys.get(block_tokens, ())
            else:
                known = None if self.sent else arrived.keys.get(block_tokens)
                keys = self.hasher(self.prompt, block_tokens, arrived.salt) if known is None else known
            self.chains[block_tokens] = keys
        return keys

    @property
    def first_key(self) -> int:
        """The block key of the first full block of the prompt; 0 if there is no full block, or if no block keys were computed yet."""
        for keys in self.chains.values():
            if keys:
                return keys[0]
        return 0

    def forget_chains(self) -> None:
        self.chains = {}

    def placement_request(
        self, now: Nanos, *, bound: WorkerId | None = None, must_keep: bool = False
    ) -> PlacementRequest:
        """Return what placement has to know of this request.

        Args:
            now: The instant of the decision.
            bound: The worker to which the request's session is bound.
            must_keep: True if only that worker may serve the request.
        """
        arrived, sent = self.arrived, len(self.sent)
        continues = state_fields(arrived.sampling) if sent else ()
        return PlacementRequest(
            prompt_tokens=self.own_tokens + sent,
            answer_tokens=arrived.sampling.max_tokens - sent,
            placement=_AGGREGATED if continues else arrived.placement,
            kv_path=arrived.kv_path,
            session=arrived.session,
            bound=bound,
            must_keep=must_keep,
            pin=arrived.pin,
            labels=arrived.labels,
            among=arrived.among,
            adapter=arrived.adapter,
            form=arrived.sampling.form is not None,
            needs=arrived.needs,
            fingerprint=self.fingerprint,
            continues=continues,
            first_key=self.first_key,
            seconds_left=None if arrived.deadline is None else (arrived.deadline - now) / SECOND,
            now=now,
        )

    def emits_prefill_token(self, kv_path: KvPath) -> bool:
        """Return whether the client gets the token that the prefill worker has generated.

        The token then becomes part of the decode worker's prompt. This is possible only if sampling does not depend on which worker
        generated the earlier tokens. On the direct path, the decode engine itself starts at the end of the client's prompt and generates
        this token again.
        """
        return kv_path is KvPath.STORE and self.arrived.sampling.stateless

    def ends_with_prefill_token(self, kv_path: KvPath) -> bool:
        """Return whether an end-of-sequence token of the prefill worker ends the answer.

        The token does not end the answer if it is dropped and the decode worker draws a new token at random. Otherwise either of two draws
        could end the answer, and the end would be too likely.
        """
        sampling = self.arrived.sampling
        return self.emits_prefill_token(kv_path) or sampling.temperature == 0 or sampling.seed is not None

    def note_kv_report(self, attempt: Attempt, report: KvReport) -> None:
        """Store the KV report of an attempt in place of an earlier report of the same attempt.

        A prompt token counts as cached if it was computed in no attempt. The report of a worker that was lost later still counts, because
        this worker did compute its part of the prompt.
        """
        kv_reports = self.kv_reports
        kv_reports[attempt.id] = KvPhase(phase=attempt.phase, worker_id=attempt.worker_id, report=report)
        self.kv = tuple(kv_reports.values())
        self.cached_tokens = min(self.own_tokens, *[phase.report.cached_tokens for phase in self.kv])


def queue_position(arrived: Nanos, priority: int, tokens: int, *, priority_seconds: float, size_seconds: float) -> int:
    """Return the queue position of a request among those of its tenant, as an instant.

    Args:
        arrived: The instant of the request's arrival.
        priority: A higher priority goes first.
        tokens: Tokens of the prompt.
        priority_seconds: Seconds by which each step of priority makes the position earlier. Zero: priorities do not count; very large:
            strict priorities.
        size_seconds: Seconds by which each thousand tokens make the position later. Zero: the size does not count; large: the shortest
            prompt goes first, which gives the lowest mean wait (W. E. Smith, Naval Research Logistics 1956).
    """
    step, thousand = min(priority_seconds, MAX_SECONDS), min(size_seconds, MAX_SECONDS)
    return arrived - round(priority * step * SECOND) + round(tokens * thousand * SECOND / 1000)


class OrderedRequests:
    """Keeps request ids in the order of their ranks, the lowest first. Requests with equal ranks are in the order of their arrival (`seq`).

    The ids are in a sorted list, because a request may be removed from any position. A removal from a thousand entries takes less than a
    microsecond.
    """

    def __init__(self) -> None:
        self._entries: list[QueuePosition] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestId]:
        """Iterate from the lowest rank. The iterator becomes invalid when an entry is added or removed."""
        return (request_id for _, _, request_id in self._entries)

    def __reversed__(self) -> Iterator[RequestId]:
        """Iterate from the highest rank. The iterator becomes invalid when an entry is added or removed."""
        return (request_id for _, _, request_id in reversed(self._entries))

    def add(self, rank: int, seq: int, request_id: RequestId) -> None:
        insort(self._entries, (rank, seq, request_id))

    def discard(self, rank: int, seq: int, request_id: RequestId) -> bool:
        """Remove the entry with exactly these values. Return False if there is no such entry."""
        entry = (rank, seq, request_id)
        place = bisect_left(self._entries, entry)
        if place == len(self._entries) or self._entries[place] != entry:
            return False
        del self._entries[place]
        return True

    @property
    def first(self) -> RequestId | None:
        return self._entries[0][2] if self._entries else None

    @property
    def place(self) -> QueuePosition:
        """The first entry: its rank, `seq` and request id. The list must not be empty."""
        return self._entries[0]

    @property
    def lowest(self) -> int | None:
        """The rank of the first entry; None if the list is empty."""
        return self._entries[0][0] if self._entries else None

    def before(self, rank: int) -> int:
        """Return how many entries are before a new entry with this rank."""
        return bisect_left(self._entries, (rank + 1,))

    def after(self, rank: int, most: int) -> list[RequestId]:
        """Return the first `most` request ids whose ranks are above `rank`."""
        begin = self.before(rank)
        return [request_id for _, _, request_id in self._entries[begin : begin + most]]

    def copy(self) -> "OrderedRequests":
        copy = OrderedRequests()
        copy._entries = self._entries.copy()
        return copy

    def ids(self) -> list[RequestId]:
        return list(self)


class Attempts:
    """Keeps all attempts of one router, and the prefill queues of its workers."""

    def __init__(self, settings: RouterSettings):
        self.settings = settings
        self._queues = PrefillQueues(settings.prefill_window_tokens)
        self._attempts: dict[RequestId, Attempt] = {}
        self._rates: dict[WorkerId, PrefillRate] = {}  # prefill rates of the workers that were sent a prompt to compute
        self._begun = 0
        # Workers whose prefill queues may send a prompt now. If there are any at the end of an event, the router machine calls `move`.
        self.opened = self._queues.opened
        self.get = self._attempts.get
        """Return the attempt with this id; None if it has ended or never existed."""

    @property
    def waiting(self) -> int:
        """The number of prompts in the prefill queues of all workers."""
        return len(self._queues)

    def is_waiting(self, live: LiveRequest) -> bool:
        """Return whether a request's prompt is in a prefill queue."""
        return self._queues.holds(live.id)

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
        """Begin an attempt of a request on a worker: send it now, or let its prompt wait in the prefill queue, from which `move` sends it."""
        self._begun += 1
        attempt = Attempt(id=attempt_id(live.id, self._begun), request_id=live.id, worker_id=worker_id, phase=phase)
        live.attempt = attempt
        self._attempts[attempt.id] = attempt
        if phase is _DECODE or self._goes_at_once(live, worker_id, now):
            self._send(live, attempt, now, out, handoff)

    def computed(self, live: LiveRequest, now: Nanos) -> None:
        """Record that the worker has computed the prompt of a request: measure the prefill rate, and let the prefill queue send more prompts."""
        if (tokens := self._queues.leave(live.id)) and live.attempt is not None:
            self._rates[live.attempt.worker_id].computed(tokens, now)
            self._note_idle(live.attempt.worker_id)

    def _note_idle(self, worker_id: WorkerId) -> None:
        """Stop counting time for the worker's prefill rate if the worker has no more tokens to compute."""
        if not self._queues.sent_tokens(worker_id):
            self._rates[worker_id].idle()

    def seconds_to_wait(self, live: LiveRequest, placed: Decision, now: Nanos) -> float | None:
        """Return the estimated seconds that a prompt would wait in the prefill queue of the chosen worker.

        The result is None if the prompt would not wait in the prefill queue, or if too little was measured.
        """
        worker_id = placed.prefill or placed.decode
        if live.arrived.external or not self._queues.full(worker_id):
            return None
        place = queue_position(
            live.since,
            live.arrived.priority,
            placed.prefill_tokens,
            priority_seconds=self.settings.priority_seconds,
            size_seconds=self.settings.prefill_size_seconds,
        )
        held = self._queues.held_tokens(worker_id, live.arrived.priority, place - live.since)
        return self._rates[worker_id].seconds_to_wait(self._queues.sent_tokens(worker_id), held, now)

    def full_prefill_queues(self) -> list[WorkerId]:
        """Return the workers for which a new prompt has to wait in the prefill queue."""
        return self._queues.full_workers()

    def forget(self, worker_id: WorkerId) -> None:
        """Forget the measured prefill rate of a worker that has left the cluster."""
        self._rates.pop(worker_id, None)

    def stop(self, live: LiveRequest, out: list[Command]) -> None:
        """Cancel the attempt of a request on its worker, if it was sent to the worker."""
        if live.attempt is not None and not self._queues.holds(live.id):
            out.append(CancelAttempt(worker_id=live.attempt.worker_id, request_id=live.attempt.id))

    def end(self, live: LiveRequest) -> None:
        """Forget the attempt of a request, without a message to its worker. Do nothing if the request has no attempt."""
        if live.attempt is not None:
            if self._queues.leave(live.id) and live.attempt.worker_id in self._rates:
                self._note_idle(live.attempt.worker_id)
            del self._attempts[live.attempt.id]
            live.attempt = None

    def move(self, requests: Mapping[RequestId, LiveRequest], now: Nanos, out: list[Command]) -> None:
        """Send prompts of the prefill queues to all workers that have fewer tokens to compute than the prefill window.

        Args:
            requests: All live requests.
            now: The present instant.
            out: The list to which the commands are appended.
        """
        while (found := self._queues.next(now, self._pace)) is not None:
            request_id, deferred = found
            for each in deferred:
                requests[each].deferred = True
            live = requests[request_id]
            assert live.attempt is not None
            self._rates[live.attempt.worker_id].busy(now)
            self._send(live, live.attempt, now, out)

    def _pace(self, worker_id: WorkerId, sent: int, now: Nanos) -> PrefillPace | None:
        """Return the pace of a worker that was sent `sent` tokens; None if too little was measured, or if lengths do not count."""
        if not self.settings.prefill_size_seconds or (rate := self._rates.get(worker_id)) is None:
            return None
        return rate.pace(sent, now)

    def _goes_at_once(self, live: LiveRequest, worker_id: WorkerId, now: Nanos) -> bool:
        """Return True if a prompt can be sent to its worker now. Otherwise put it into the prefill queue, from which `move` sends it."""
        arrived, settings = live.arrived, self.settings
        if arrived.only_end or arrived.external:
            return True  # sent at once, because the router may never learn when this prompt is computed
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
        # A request that returns after a failure has a new wait. The client of an answer that has begun waits for the rest of it.
        due = due_at(
            now if live.failures else live.since,
            settings.max_queue_seconds,
            deadline=arrived.deadline,
            most_wait=arrived.most_wait,
        )
        waiting = WaitingPrompt(live.id, tokens, place, live.seq, due, place - live.since, arrived.priority)
        if live.expected_at and settings.prefill_size_seconds:
            live.expected_at = max(live.expected_at, due)  # the order may delay the prompt until then
        self._queues.wait(worker_id, waiting)
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
            sampling=live.sampling(max_tokens=1 if prefills or arrived.pooling is not None else live.remaining_tokens),
            salt=arrived.salt,
            handoff=handoff,
            kv_path=placed.kv_path if prefills else None,
            priority=arrived.priority,
            timeout_ms=0 if arrived.deadline is None else max(1, (arrived.deadline - now) // MILLISECOND),
            session=arrived.session,
            adapter="" if arrived.adapter is None else arrived.adapter.name,
            parsing=arrived.parsing,
            generated_tokens=len(live.sent),
            pooling=arrived.pooling,
            images=arrived.images,
            # The worker of a prefill attempt keeps no tokens. The one token of this attempt is either dropped, or it is passed to the
            # client and becomes the end of the prompt of the decode attempt.
            answer_key=0 if prefills else live.answer_key,
        )
        out.append(Dispatch(worker_id=attempt.worker_id, start=start))

    def check(self, requests: Mapping[RequestId, LiveRequest]) -> None:
        """Assert that the recorded attempts are exactly those of the live requests `requests`, and that the prefill queues are consistent."""
        self._queues.check()
        assert {
            live.attempt.id: live.attempt for live in requests.values() if live.attempt is not None
        } == self._attempts


class _QueuedPrompt(Struct):
    worker_id: WorkerId
    tokens: int  # prompt tokens that the worker has to compute, so without cached ones
    waiting: WaitingPrompt | None = None  # set only for prompts that wait, or have waited, in a prefill queue
    sent: bool = True


class PrefillQueues:
    """Keeps the prefill queues of all workers. Nothing is kept for a worker without prompts."""

    def __init__(self, window_tokens: int) -> None:
        """Start without prompts.

        Args:
            window_tokens: The prefill window: a worker that has at least this many prompt tokens to compute is sent no more prompts; 0: no
                limit.
        """
        self._window = window_tokens
        self._tokens: dict[WorkerId, int] = {}  # prompt tokens that each worker was sent and has not computed yet
        # The prefill queue of each worker that has one: in the order of queue positions, and in the order in which the prompts are due.
        self._held: dict[WorkerId, OrderedRequests] = {}
        self._due: dict[WorkerId, OrderedRequests] = {}
        self._prompts: dict[RequestId, _QueuedPrompt] = {}
        self.opened: dict[WorkerId, None] = {}
        """Workers with a prefill queue that may have room again, because a prompt was computed or has ended. `next` takes the prompts that wait
        for them."""
        self._waiting = 0

    def __len__(self) -> int:
        """Return the number of prompts that wait in the prefill queues."""
        return self._waiting

    def enter(self, request_id: RequestId, worker_id: WorkerId, tokens: int) -> bool:
        """Record a prompt if it can be sent to its worker now. The worker has to compute `tokens` tokens of the prompt.

        Returns:
            True if the caller has to send the prompt now. False if the prompt has to wait: then nothing was recorded, and the caller has to
            call `wait`.
        """
        if not self._window:
            return True
        assert request_id not in self._prompts, request_id
        if self.full(worker_id):
            return False
        self._tokens[worker_id] = self._tokens.get(worker_id, 0) + tokens
        self._prompts[request_id] = _QueuedPrompt(worker_id, tokens)
        return True

    def wait(self, worker_id: WorkerId, waiting: WaitingPrompt) -> None:
        """Put a prompt into the worker's queue, from which `next` takes it later."""
        request_id = waiting.request_id
        self._prompts[request_id] = _QueuedPrompt(worker_id, waiting.tokens, waiting, sent=False)
        if (held := self._held.get(worker_id)) is None:
            held = self._held[worker_id] = OrderedRequests()
            self._due[worker_id] = OrderedRequests()
        held.add(waiting.rank, waiting.seq, request_id)
        self._due[worker_id].add(waiting.due, waiting.seq, request_id)
        self._waiting += 1

    def leave(self, request_id: RequestId) -> int:
        """Remove a prompt that is computed or whose attempt has ended. Do nothing if the prompt is unknown.

        Returns:
            The number of prompt tokens that the worker had to compute; 0 if the prompt was not sent, or is unknown.
        """
        if (prompt := self._prompts.pop(request_id, None)) is None:
            return 0
        worker_id = prompt.worker_id
        if not prompt.sent:
            self._no_longer(prompt, request_id)
            return 0
        if left := self._tokens.get(worker_id, 0) - prompt.tokens:
            self._tokens[worker_id] = left
        else:
            self._tokens.pop(worker_id, None)
        if worker_id in self._held:
            self.opened[worker_id] = None
        return prompt.tokens

    def full(self, worker_id: WorkerId) -> bool:
        """Return whether a new prompt for this worker has to wait in the prefill queue."""
        if not self._window:
            return False
        return worker_id in self._held or self._tokens.get(worker_id, 0) >= self._window

    def full_workers(self) -> list[WorkerId]:
        """Return the workers for which `full` is true."""
        return [worker_id for worker_id in self._tokens if self.full(worker_id)]

    def sent_tokens(self, worker_id: WorkerId) -> int:
        """Return the number of prompt tokens that a worker was sent and has not computed yet."""
        return self._tokens.get(worker_id, 0)

    def held_tokens(self, worker_id: WorkerId, priority: int, delay: int) -> int:
        """Return the sum of the tokens of the prompts that a new prompt waits for in a worker's queue.

        These are the prompts with at least its priority whose delay (`WaitingPrompt.delay`) is at most its own. Longer ones go later, unless
        they are due, and then the new prompt is still in time.
        """
        held = self._held.get(worker_id, ())
        prompts = [self._waiting_prompt(request_id) for request_id in held]
        return sum(prompt.tokens for prompt in prompts if prompt.priority >= priority and prompt.delay <= delay)

    def holds(self, request_id: RequestId) -> bool:
        """Return whether the prompt of a request is in a prefill queue."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and not prompt.sent

    def next(self, now: Nanos, pace: Pace) -> tuple[RequestId, list[RequestId]] | None:
        """Take a waiting prompt whose worker has room, and count it as sent.

        Returns:
            The request id of the prompt, and those of the deferred prompts (`fleet.router.state.prefill_order`). None if no prompt can be
            sent.
        """
        while self.opened:
            worker_id = next(iter(self.opened))
            held = self._held.get(worker_id)
            tokens = self._tokens.get(worker_id, 0)
            if held is None or tokens >= self._window:
                del self.opened[worker_id]
                continue
            chosen, deferred = self._choose(worker_id, held, tokens, now, pace)
            prompt = self._prompts[chosen]
            self._no_longer(prompt, chosen)
            self._tokens[worker_id] = tokens + prompt.tokens
            prompt.sent = True
            return chosen, deferred
        return None

    def _choose(
        self, worker_id: WorkerId, held: OrderedRequests, sent: int, now: Nanos, pace: Pace
    ) -> tuple[RequestId, list[RequestId]]:
        """Return the prompt of a worker's queue that is sent next, and the deferred ones (rule 4)."""
        first = held.first
        assert first is not None
        if len(held) == 1 or (times := pace(worker_id, sent, now)) is None:
            return first, []
        compared = [self._waiting_prompt(each) for each in self._due[worker_id].after(now, MOST_COMPARED)]
        chosen, deferred = next_prompt(self._waiting_prompt(first), compared, now, times)
        return chosen.request_id, [each.request_id for each in deferred]

    def _waiting_prompt(self, request_id: RequestId) -> WaitingPrompt:
        waiting = self._prompts[request_id].waiting
        assert waiting is not None
        return waiting

    def _no_longer(self, prompt: _QueuedPrompt, request_id: RequestId) -> None:
        """Remove a prompt from the prefill queue in which it waits."""
        held, due, waiting = self._held[prompt.worker_id], self._due[prompt.worker_id], prompt.waiting
        assert waiting is not None
        was_held = held.discard(waiting.rank, waiting.seq, request_id)
        was_due = due.discard(waiting.due, waiting.seq, request_id)
        assert (was_held, was_due) == (True, True), request_id
        if not len(held):
            del self._held[prompt.worker_id], self._due[prompt.worker_id]
        self._waiting -= 1

    def check(self) -> None:
        """Assert that the sums of tokens match the prompts, and that prompts wait only for workers that are full."""
        assert not self.opened
        assert self._waiting == sum(not prompt.sent for prompt in self._prompts.values())
        sent: dict[WorkerId, int] = {}
        for prompt in self._prompts.values():
            if prompt.sent:
                sent[prompt.worker_id] = sent.get(prompt.worker_id, 0) + prompt.tokens
        assert {**dict.fromkeys(self._tokens, 0), **sent} == {**dict.fromkeys(sent, 0), **self._tokens}
        assert self._held.keys() == self._due.keys()
        for worker_id, held in self._held.items():
            assert len(held), worker_id
            assert set(held) == set(self._due[worker_id]), worker_id
            assert self._tokens.get(worker_id, 0) >= self._window, worker_id
            assert all(self.holds(request_id) for request_id in held.ids())


class PrefillRate:
    """Measures the prefill rate of one worker, in tokens per second."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._computed = 0
        # Start of the time that `_seconds` does not contain yet: when the worker became busy, or when it last finished a
        # prompt. None: the worker has no prompt tokens to compute.
        self._since: Nanos | None = None

    def busy(self, now: Nanos) -> None:
        """Record that the worker has prompt tokens to compute from now on."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """Record that the worker has no more prompt tokens to compute."""
        self._since = None

    def computed(self, tokens: int, now: Nanos) -> None:
        """Record that the worker has computed `tokens` tokens of a prompt."""
        if self._since is None:
            return
        seconds = max(0, now - self._since) / SECOND
        keep = exp(-seconds / MEMORY_SECONDS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds
        self._computed += 1
        self._since = now

    def pace(self, sent: int, now: Nanos) -> PrefillPace | None:
        """Return the pace of a worker that was sent `sent` tokens which it has not reported as computed; None if too little was measured."""
        begin = self.seconds_to_wait(sent, 0, now)
        return None if begin is None else PrefillPace(begin, self._seconds / self._tokens)

    def seconds_to_wait(self, sent: int, held: int, now: Nanos) -> float | None:
        """Return the estimated seconds until the worker has computed `sent` and `held` tokens; None if too little was measured.

        Args:
            sent: Tokens that the worker was sent and has not reported as computed.
            held: Tokens of the prompts in the prefill queue that the worker will compute before the new prompt.
            now: The present instant.
        """
        if self._computed < EVIDENCE or self._seconds <= 0 or self._tokens <= 0:
            return None
        rate = self._tokens / self._seconds
        under_way = sent / rate
        if self._since is not None:
            under_way = max(0.0, under_way - (now - self._since) / SECOND)
        return under_way + held / rate
