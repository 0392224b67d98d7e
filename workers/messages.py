"""Events that a worker's machine hears, and commands that it gives."""

from collections.abc import Sequence
from typing import NewType

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.core.work import Draining, Progress, Rejected, Start, Step
from workers.ports import EngineFacts

StreamId = NewType("StreamId", int)
"""One connection of one router; never used twice."""


class EngineReady(Struct, frozen=True):
    """The engine runs."""


class FactsChanged(Struct, frozen=True, kw_only=True):
    """The engine has joined its store."""

    facts: EngineFacts


class RouterConnected(Struct, frozen=True, kw_only=True):
    stream: StreamId
    router_id: str


class RouterGone(Struct, frozen=True, kw_only=True):
    """The stream ended, for whatever reason."""

    stream: StreamId


class AttemptRequested(Struct, frozen=True, kw_only=True):
    stream: StreamId
    start: Start


class CancelRequested(Struct, frozen=True, kw_only=True):
    stream: StreamId
    request_id: RequestId


class EngineStepped(Struct, frozen=True, kw_only=True):
    """What the engine brought."""

    outputs: Sequence[Progress | Rejected]
    lent: int = 0  # hand-offs whose blocks the engine holds now, those of these outputs included


class DrainRequested(Struct, frozen=True, kw_only=True):
    deadline: Nanos


class WorkerTicked(Struct, frozen=True, kw_only=True):
    """Time passed: deadlines may have."""

    lent: int = 0  # as of `EngineStepped`


class EngineStuck(Struct, frozen=True):
    """The engine hangs: it makes no progress on the work that it holds."""


class EvacuationEnded(Struct, frozen=True):
    """Nothing more is brought away, be it that all has been or that it cannot."""


WorkerEvent = (
    EngineReady
    | FactsChanged
    | RouterConnected
    | RouterGone
    | AttemptRequested
    | CancelRequested
    | EngineStepped
    | DrainRequested
    | WorkerTicked
    | EvacuationEnded
    | EngineStuck
)


class Submit(Struct, frozen=True, kw_only=True):
    """Give work to the engine. Its request id is the engine's, see rule 3 of `workers.machine`."""

    start: Start


class CancelInEngine(Struct, frozen=True, kw_only=True):
    """Stop work in the engine."""

    request_id: RequestId


class Tell(Struct, frozen=True, kw_only=True):
    stream: StreamId
    message: Step | Rejected | Draining


class CutStream(Struct, frozen=True, kw_only=True):
    """End a stream from this side."""

    stream: StreamId


class Evacuate(Struct, frozen=True, kw_only=True):
    """Bring warm blocks to where other workers read them, and say `EvacuationEnded` by the deadline."""

    deadline: Nanos


class Drained(Struct, frozen=True, kw_only=True):
    """Drained: the process may end. Nothing but refusals follows."""

    cancelled: int  # requests that did not finish in time
    unfetched: int = 0  # hand-offs that nobody had fetched by the deadline


class Abandon(Struct, frozen=True, kw_only=True):
    """End all streams and the engine now: the process ends. Nothing follows, and no router is told anything else."""

    lost: int  # requests that run elsewhere from now on, if their routers can


WorkerCommand = Submit | CancelInEngine | Tell | CutStream | Evacuate | Drained | Abandon
