"""Messages of a worker: the events that its machine takes, and the commands that it returns."""

from collections.abc import Sequence
from typing import NewType

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.core.work import Draining, Progress, Rejected, Start, Step
from workers.ports import EngineFacts

StreamId = NewType("StreamId", int)
"""Number of one connection of one router; no number is used twice."""


class EngineReady(Struct, frozen=True):
    """The engine has started and runs."""


class FactsChanged(Struct, frozen=True, kw_only=True):
    """The engine's description has changed, because the engine has joined its store."""

    facts: EngineFacts


class RouterConnected(Struct, frozen=True, kw_only=True):
    stream: StreamId
    router_id: str


class RouterGone(Struct, frozen=True, kw_only=True):
    """A router's stream has ended, for whatever reason."""

    stream: StreamId


class AttemptRequested(Struct, frozen=True, kw_only=True):
    stream: StreamId
    start: Start


class CancelRequested(Struct, frozen=True, kw_only=True):
    stream: StreamId
    request_id: RequestId


class EngineStepped(Struct, frozen=True, kw_only=True):
    """The engine has finished a step."""

    outputs: Sequence[Progress | Rejected]
    lent: int = 0  # number of handoffs whose blocks the engine still keeps, including those of these outputs


class DrainRequested(Struct, frozen=True, kw_only=True):
    deadline: Nanos


class WorkerTicked(Struct, frozen=True, kw_only=True):
    """Time has passed, so deadlines may have passed as well."""

    lent: int = 0  # number of handoffs whose blocks the engine still keeps


class EngineStuck(Struct, frozen=True):
    """The engine hangs: it makes no progress on the work that it holds."""


class EvacuationEnded(Struct, frozen=True):
    """The evacuation has ended: all warm blocks were copied, or no more can be copied."""


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
    """Give an attempt to the engine. The request id is the engine's id (`workers.machine`, rule 3)."""

    start: Start


class CancelInEngine(Struct, frozen=True, kw_only=True):
    """Stop an attempt in the engine."""

    request_id: RequestId


class Tell(Struct, frozen=True, kw_only=True):
    stream: StreamId
    message: Step | Rejected | Draining


class CutStream(Struct, frozen=True, kw_only=True):
    """Close a router's stream from the worker's side."""

    stream: StreamId


class Evacuate(Struct, frozen=True, kw_only=True):
    """Copy warm blocks to where other workers can read them, and send `EvacuationEnded` by the deadline."""

    deadline: Nanos


class Drained(Struct, frozen=True, kw_only=True):
    """The worker has drained, and the process may end. From now on the worker only sends rejections."""

    cancelled: int  # number of requests that did not finish in time
    unfetched: int = 0  # number of handoffs that no decode worker had fetched by the deadline


class Abandon(Struct, frozen=True, kw_only=True):
    """Close all streams and end the engine now, because the process ends. Routers get no other message."""

    lost: int  # number of requests that their routers now have to run on other workers


WorkerCommand = Submit | CancelInEngine | Tell | CutStream | Evacuate | Drained | Abandon
