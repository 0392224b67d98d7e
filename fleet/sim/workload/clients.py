"""Clients: simulated clients of a run, which decide when requests are sent, and send rejected requests again.

Rules:

1. Open clients send at the times of the workload and do not wait for answers.
2. Closed clients are a fixed number of users. Each user sends the workload's next request, waits for the whole answer, thinks, and
   sends the next one. Arrival times of the workload are ignored. Benchmarks at a fixed concurrency work in this way.
3. Session clients send the turns of sessions (`TraceSession`): a turn is sent after the answers to earlier turns. Either a fixed
   number of sessions runs at a time, or each session begins at the time that the workload states.
4. A client that waits for an answer sends its next request in a later event of the kernel. At that time, the router no
   longer handles the event that ended the answer. So the router is never called recursively.
5. A request that is rejected for a temporary reason is sent again up to `retries` times, each time after a longer pause. In the results,
   this counts as one request, which began when it was sent for the first time. If clients have a deadline, the request contains the
   deadline, and the client stops waiting when the deadline has passed.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Annotated, Protocol, TypeVar

from msgspec import Meta, Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.recording.agentic_traces import TraceSession
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import EndedRequest
from fleet.sim.world import World
from kvstore.eviction.trace_replay import TraceRequest

T = TypeVar("T", TraceRequest, TraceSession)
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]

Traffic = Iterator[TraceRequest] | Iterator[TraceSession]
"""Sessions that session clients send, or requests that clients of all other kinds send, one after the other."""

RETRYABLE = frozenset((Reason.NO_WORKER, Reason.QUEUE_FULL, Reason.RATE_LIMITED, Reason.DRAINING, Reason.WORKER_LOST))
"""Temporary reasons: if a request was rejected for one of them, its client may send it again."""


class ClientPatience(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadline and retries of clients; all kinds of clients have these settings."""

    deadline_seconds: Seconds = 0.0
    """Time from the first sending of a request until its client gives it up, if the answer is not complete by then; 0: never."""

    retries: Annotated[int, Meta(ge=0, le=100)] = 0
    """Maximum number of times that a request is sent again after it was rejected for a temporary reason (`RETRYABLE`)."""

    retry_seconds: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Pause before the first retry of a request, in seconds; the pause doubles before each further retry."""


class OpenClients(ClientPatience, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="open"):
    """Clients that send at the times of the workload and do not wait for answers."""


class ClosedClients(
    ClientPatience, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="closed"
):
    """A fixed number of users, each of whom sends the next request after the answer to the last one."""

    users: Count = 64
    think_seconds: Seconds = 0.0
    """Time from an answer to the user's next request."""

    ramp_seconds: Seconds = 0.0
    """Time over which the users begin, at equal distances; 0: all begin at once."""


class SessionClients(
    ClientPatience, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="sessions"
):
    """Clients that send the turns of sessions; a turn is sent after the answers to those earlier turns that it waits for."""

    users: Annotated[int, Meta(ge=0, le=1 << 20)] = 64
    """Number of sessions that run at a time; 0: each session begins at the time that the workload states. Traces
    state no such times."""

    longest_gap_seconds: Seconds = 1e9
    """Maximum time between an answer and the next turn. Longer gaps in the workload, such as a night, are shortened to this time."""


ClientSection = OpenClients | ClosedClients | SessionClients


class SimulatedClients(Protocol):
    """Interface that all kinds of simulated clients implement."""

    @property
    def over(self) -> bool:
        """True if the clients have sent all their requests, and all of these have ended."""
        ...


def start_clients(
    section: ClientSection, kernel: Kernel, world: World, traffic: Traffic, ended: Callable[[EndedRequest], None]
) -> SimulatedClients:
    """Start the clients of a run. `ended` is called with each ended request; retries of a request are not reported on their own."""
    sender = _Sender(kernel, world, section, ended)
    match section:
        case OpenClients():
            return _OpenLoop(kernel, sender, _only(TraceRequest, traffic))
        case ClosedClients():
            return _ClosedLoop(kernel, sender, section, _only(TraceRequest, traffic))
        case SessionClients():
            return _Conversations(kernel, sender, section, _only(TraceSession, traffic))


def _only(kind: type[T], traffic: Traffic) -> Iterator[T]:
    for each in traffic:
        assert isinstance(each, kind), f"{type(each).__name__} for clients that send {kind.__name__}s"
        yield each


