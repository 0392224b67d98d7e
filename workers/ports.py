"""Ports of a worker: what its server needs of the engine, the routers' streams, the store and the registry."""

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
    """Pin a chain, as far as the store has it; it replaces the session's former pin."""

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

    name: str  # with its version, as in "vllm 0.32.0"
    model: ModelName
    block_tokens: int
    max_model_len: int
    kv_blocks: int
    max_running: int
    fingerprint: str  # digest of the KV namespace
    kv_paths: tuple[KvPath, ...]
    store_id: StoreId | None = None  # the KV store node that the engine writes to
    kv: Fingerprint | None = None  # the meaning and the layout of its blocks; None: unknown
    keeps_forms: bool = False  # true if it supports structured output
    sampling_fields: tuple[str, ...] = ()  # the fields of `fleet.core.requests.ENGINE_FIELDS` that it supports
    continued_fields: tuple[str, ...] = ()  # `fleet.core.requests.STATE_FIELDS` whose state it rebuilds
    adapters: tuple[LoraAdapter, ...] = ()  # LoRA adapters that it can load
    adapter_slots: int = 0  # LoRA adapters loaded at a time; 0: all of them
    parsers: AnswerParsers | None = None  # parsers of its answers; None: none


def facts_with_store(facts: EngineFacts, kv_paths: Sequence[KvPath], store_id: StoreId | None) -> EngineFacts:
    """Return the facts of an engine whose store node is the given one; None: no node has answered yet.

    Args:
        facts: Facts of the engine, with any store or none.
        kv_paths: KV paths of the engine when its store answers.
        store_id: The node. Without it the path through the store is left out.
    """
    open_paths = tuple(path for path in kv_paths if path is not KvPath.STORE or store_id is not None)
    return msgspec.structs.replace(facts, store_id=store_id, kv_paths=open_paths)


EngineOutput = Sequence[Progress | Rejected]
"""The output of one decode step, for all requests that it advanced."""


class Pulse(Struct, frozen=True, kw_only=True):
    """The progress of one scheduler of an engine, for the watchdog."""

    steps: int
    """Steps that the scheduler has begun. It begins a step when the previous one has ended, or at most one step earlier.
    """

    tokens: int
    """Prompt and answer tokens of the current step, or of the last step if none runs."""

    working: bool
    """True if the scheduler holds work that its steps should advance."""

    novel: bool = False
    """True if some of that work is of a kind that it has not done before and that may take far longer than a usual step.
    """

    fetch_limit: Nanos = Nanos(0)
    """The time limit of the KV transfers from other engines that this work waits for, which a step may wait for as well;
    0: it waits for none."""


class Engine(Protocol):
    """One running engine. `open_engine`, an async context manager, starts and stops it.

    `fleet.app.worker` finds it by the entry point of the group `workers.engines` that the setting `engine` names.

    An engine never blocks the event loop. After `submit` a request ends in exactly one `Progress` with a `finish`, or
    one `Rejected`. After `cancel` it ends as well, with `Finish.CANCELLED` unless it ended before, and the engine
    spends no further step on it. When the engine itself dies, `outputs()` raises `EngineDied`.

    The first `Progress` with tokens has the KV report (`kv`), so that it is known however the request ends. The
    finish has it again, and its values count.
    """

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's description.

        While the engine runs, only `store_id` and `kv_paths` change: an engine joins a store that did not answer at
        the start as soon as the store answers.
        """
        ...

    def submit(self, start: Start) -> None:
        """Take an attempt; an invalid one comes back as `Rejected` from `outputs()`.

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
        """The number of handoffs whose blocks the engine holds until a decode engine has fetched them or their lease ends."""
        ...


@runtime_checkable
class BlockSaver(Protocol):
    """An engine that writes blocks to the store on request; other engines write each block once, when it is full."""

    async def save(self, names: Sequence[BlockHash], within: Nanos) -> int:
        """Write the given blocks that the engine holds and the store lacks, within a time from now.

        Return their number.

        Store failures raise nothing.
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
        """True if the router has not taken earlier messages yet; `RouterSession.flow` is called when it has."""
        ...

    def put(self, message: WorkerMessage) -> None:
        """Send a message. The call never waits and never calls back."""
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
        """Return when all blocks have been copied or no more can be, at the latest at the deadline.

        Args:
            prompts: The recent prompts; the last one is the newest.
            cached: Names of the blocks in the engine's cache, in the order in which they were stored.
            deadline: An instant of the server's clock.
        """
        ...


class WorkerReplaced(Exception):
    """The worker process has to end, because another process has its id; its supervisor decides what happens next."""
