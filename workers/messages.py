"""Messages of a worker: the events that its machine takes, and the commands that it returns."""

from collections.abc import Sequence
from typing import NewType

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.core.work import AnswersWanted, Draining, KeptAnswers, Progress, Rejected, Start, Step
from workers.ports import EngineFacts

StreamId = NewType("StreamId", int)
"""Number of a router's stream at this worker; no number is used twice."""


class EngineReady(Struct, frozen=True):
    """The engine has started, so it can take attempts."""


class FactsChanged(Struct, frozen=True, kw_only=True):
    """The engine's description has changed, because the engine has joined its KV store after the start."""

    facts: EngineFacts


class RouterConnected(Struct, frozen=True, kw_only=True):
    stream: StreamId
    router_id: str


class RouterGone(Struct, frozen=True, kw_only=True):
    """A router's stream has ended, for any reason."""

    stream: StreamId


class AttemptRequested(Struct, frozen=True, kw_only=True):
    stream: StreamId
    start: Start


class CancelRequested(Struct, frozen=True, kw_only=True):
    stream: StreamId
    request_id: RequestId


class AnswersRequested(Struct, frozen=True, kw_only=True):
    """A router asks for the kept tokens of answers, because their clients resume them (`workers.answer_keeper`)."""

    stream: StreamId
    wanted: AnswersWanted


class EngineStepped(Struct, frozen=True, kw_only=True):
    """The engine has finished a step, with these outputs."""

    outputs: Sequence[Progress | Rejected]
    lent: int = 0  # number of handoffs whose blocks the engine keeps now, including the handoffs in `outputs`


class DrainRequested(Struct, frozen=True, kw_only=True):
    deadline: Nanos


class WorkerTicked(Struct, frozen=True, kw_only=True):
    """The server sends this event every `load_interval_ms`, so that the machine checks its deadlines."""

    lent: int = 0  # number of handoffs whose blocks the engine keeps now


class EngineStuck(Struct, frozen=True):
    """The engine hangs: it has attempts, but makes no progress on them."""


class EvacuationEnded(Struct, frozen=True):
    """The evacuation has ended: all warm blocks were copied, no more can be copied, it failed, or its deadline has passed."""


WorkerEvent = (
    EngineReady
    | FactsChanged
    | RouterConnected
    | RouterGone
    | AttemptRequested
    | CancelRequested
    | AnswersRequested
    | EngineStepped
    | DrainRequested
    | WorkerTicked
    | EvacuationEnded
    | EngineStuck
)


class Submit(Struct, frozen=True, kw_only=True):
    """Give an attempt to the engine.

    The request id in `start` is unique within the engine, and may differ from the router's id of the request
    (`workers.machine`, rule 3).
    """

    start: Start


class CancelInEngine(Struct, frozen=True, kw_only=True):
    """Cancel an attempt in the engine; `request_id` is its engine id (`workers.machine`, rule 3)."""

    request_id: RequestId


class Tell(Struct, frozen=True, kw_only=True):
    stream: StreamId
    message: Step | Rejected | Draining | KeptAnswers


class CutStream(Struct, frozen=True, kw_only=True):
    """Close a router's stream, because the router has connected again (`workers.machine`, rule 5)."""

    stream: StreamId


class WarnOfSharedRouterId(Struct, frozen=True, kw_only=True):
    """Log that probably two routers have the same `router_id`, because their streams replace each other."""

    router_id: str


class Evacuate(Struct, frozen=True, kw_only=True):
    """Copy warm blocks to where other workers can read them, and send `EvacuationEnded` by the deadline."""

    deadline: Nanos


class Drained(Struct, frozen=True, kw_only=True):
    """The worker has drained, and the process may end. From now on, the worker rejects every attempt."""

    cancelled: int  # number of attempts that were aborted, because they still ran at the drain's deadline
    unfetched: int = 0  # number of handoffs whose blocks the engine still keeps for decode workers


class Abandon(Struct, frozen=True, kw_only=True):
    """Close all streams and end the engine now, because the process ends. Routers get no other message."""

    lost: int  # number of attempts that ended in this way; their routers have to run them on other workers


WorkerCommand = Submit | CancelInEngine | Tell | CutStream | WarnOfSharedRouterId | Evacuate | Drained | Abandon