class _Sender:
    """Sends requests, and sends them again after temporary rejections."""

    def __init__(self, kernel: Kernel, world: World, patience: ClientPatience, ended: Callable[[EndedRequest], None]):
        self._kernel, self._world, self._patience, self._ended = kernel, world, patience, ended
        self._deadline = Nanos(round(patience.deadline_seconds * SECOND))
        self._patient = bool(self._deadline or patience.retries)
        # number of unfinished requests whose end is reported to this sender; requests that wait to be sent again count
        self._live = 0

    @property
    def idle(self) -> bool:
        """True if no request is in the router, and none waits to be sent again."""
        return not self._live and not self._world.live

    def send(self, request: TraceRequest, over: Callable[[], None] | None = None) -> None:
        """Send a request now. `over` is called when the request has ended, after all its retries."""
        if over is None and not self._patient:
            self._world.send(request, self._ended)
        else:
            self._live += 1
            self._try(request, over, 0)

    def _try(self, request: TraceRequest, over: Callable[[], None] | None, retries: int) -> None:
        deadline = Nanos(request.arrival + self._deadline) if self._deadline else None
        self._world.send(request, partial(self._answered, request, over, retries), deadline)

    def _answered(
        self, request: TraceRequest, over: Callable[[], None] | None, retries: int, ended: EndedRequest
    ) -> None:
        if ended.refused in RETRYABLE and retries < self._patience.retries:
            wait = Nanos(round(self._patience.retry_seconds * 2**retries * SECOND))
            self._kernel.after(wait, partial(self._try, request, over, retries + 1))
            return
        self._live -= 1
        self._ended(structs.replace(ended, retries=retries) if retries else ended)
        if over is not None:
            over()


class _OpenLoop:
    """Sends the requests of open clients. Schedules only one arrival at a time, so that the kernel's event heap stays small."""

    def __init__(self, kernel: Kernel, sender: _Sender, requests: Iterator[TraceRequest]):
        self._kernel, self._sender, self._requests = kernel, sender, requests
        self._ended = False
        self._next()

    @property
    def over(self) -> bool:
        return self._ended and self._sender.idle

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._ended = True
        else:
            self._kernel.at(request.arrival, partial(self._send, request))

    def _send(self, request: TraceRequest) -> None:
        self._sender.send(request)
        self._next()


class _ClosedLoop:
    """Sends the requests of closed clients. Each client has one request at a time."""

    def __init__(self, kernel: Kernel, sender: _Sender, section: ClosedClients, requests: Iterator[TraceRequest]):
        # Start at most as many users as there are requests, because further users would have nothing to send.
        first = list(islice(requests, section.users))
        self._kernel, self._sender, self._requests = kernel, sender, chain(first, requests)
        self._think = Nanos(round(section.think_seconds * SECOND))
        self._users = len(first)
        for user in range(self._users):
            kernel.after(Nanos(round(section.ramp_seconds * user / section.users * SECOND)), self._send)

    @property
    def over(self) -> bool:
        return not self._users

    def _send(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._users -= 1
        else:
            self._sender.send(_at(request, self._kernel.now()), self._answered)

    def _answered(self) -> None:
        self._kernel.after(self._think, self._send)


class _Conversations:
    """Runs the sessions of session clients, each as a `_Conversation`."""

    def __init__(self, kernel: Kernel, sender: _Sender, section: SessionClients, sessions: Iterator[TraceSession]):
        self._kernel, self._sender, self._sessions = kernel, sender, sessions
        self._longest = Nanos(round(section.longest_gap_seconds * SECOND))
        self._live = 0
        self._ended = False
        self._follows = section.users > 0  # True: the next session begins whenever one ends
        for _ in range(section.users or 1):
            self._next()

    @property
    def over(self) -> bool:
        return self._ended and not self._live

    def _next(self) -> None:
        """Begin the next session now if the number of sessions is fixed; else at the time that the workload states."""
        session = next(self._sessions, None)
        if session is None:
            self._ended = True
            return
        self._live += 1
        if self._follows:
            _Conversation(self._kernel, self._sender, session, self._longest, self._over)
        else:
            assert session.begins is not None, "sessions without a fixed number of users need times"
            self._kernel.at(session.begins, partial(self._come, session))

    def _come(self, session: TraceSession) -> None:
        _Conversation(self._kernel, self._sender, session, self._longest, self._over)
        self._next()

    def _over(self) -> None:
        self._live -= 1
        if self._follows:
            self._next()


class _Conversation:
    """Sends the turns of one running session."""

    def __init__(
        self, kernel: Kernel, sender: _Sender, session: TraceSession, longest: Nanos, over: Callable[[], None]
    ):
        self._kernel, self._sender, self._longest, self._over = kernel, sender, longest, over
        self._turns = session.turns
        self._left = len(session.turns)
        # for each turn: number of earlier answers that the turn still waits for
        self._waits = [len(turn.after) for turn in session.turns]
        self._followers: list[list[int]] = [[] for _ in session.turns]
        for index, turn in enumerate(session.turns):
            for before in turn.after:
                self._followers[before].append(index)
            if not turn.after:
                self._prepare(index)

    def _prepare(self, index: int) -> None:
        """Schedule a turn that waits for no answer any more. Its pause is the workload's, limited to `longest_gap_seconds`."""
        self._kernel.after(min(self._turns[index].gap, self._longest), partial(self._send, index))

    def _send(self, index: int) -> None:
        self._sender.send(_at(self._turns[index].request, self._kernel.now()), partial(self._answered, index))

    def _answered(self, index: int) -> None:
        self._left -= 1
        for follower in self._followers[index]:
            self._waits[follower] -= 1
            if not self._waits[follower]:
                self._prepare(follower)
        if not self._left:
            self._over()


def _at(request: TraceRequest, now: Nanos) -> TraceRequest:
    return TraceRequest(now, request.prompt_tokens, request.chain, request.output_tokens, request.session)
