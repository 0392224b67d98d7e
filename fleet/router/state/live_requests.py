"""Live requests: what the router remembers of each request from its arrival to its end, and the stages that it goes through.

        Dispatched            HandedOver            FirstToken
QUEUED ------------> PREFILLING ----------> HANDED_OVER ----------> DECODING
   ^                     | |  FirstToken (one worker does it all)      ^
   |                     | +-------------------------------------------+
   +---------- Lost -----+------------------ Lost ---------------------+      any stage: ends

A request is in exactly one stage. The table `NEXT` lists every allowed transition.
"""

from collections.abc import Callable, Hashable
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

PromptHasher = Callable[[TokenBytes, int, bytes], tuple[int, ...]]
"""A function from a prompt, the tokens of a block and the salt to the block keys of the prompt's full blocks."""


def hash_prompt(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:
    """Return the block keys of a prompt; the default `PromptHasher`, which needs the prompt's tokens."""
    return keys_of(chain(tokens, block_tokens, salt=salt))


class RequestStage(IntEnum):  # IntEnum hashes fast, and `advance` is called on every path
    QUEUED = auto()  # the request is on no worker
    PREFILLING = auto()  # a prefill worker or the aggregated worker computes the prompt
    HANDED_OVER = auto()  # the decode worker has been sent the handoff
    DECODING = auto()  # the answering worker generates tokens


class RequestTransition(IntEnum):
    """The events that move a request to another stage."""

    DISPATCHED = auto()
    HANDED_OVER = auto()
    FIRST_TOKEN = auto()  # from the answering worker, not from a prefill worker
    LOST = auto()  # the worker left, rejected the attempt or could not be reached


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
    """A transition that `NEXT` does not contain: a bug of the router."""

    def __init__(self, stage: RequestStage, turn: RequestTransition):
        super().__init__(f"{turn.name} in {stage.name}")


def advance(stage: RequestStage, turn: RequestTransition) -> RequestStage:
    if (following := NEXT.get((stage, turn))) is None:
        raise IllegalRequestTransition(stage, turn)
    return following


_AUTO, _AGGREGATED = Placement.AUTO, Placement.AGGREGATED  # module variables are ten times as fast as enum attributes


class Attempt(Struct, frozen=True, kw_only=True):
    """One try to run one phase of a request on one worker. The id is used once, so late messages cannot be mistaken."""

    id: RequestId
    request_id: RequestId
    worker_id: WorkerId
    phase: Phase


def attempt_id(request_id: RequestId, number: int) -> RequestId:
    """Return the id of an attempt of a request, by the number of the attempt."""
    return RequestId(f"{request_id}#{number}")


def request_of(attempt: RequestId) -> RequestId:
    """Return the request of an attempt."""
    return RequestId(attempt.rpartition("#")[0])


class LiveRequest(Struct):
    """The state of one request until it ends."""

    arrived: Arrived
    seq: int  # number of the request in the order of arrival
    since: Nanos
    hasher: PromptHasher = hash_prompt
    handed_over_at: Nanos = Nanos(0)
    sent_at: Nanos = Nanos(0)  # instant at which a worker was first sent an attempt; 0: not yet
    first_token_at: Nanos = Nanos(0)  # instant of the first token; 0: no token yet
    stage: RequestStage = RequestStage.QUEUED
    failures: int = 0
    failed_on: dict[tuple[WorkerId, Incarnation], None] = {}
    placed: Decision | None = None
    attempt: Attempt | None = None
    reserved_on: list[WorkerId] = []
    sent: list[int] = []  # tokens that the client has, or would have if the answer were streamed
    fingerprint: str = ""  # the fingerprint of the worker that sent the first of them
    kv: tuple[KvPhase, ...] = ()  # KV reports of the attempts so far
    cached_tokens: int = 0  # tokens of the prompt; 0 also while no worker has reported
    kv_reports: dict[RequestId, KvPhase] = {}  # the KV report of each attempt, by the attempt's id
    chains: dict[int, tuple[int, ...]] = {}  # block keys of the prompt, by block size
    id: RequestId = RequestId("")  # `id` and `own_tokens` repeat fields of `arrived`, because they are read often
    own_tokens: int = 0  # tokens of the prompt

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
        """The prompt for the next attempt: the client's prompt and the tokens that the client already has."""
        if not self.sent:
            return self.arrived.tokens
        return self.arrived.tokens + b"".join([token.to_bytes(TOKEN_BYTES, "little") for token in self.sent])

    @property
    def prompt_tokens(self) -> int:
        return self.own_tokens + len(self.sent)

    @property
    def remaining_tokens(self) -> int:
        """The most tokens that the answer may still get."""
        return self.arrived.sampling.max_tokens - len(self.sent)

    def wait_key(self) -> Hashable:
        """Return a value that is equal for requests that the same workers may serve; session and length are not part of it."""
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
        """True unless the answer has begun and its tokens are not known here, because another program passes them on."""
        return not self.sent or not (self.arrived.only_end or self.arrived.external)

    @property
    def continued_fields(self) -> tuple[str, ...]:
        """The sampling fields whose state the next worker has to rebuild from the tokens of the answer so far."""
        return state_fields(self.arrived.sampling) if self.sent else ()

    def start_over(self) -> None:
        """Forget the answer so far; the client has seen nothing of it."""
        assert self.arrived.whole, self.id
        self.sent.clear()
        self.fingerprint = ""

    def sampling(self, *, max_tokens: int) -> Sampling:
        sampling = self.arrived.sampling
        if max_tokens == sampling.max_tokens:
            return sampling
        min_tokens = max(0, min(max_tokens, sampling.min_tokens - len(self.sent)))
        # the client got the log probabilities of the prompt with the first tokens
        prompt_logprobs = None if self.sent else sampling.prompt_logprobs
        return structs.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=prompt_logprobs)

    def keys(self, block_tokens: int) -> tuple[int, ...]:
        """Return the block keys of the prompt as it is now; call `forget_chains` after tokens were sent."""
        if (keys := self.chains.get(block_tokens)) is None:
            known = None if self.sent else self.arrived.keys.get(block_tokens)
            keys = self.hasher(self.prompt, block_tokens, self.arrived.salt) if known is None else known
            self.chains[block_tokens] = keys
        return keys

    @property
    def first_key(self) -> int:
        """Block key of the prompt's first full block; 0: there is none, or it is not known yet."""
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
            bound: The worker of this session's last request.
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
        """Return whether the client gets the token that the prefill worker sampled.

        That token then becomes part of the decode worker's prompt, which requires sampling that does not depend on who sampled the
        earlier tokens. On the direct path the engines agree among themselves that decoding starts from the prompt.
        """
        return kv_path is KvPath.STORE and self.arrived.sampling.stateless

    def ends_with_prefill_token(self, kv_path: KvPath) -> bool:
        """Return whether an end-of-sequence token from the prefill worker ends the answer.

        It does not end the answer if the token is dropped and the decode worker draws a new one at random: the end would then have
        two chances.
        """
        sampling = self.arrived.sampling
        return self.emits_prefill_token(kv_path) or sampling.temperature == 0 or sampling.seed is not None

    def note_kv_report(self, attempt: Attempt, report: KvReport) -> None:
        """Note an attempt's KV report; a later report of the attempt replaces the earlier one.

        A prompt token counts as cached when no phase has computed it. The report of a worker that was lost after its first tokens
        stays: what the worker computed was computed.
        """
        kv_reports = self.kv_reports
        kv_reports[attempt.id] = KvPhase(phase=attempt.phase, worker_id=attempt.worker_id, report=report)
        self.kv = tuple(kv_reports.values())
        self.cached_tokens = min(self.own_tokens, *[phase.report.cached_tokens for phase in self.kv])
