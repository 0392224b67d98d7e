"""Ports of a worker: the interfaces that its server needs, to the engine, the routers' streams and the store (pins, evacuation)."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId, StoreId
from fleet.core.requests import AnswerParsers, PoolingModel, TokenBytes
from fleet.core.roles import KvPath
from fleet.core.work import KvEvent, LoadReport, LoraAdapter, Progress, Rejected, Start, WorkerMessage
from kvstore.block import BlockHash
from kvstore.layouts.fingerprint import Fingerprint

KvLayout = Literal["HND", "NHD"]
"""Order of the axes heads (H), tokens (N) and elements (D) in one layer's KV of a block."""


class PinChain(Struct, frozen=True, kw_only=True):
    """Asks the store to pin those leading blocks of a chain that the store has. The pin replaces the session's earlier pin."""

    session: str
    tokens: TokenBytes
    salt: bytes
    lasting: Nanos


class UnpinChain(Struct, frozen=True, kw_only=True):
    """Asks the store to end a session's pin, because the session has sent another request."""

    session: str


class RecentPrompt(Struct, frozen=True):
    tokens: TokenBytes
    salt: bytes


class EngineFacts(Struct, frozen=True, kw_only=True):
    """Description of a started engine."""

    name: str  # name and version, as in "vllm 0.32.0"
    model: ModelName
    block_tokens: int
    max_model_len: int
    kv_blocks: int
    max_running: int
    fingerprint: str  # digest of the KV namespace; workers can share blocks only if their digests are equal
    kv_paths: tuple[KvPath, ...]
    # Id of the KV store node that the engine reads and writes; None: there is no node, or it has not answered.
    store_id: StoreId | None = None
    kv: Fingerprint | None = None  # the meaning and the layout of the engine's blocks; None: they are not known
    keeps_forms: bool = False  # True if the engine supports structured output
    # Names from `fleet.core.requests.ENGINE_FIELDS`: the fields that the engine supports. If the engine takes images, the
    # tuple also contains `IMAGES`.
    sampling_fields: tuple[str, ...] = ()
    # The fields of `fleet.core.requests.STATE_FIELDS` whose state the engine rebuilds when it continues an answer.
    continued_fields: tuple[str, ...] = ()
    adapters: tuple[LoraAdapter, ...] = ()  # LoRA adapters that the engine can load; empty: it takes none
    adapter_slots: int = 0  # number of LoRA adapters that can be loaded at a time; 0: all adapters
    # Names of the parsers of the engine's answers; None: the answers are not parsed.
    parsers: AnswerParsers | None = None
    pooling: PoolingModel | None = None  # description of a pooling model; None: the model generates tokens


def facts_with_store(facts: EngineFacts, kv_paths: Sequence[KvPath], store_id: StoreId | None) -> EngineFacts:
    """Return the description of an engine with the store node `store_id`.

    Args:
        facts: Description of the engine, with or without a store.
        kv_paths: KV paths of the engine when its store answers.
        store_id: Id of the node; None if no node has answered. The KV path through the store is then left out.
    """
    open_paths = tuple(path for path in kv_paths if path is not KvPath.STORE or store_id is not None)
    return msgspec.structs.replace(facts, store_id=store_id, kv_paths=open_paths)


EngineOutput = Sequence[Progress | Rejected]
"""Outputs of one engine step: one for each request that has got tokens in the step, or that has ended."""


class Pulse(Struct, frozen=True, kw_only=True):
    """Progress of one scheduler of an engine at one instant; the watchdog compares it with the previous pulse."""

    steps: int
    """Number of steps that the scheduler has begun since its start. At most two of them have not ended, because a scheduler
    may prepare the next step while the engine computes the current one."""

    tokens: int
    """Number of prompt and answer tokens in the current step, or in the last step if none runs. If two steps overlap, the larger
    number."""

    working: bool
    """True if the scheduler has work that its steps should advance."""

    novel: bool = False
    """True if the scheduler has work of a kind that the engine has not done before, and that may take far longer than a
    usual step."""

    fetch_limit: Nanos = Nanos(0)
    """Time limit of the KV transfers from other engines for which requests of this scheduler wait; 0 if none waits. Such
    a transfer can delay a step, so the watchdog's patience is at least this time, but at most
    `WatchdogSettings.ceiling_seconds` (`workers.watchdog`)."""


