"""What the worker's server needs of the world: an engine, and a place to say that it is here."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol, runtime_checkable

import msgspec
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import Incarnation, ModelName, RequestId, StoreId, WorkerId
from fleet.core.roles import KvPath
from fleet.core.work import KvEvent, LoadReport, LoraAdapter, Progress, Rejected, Start, WorkerMessage
from kvstore.block import BlockHash
from kvstore.layouts.fingerprint import Fingerprint
from workers.store.evacuation_priority import RecentPrompt
from workers.store.session_pins import PinChain, UnpinChain


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What a started engine says of itself."""

    name: str  # with version, as in "vllm 0.32.0"
    model: ModelName
    block_tokens: int
    max_model_len: int
    kv_blocks: int
    max_running: int
    fingerprint: str  # of the KV namespace
    kv_paths: tuple[KvPath, ...]
    store_id: StoreId | None = None  # of the KV store node that the engine writes to
    kv: Fingerprint | None = None  # what its blocks are and how they lie in its memory; None: it does not say
    keeps_forms: bool = (
        False  # whether it can see to it that an answer is of a form (`fleet.core.requests.StructuredOutput`)
    )
    adapters: tuple[LoraAdapter, ...] = ()  # that it can load
    adapter_slots: int = 0  # adapters that are loaded at a time; 0: all of them


def facts_with_store(facts: EngineFacts, kv_paths: Sequence[KvPath], store_id: StoreId | None) -> EngineFacts:
    """Return the facts of an engine whose store node is the given one; None: no node has answered yet.

    Args:
        facts: Of the engine, with any store or none.
        kv_paths: Ways that the engine has where its store answers.
        store_id: Of the node. Without it there is no way through the store.
    """
    open_paths = tuple(path for path in kv_paths if path is not KvPath.STORE or store_id is not None)
    return msgspec.structs.replace(facts, store_id=store_id, kv_paths=open_paths)


EngineOutput = Sequence[Progress | Rejected]
"""What one decode step brought, for all requests that it advanced."""


class Pulse(Struct, frozen=True, kw_only=True):
    """The progress of one scheduler of an engine, as a watchdog looks at it."""

    steps: int
    """Steps that it has begun. It begins none before the one before has ended, or at most one before."""

    tokens: int
    """Prompt and answer tokens of the step that is under way; of the last one while none is."""

    working: bool
    """True if it holds work that steps should bring forward."""

    novel: bool = False
    """True if some of that work is of a kind that it has not done before, and may take far longer than a step usually does."""


class Engine(Protocol):
    """One running engine. Made by an async context manager (`open_engine`) that has it ready, and that stops it.

    An engine never blocks the event loop. After `submit` a request ends in exactly one `Progress` with a `finish`, or
    one `Rejected`; after `cancel` it ends as well (with `Finish.CANCELLED`, unless it ended before), and the engine
    spends no further step on it. When the engine itself dies, `outputs()` raises `EngineDied`.

    The first `Progress` with tokens says where the blocks of the prompt came from (`kv`), so that it is known however
    the request ends; the finish says it again, and has the last word.
    """

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's description of itself.

        Of a running engine only `store_id` and `kv_paths` change: a store that did not answer at the start is joined when it does.
        """
        ...

    def submit(self, start: Start) -> None:
        """Take a piece of work; what is wrong with it comes back as `Rejected` from `outputs()`.

        For prefill work the final `Progress` carries the first token and a `Handoff` (whose `prefill_worker` the
        engine leaves to the server to fill in). For decode work `start.handoff` names the blocks to fetch; blocks
        that cannot be fetched are computed instead.
        """
        ...

    def cancel(self, request_id: RequestId) -> None:
        """Stop a request; unknown ids are ignored, since it may just have ended."""
        ...

    def outputs(self) -> AsyncIterator[EngineOutput]:
        """One item a decode step, in order; one consumer."""
        ...

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        """Changes of the prefix cache, from an empty cache on; one consumer."""
        ...

    def load(self) -> LoadReport: ...

    def pulses(self) -> Sequence[Pulse]:
        """The progress of each of its schedulers, always in the same order. Cheap: it is asked ten times a second.

        None at all: this engine does not show its steps, and nobody notices when it hangs.
        """
        ...

    def traced(self) -> bool:
        """True if a debugger has one of its processes. Not cheap: it is asked when the engine is suspected of a hang."""
        ...

    def kill(self) -> None:
        """End its processes at once, which may answer nothing any more. After that it brings nothing; the context is left next."""
        ...

    @property
    def lent(self) -> int:
        """Hand-offs whose blocks it holds until a decode engine has fetched them, or their lease ends."""
        ...


@runtime_checkable
class BlockSaver(Protocol):
    """An engine that writes blocks of its own memory to the store when it is asked; others do so once, as they fill."""

    async def save(self, names: Sequence[BlockHash], within: Nanos) -> int:
        """Write those of these blocks that it holds and the store does not, within a time from now; returns how many.

        Never raises because of the store.
        """
        ...


class EngineDied(Exception):
    """The engine stopped by itself; the worker process has to go, so that its supervisor starts another."""


class EngineHung(EngineDied):
    """The engine made no progress on work that it holds, and was killed; otherwise like `EngineDied`."""


class Outlet(Protocol):
    """Where messages to one router leave."""

    @property
    def full(self) -> bool:
        """Whether the router has not taken what was sent before; `Session.flow` is called when it has."""
        ...

    def put(self, message: WorkerMessage) -> None:
        """Send. Never waits, and never calls back."""
        ...

    def end(self, why: str) -> None:
        """End the stream after what was put. The router is told why; an empty text says that this is as it should be."""
        ...


class PinKeeper(Protocol):
    """Where the chains of sessions that wait are kept."""

    def keep(self, asked: Iterable[PinChain | UnpinChain]) -> None:
        """In the background, as far as it goes: nothing comes of it but blocks that are there later."""
        ...


class Evacuator(Protocol):
    """Who brings warm blocks to where other workers read them."""

    async def evacuate(self, prompts: Sequence[RecentPrompt], cached: Sequence[BlockHash], deadline: Nanos) -> None:
        """Return when all that is worth it has been brought away, or cannot be; by the deadline at the latest.

        Args:
            prompts: The latest ones, the very latest last.
            cached: Names of the blocks in the engine's cache, in the order in which they came.
            deadline: By the server's clock.
        """
        ...


class Registry(Protocol):
    """Where a worker says that it is here."""

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        """Take or renew a membership; returns how long it lasts.

        Raises:
            RegistryUnreachable: Try again; serving goes on meanwhile. So it is with `RegistrationRefused`.
            NameHeld: Another process has this worker's id, and is there. Try again for a while if this process never had it.
            Superseded: Do not try again.
        """
        ...

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...


class RegistryUnreachable(Exception):
    """The registry did not answer in time."""


class RegistrationRefused(RegistryUnreachable):
    """The registry answers, and does not take this worker, because of what the worker proves; the message says what to set."""


class NameHeld(Exception):
    """Another process holds this worker's id, and its lease has not ended; the message says which one."""


class WorkerReplaced(Exception):
    """The worker process has to end, because another process has its id; its supervisor decides what follows."""


class WorkerSuperseded(Exception):
    """A newer process has this worker's id; the message says whose mistake that may be."""
