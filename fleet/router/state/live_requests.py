"""Live requests: what the router remembers of each request from its arrival to its end, its stages, and the order in which requests wait.

        Dispatched            HandedOver            FirstToken
QUEUED ------------> PREFILLING ----------> HANDED_OVER ----------> DECODING
   ^                     | |  FirstToken (one worker does it all)      ^
   |                     | +-------------------------------------------+
   +---------- Lost -----+------------------ Lost ---------------------+      any stage: ends

A request is in exactly one stage. The table `NEXT` lists every allowed transition.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from enum import IntEnum, auto

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import Incarnation, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, KvPhase, KvReport, Sampling, TokenBytes, state_fields
from fleet.core.roles import KvPath, Phase, Placement
from fleet.router.kv_index.prefix_index import keys_of
from fleet.router.messages import Arrived
from fleet.router.placement.decision import Decision
from fleet.router.policy import PlacementRequest
from fleet.router.sessions import SessionKey
from kvstore.block import chain

# Larger values of `priority_seconds` and `size_seconds` count as this value, because infinity cannot be used in sums.
MAX_SECONDS = 1e9

QueuePosition = tuple[int, int, RequestId]
"""The rank of a request (`queue_position`), its number in the order of arrival, and its id. The lowest position goes first."""

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
    expected_at: Nanos = Nanos(0)  # predicted instant of the first token; 0: none was predicted
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

    def copy(self) -> "OrderedRequests":
        copy = OrderedRequests()
        copy._entries = self._entries.copy()
        return copy

    def ids(self) -> list[RequestId]:
        return list(self)
