"""Ports of a worker: the interfaces that its server needs of the engine, the routers' streams, the store and the registry."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId, StoreId
from fleet.core.requests import AnswerParsers, TokenBytes
from fleet.core.roles import KvPath
from fleet.core.work import KvEvent, LoadReport, LoraAdapter, Progress, Rejected, Start, WorkerMessage
from kvstore.block import BlockHash
from kvstore.layouts.fingerprint import Fingerprint

KvLayout = Literal["HND", "NHD"]
"""Order of heads (H), tokens (N) and elements (D) within a layer's KV of one block."""


class PinChain(Struct, frozen=True, kw_only=True):
    """Pin the part of a chain that the store has; this replaces the session's former pin."""

    session: str
    tokens: TokenBytes
    salt: bytes
    lasting: Nanos


class UnpinChain(Struct, frozen=True, kw_only=True):
    """End a session's pin, because the session has gone on."""

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
    fingerprint: str  # digest of the KV namespace
    kv_paths: tuple[KvPath, ...]
    store_id: StoreId | None = None  # id of the KV store node to which the engine writes; None: there is none now
    kv: Fingerprint | None = None  # the meaning and the layout of the engine's blocks; None: unknown
    keeps_forms: bool = False  # True if the engine supports structured output
    sampling_fields: tuple[str, ...] = ()  # the fields of `fleet.core.requests.ENGINE_FIELDS` that the engine supports
    continued_fields: tuple[str, ...] = ()  # `fleet.core.requests.STATE_FIELDS` whose state the engine rebuilds
    adapters: tuple[LoraAdapter, ...] = ()  # LoRA adapters that the engine can load
    adapter_slots: int = 0  # number of LoRA adapters that can be loaded at a time; 0: all of them
    parsers: AnswerParsers | None = None  # parsers of the engine's answers; None: there are none


def facts_with_store(facts: EngineFacts, kv_paths: Sequence[KvPath], store_id: StoreId | None) -> EngineFacts:
    """Return the facts of an engine whose store node is the given one; None: no node has answered yet.

    Args:
        facts: Facts of the engine, with any store or none.
        kv_paths: KV paths of the engine when its store answers.
        store_id: Id of the node. If it is None, the KV path through the store is left out.
    """
    open_paths = tuple(path for path in kv_paths if path is not KvPath.STORE or store_id is not None)
    return msgspec.structs.replace(facts, store_id=store_id, kv_paths=open_paths)


EngineOutput = Sequence[Progress | Rejected]
"""Output of one decode step, for all requests that the step advanced."""


class Pulse(Struct, frozen=True, kw_only=True):
    """The progress of one scheduler of an engine, for the watchdog."""

    steps: int
    """Number of steps that the scheduler has begun. It begins a step when the previous one has ended, or at most one step earlier.
    """

    tokens: int
    """Number of prompt and answer tokens in the current step, or in the last step if none runs."""

    working: bool
    """True if the scheduler has work that its steps should advance."""

    novel: bool = False
    """True if some of that work is of a kind that it has not done before and that may take far longer than a usual step.
    """

    fetch_limit: Nanos = Nanos(0)
    """Time limit of the KV transfers from other engines for which this work waits, because a step may wait for them too;
    0: the work waits for no transfer."""


class Engine(Protocol):
    """One running engine. `open_engine`, an async context manager, starts and stops it.

    `fleet.app.worker` finds it by the entry point of the group `workers.engines` that the setting `engine` names.

    An engine never blocks the event loop. After `submit` a request ends in exactly one `Progress` with a `finish`, or
    one `Rejected`. After `cancel` it ends as well, with `Finish.CANCELLED` unless it ended before, and the engine
    computes no further step for it. When the engine itself ends, `outputs()` raises `EngineDied`.

    The first `Progress` with tokens has the KV report (`kv`), so that the report is known however the request ends. The
    finish has the report again, and these later values are valid.
    """

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's description.

        While the engine runs, only `store_id` and `kv_paths` change: an engine joins a store that did not answer at
        the start as soon as the store answers.
        """
        ...

    def submit(self, start: Start) -> None:
        """Queue an attempt; if it is invalid, `outputs()` yields a `Rejected` for it.

        For prefill, the final `Progress` carries the first token and a `Handoff`; the server fills in its
        `prefill_worker`. For decode, `start.handoff` names the blocks to fetch; blocks that cannot be fetched are
        computed instead.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Stop a request; unknown ids are ignored, because the request may just have ended."""
        ...

    def outputs(self) -> AsyncIterator[EngineOutput]:
        """Yield one item for each decode step, in order; there is one consumer."""
        ...

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """Yield changes of the prefix cache, starting from an empty cache; there is one consumer."""
        ...

    def load(self) -> LoadReport: ...

    def pulses(self) -> Sequence[Pulse]:
        """Return the progress of each scheduler, always in the same order. The server calls it ten times a second.

        An empty result means that the engine does not show its steps, so a hang stays unnoticed.
        """
        ...

    def traced(self) -> bool:
        """Return whether a debugger is attached to one of the engine's processes.

        The call is slow, so it is made only when a hang is suspected.
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
    """An engine that writes blocks to the store on request; other engines write each block once, when it is full."""

    async def save(self, names: Sequence[BlockHash], within: Nanos) -> int:
        """Write the given blocks that the engine has and the store lacks, within a time from now; return their number.

        Failures of the store raise no exception.
        """
        ...


class EngineDied(Exception):
    """The engine ended by itself. The worker process has to end too, so that its supervisor starts another one."""


class EngineHung(EngineDied):
    """The engine made no progress on its work and was killed; otherwise like `EngineDied`."""


class Outlet(Protocol):
    """The sending side of one router's stream."""

    @property
    def full(self) -> bool:
        """True if the router has not read earlier messages yet; `RouterSession.flow` is called after it has read them."""
        ...

    def put(self, message: WorkerMessage) -> None:
        """Send a message. The call never waits, and never calls the session."""
        ...

    def end(self, why: str) -> None:
        """End the stream after the sent messages, and tell the router the cause; an empty text means a normal end."""
        ...


class PinKeeper(Protocol):
    """Asks the store to pin the chains of waiting sessions."""

    def keep(self, asked: Iterable[PinChain | UnpinChain]) -> None:
        """Pin and unpin in the background. Failures only mean that blocks may be missing later."""
        ...


class Evacuator(Protocol):
    """Copies warm blocks to where other workers can read them."""

    async def evacuate(self, prompts: Sequence[RecentPrompt], cached: Sequence[BlockHash], deadline: Nanos) -> None:
        """Copy blocks until all were copied or no more can be copied; return at the deadline at the latest.

        Args:
            prompts: The recent prompts; the last one is the newest.
            cached: Names of the blocks in the engine's cache, in the order in which they were stored.
            deadline: An instant of the server's clock.
        """
        ...


class WorkerReplaced(Exception):
    """The worker process has to end, because another process has its id; its supervisor decides what happens next."""
