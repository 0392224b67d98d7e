"""A request from arrival to end: its stages, and what is known of it in each.

        Dispatched            HandedOver            FirstToken
QUEUED ------------> PREFILLING ----------> HANDED_OVER ----------> DECODING
   ^                     | |  FirstToken (one worker does it all)      ^
   |                     | +-------------------------------------------+
   +---------- Lost -----+------------------ Lost ---------------------+      any stage: ends

A request is in exactly one stage; the table below is the whole truth about what may follow what.
"""

from collections.abc import Callable, Hashable
from enum import IntEnum, auto

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import Incarnation, RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, KvPhase, KvReport, Sampling, TokenBytes
from fleet.core.roles import KvPath, Phase, Placement
from fleet.router.candidates import PlacementRequest
from fleet.router.kv_index.prefix_index import keys_of
from fleet.router.messages import Arrived
from fleet.router.placement.decision import Decision
from fleet.router.sessions import SessionKey
from kvstore.block import chain

PromptHasher = Callable[[TokenBytes, int, bytes], tuple[int, ...]]
"""Keys of the full blocks of a prompt, from its tokens, the tokens of a block, and the salt."""


def hash_prompt(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:
    """The `PromptHasher` of everybody who has the tokens; a recording, say, does not."""
    return keys_of(chain(tokens, block_tokens, salt=salt))


class RequestStage(IntEnum):  # hashed by C: `advance` is on every path
    QUEUED = auto()  # on no worker
    PREFILLING = auto()  # the prompt is computed, by a prefill worker or by the one that does it all
    HANDED_OVER = auto()  # a decode worker has been told to fetch the blocks
    DECODING = auto()  # tokens come


class RequestTransition(IntEnum):
    """What moves a request on."""

    DISPATCHED = auto()
    HANDED_OVER = auto()
    FIRST_TOKEN = auto()  # from the worker that answers, not from a prefill worker
    LOST = auto()  # its worker left, rejected it or could not be reached


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
    """A turn that the table does not have: a bug of the router."""

    def __init__(self, stage: RequestStage, turn: RequestTransition):
        super().__init__(f"{turn.name} in {stage.name}")


def advance(stage: RequestStage, turn: RequestTransition) -> RequestStage:
    if (following := NEXT.get((stage, turn))) is None:
        raise IllegalRequestTransition(stage, turn)
    return following


_AUTO = Placement.AUTO  # looked up in its enum it takes ten times as long


class Attempt(Struct, frozen=True, kw_only=True):
    """One piece of work of a request, on one worker. Its id is used once, so that nothing late can be mistaken."""

    id: RequestId
    request_id: RequestId
    worker_id: WorkerId
    phase: Phase


class LiveRequest(Struct):
    """What the router remembers of a request until it ends."""

    arrived: Arrived
    seq: int  # order of arrival
    since: Nanos
    hasher: PromptHasher = hash_prompt
    handed_over_at: Nanos = Nanos(0)
    stage: RequestStage = RequestStage.QUEUED
    failures: int = 0
    failed_on: dict[tuple[WorkerId, Incarnation], None] = {}
    placed: Decision | None = None
    attempt: Attempt | None = None
    reserved_on: list[WorkerId] = []
    sent: list[int] = []  # tokens that the client has, or would have if it got them as they come
    kv: tuple[KvPhase, ...] = ()  # where the blocks came from, as far as workers have told
    cached_tokens: int = 0  # of the prompt; 0 as well while no worker has told
    kv_reports: dict[RequestId, KvPhase] = {}  # by work
    chains: dict[int, tuple[int, ...]] = {}  # keys of the prompt's full blocks, by block size
    id: RequestId = RequestId("")  # this and the next one are those of `arrived`, which everybody asks for
    own_tokens: int = 0  # of the prompt

    def __post_init__(self) -> None:
        self.id = self.arrived.request_id
        self.own_tokens = len(self.arrived.tokens) // TOKEN_BYTES

    @property
    def session_key(self) -> SessionKey:
        return self.arrived.tenant, self.arrived.session

    @property
    def prompt(self) -> TokenBytes:
        """What a worker has to go on from: the prompt, and the tokens that the client already has."""
        if not self.sent:
            return self.arrived.tokens
        return self.arrived.tokens + b"".join([token.to_bytes(TOKEN_BYTES, "little") for token in self.sent])

    @property
    def prompt_tokens(self) -> int:
        return self.own_tokens + len(self.sent)

    @property
    def remaining_tokens(self) -> int:
        """That the answer may still have."""
        return self.arrived.sampling.max_tokens - len(self.sent)

    def wait_key(self) -> Hashable:
        """Who may serve it, as far as that depends neither on its session nor on its length: equal for those whom the same ones may."""
        arrived = self.arrived
        if (
            arrived.pin is None
            and not arrived.labels
            and arrived.among is None
            and arrived.adapter is None
            and arrived.sampling.form is None
            and arrived.placement is _AUTO
            and arrived.kv_path is None
            and not self.failures
        ):
            return None  # as most have it
        return (
            arrived.pin,
            arrived.labels,
            arrived.among,
            arrived.adapter,
            arrived.sampling.form is not None,
            arrived.placement,
            arrived.kv_path,
            self.failures > 0,
            frozenset(self.failed_on),
        )

    @property
    def may_continue(self) -> bool:
        """Whether another worker would go on exactly as the lost one would have, as far as anybody can tell."""
        return not self.sent or self.arrived.sampling.stateless

    def start_over(self) -> None:
        """Forget the answer so far, of which the client has seen nothing."""
        assert self.arrived.whole, self.id
        self.sent.clear()

    def sampling(self, *, max_tokens: int) -> Sampling:
        sampling = self.arrived.sampling
        if max_tokens == sampling.max_tokens:
            return sampling
        min_tokens = max(0, min(max_tokens, sampling.min_tokens - len(self.sent)))
        return structs.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)

    def keys(self, block_tokens: int) -> tuple[int, ...]:
        """Of the full blocks of the prompt as it is now (`forget_chains` when tokens were sent since)."""
        if (keys := self.chains.get(block_tokens)) is None:
            known = None if self.sent else self.arrived.keys.get(block_tokens)
            keys = self.hasher(self.prompt, block_tokens, self.arrived.salt) if known is None else known
            self.chains[block_tokens] = keys
        return keys

    @property
    def first_key(self) -> int:
        """Of the prompt's first full block; 0: it has none, or none is known yet."""
        for keys in self.chains.values():
            if keys:
                return keys[0]
        return 0

    def forget_chains(self) -> None:
        self.chains = {}

    def placement_request(
        self, now: Nanos, *, bound: WorkerId | None = None, must_keep: bool = False
    ) -> PlacementRequest:
        """For placement.

        Args:
            now: The instant of the decision.
            bound: Where this session's last request went.
            must_keep: Whether it has to go there too.
        """
        arrived, sent = self.arrived, len(self.sent)
        return PlacementRequest(
            prompt_tokens=self.own_tokens + sent,
            answer_tokens=arrived.sampling.max_tokens - sent,
            placement=arrived.placement,
            kv_path=arrived.kv_path,
            session=arrived.session,
            bound=bound,
            must_keep=must_keep,
            pin=arrived.pin,
            labels=arrived.labels,
            among=arrived.among,
            adapter=arrived.adapter,
            form=arrived.sampling.form is not None,
            first_key=self.first_key,
            seconds_left=None if arrived.deadline is None else (arrived.deadline - now) / SECOND,
            now=now,
        )

    def emits_prefill_token(self, kv_path: KvPath) -> bool:
        """Whether the token that a prefill worker sampled goes to the client.

        Then the decode worker gets it as part of its prompt, which takes sampling that does not depend on who sampled
        the tokens before. With the direct way the engines agree among themselves that decoding starts from the prompt.
        """
        return kv_path is KvPath.STORE and self.arrived.sampling.stateless

    def ends_with_prefill_token(self, kv_path: KvPath) -> bool:
        """Whether an end of sequence that a prefill worker sampled ends the answer.

        Not where that token is dropped and the decode worker draws one by chance: the end would have two chances.
        """
        sampling = self.arrived.sampling
        return self.emits_prefill_token(kv_path) or sampling.temperature == 0 or sampling.seed is not None

    def note_kv_report(self, attempt: Attempt, report: KvReport) -> None:
        """Note where the blocks of a piece of work came from; what is told later replaces what was told first.

        A prompt token is cached when no phase has computed it. A worker that was lost after its first tokens counts:
        what it computed was computed.
        """
        kv_reports = self.kv_reports
        kv_reports[attempt.id] = KvPhase(phase=attempt.phase, worker_id=attempt.worker_id, report=report)
        self.kv = tuple(kv_reports.values())
        self.cached_tokens = min(self.own_tokens, *[phase.report.cached_tokens for phase in self.kv])