class Engine(Protocol):
    """Port of a running engine. `open_engine`, an async context manager, starts and stops it.

    `fleet.app.worker` finds `open_engine` by the setting `engine`, which names an entry point of the group
    `workers.engines`.

    An engine never blocks the event loop. After `submit` a request ends in exactly one `Progress` with a `finish`, or
    one `Rejected`. A request also ends after `cancel`, with `Finish.CANCELLED` unless it has ended already, and the
    engine computes no more steps for it. When the engine itself ends, `outputs()` raises `EngineDied`.

    The first `Progress` with tokens has the KV report (`kv`), so that the report is known even if the request fails
    later. The `Progress` with the finish has the report again; if the two differ, the later one is right.
    """

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's description.

        While the engine runs, only `store_id` and `kv_paths` change: if the store did not answer at the start, the
        engine joins it as soon as it answers.
        """
        ...

    def submit(self, start: Start) -> None:
        """Queue an attempt. If the attempt is invalid, `outputs()` yields a `Rejected`.

        For prefill, the final `Progress` carries the first token and a `Handoff`; the server fills in the handoff's
        `prefill_worker`. For decode, `start.handoff` names the blocks to fetch; blocks that cannot be fetched are
        computed instead.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request. Do nothing if the engine does not have this id, because the request may just have ended."""
        ...

    def outputs(self) -> AsyncIterator[EngineOutput]:
        """Yield the outputs of each step, in order. Only one caller may read them."""
        ...

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """Yield the changes of the prefix cache, in order; the cache is empty before the first change. Only one caller may read them."""
        ...

    def load(self) -> LoadReport: ...

    def pulses(self) -> Sequence[Pulse]:
        """Return the progress of each scheduler, always in the same order.

        The server calls this once in `load_interval_ms` (`workers.settings`), by default ten times a second.

        An empty result means that the engine does not show its steps, so a hang stays unnoticed.
        """
        ...

    def traced(self) -> bool:
        """Return whether a debugger is attached to one of the engine's processes.

        The call is slow, so the server makes it only when it suspects that the engine hangs.
        """
        ...

    def kill(self) -> None:
        """Kill the processes of the engine at once, even if they do not respond.

        After this call the engine yields no events, and the server leaves the engine's context.
        """
        ...

    @property
    def lent(self) -> int:
        """Number of handoffs whose blocks the engine keeps until a decode engine has fetched them or their lease ends."""
        ...


@runtime_checkable
class BlockSaver(Protocol):
    """An engine that can write blocks of its prefix cache to the store when the evacuation calls `save`.

    Other engines write a block only when it becomes full, or when it is handed off through the store.
    """

    async def save(self, names: Sequence[BlockHash], within: Nanos) -> int:
        """Write those blocks that the engine has and the store does not have; return how many were written.

        The call takes at most the time `within`. A failure of the store raises no exception.
        """
        ...


class EngineDied(Exception):
    """Raised when the engine cannot work any more.

    It did not start, it ended without an order, or a rank of its group is missing or lost.

    The worker process then has to end too, so that its supervisor starts another one.
    """


class EngineHung(EngineDied):
    """Raised when the engine made no progress on its work and was killed.

    The worker process has to end, as with `EngineDied`.
    """


class Outlet(Protocol):
    """Port of the sending side of one router's stream."""

    @property
    def full(self) -> bool:
        """True if the send buffer is full, because the router reads too slowly.

        When the buffer has room again, the outlet's owner calls `RouterSession.flow`.
        """
        ...

    def put(self, message: WorkerMessage) -> None:
        """Send a message. The call returns at once, and it does not call the session."""
        ...

    def end(self, why: str) -> None:
        """End the stream after the messages that were `put`. Send the router `why` as the cause; empty: a normal end without a cause."""
        ...


class PinKeeper(Protocol):
    """Port that asks the store to pin the chains of paused sessions."""

    def keep(self, asked: Iterable[PinChain | UnpinChain]) -> None:
        """Pin and unpin in the background. If a pin fails, the store may evict the blocks, and an engine computes them again."""
        ...


class Evacuator(Protocol):
    """Port that copies warm blocks to where other workers can read them."""

    async def evacuate(self, prompts: Sequence[RecentPrompt], cached: Sequence[BlockHash], deadline: Nanos) -> None:
        """Copy warm blocks. Return when all of them are copied or no more can be copied, and at the latest at the deadline.

        Args:
            prompts: The recent prompts; the last one is the newest.
            cached: Names of the blocks in the engine's cache, in the order in which they were stored.
            deadline: An instant of the server's clock.
        """
        ...


class WorkerReplaced(Exception):
    """Raised when another process has registered under this worker's id, or has kept the id for too long.

    The worker process has to end, and its supervisor decides what happens next.
    """
