"""Router session: handles one router's stream in the worker, and keeps the messages that wait to be sent."""

from collections import deque
from collections.abc import Callable, Sequence

from fleet.core.work import (
    AnswersWanted,
    Cancel,
    KeepTrace,
    KeptAnswers,
    KvEvent,
    KvEvents,
    Start,
    WorkerDescription,
    WorkerMessage,
)
from workers.messages import AnswersRequested, AttemptRequested, CancelRequested, StreamId
from workers.ports import Outlet

MAX_WAITING_ANSWERS = 100
"""Maximum number of messages with kept answers that wait for a router. Each message has about 1 MiB. By default a worker keeps
64 MiB of answers, so a router can request all of them at the same time. Further messages are dropped instead of closing the
stream, because the stream carries the requests of all clients. The router stops waiting for a dropped message after a time
limit."""


class RouterSession:
    """Receives the messages of one router, and sends messages to it in order; these wait in a queue while the outlet is full.

    At most `limit` messages wait. If one more has to wait, the stream is closed, so that a router that does not read
    uses no more memory. The introduction (the worker's description and its cache) may be large and does not count.
    """

    def __init__(
        self,
        stream: StreamId,
        outlet: Outlet,
        *,
        description: WorkerDescription,
        cache: Sequence[tuple[KvEvent, ...]],
        limit: int,
        absorb: Callable[[AttemptRequested | CancelRequested | AnswersRequested], None],
        keep_trace: Callable[[KeepTrace], None] | None = None,
    ) -> None:
        """Queue the worker's description and the list of its cached blocks; nothing is sent until `flow` is called."""
        self.stream = stream
        self._outlet = outlet
        self._absorb = absorb
        # Function that is called when the router asks to keep the trace of a request; None if this worker does not trace.
        self._keep_trace = keep_trace
        self._limit = limit
        self._introduction: deque[WorkerMessage] = deque([description])
        self.waiting: deque[WorkerMessage] = deque()
        self._sequence = 0
        self._finished = False
        self._ended = False
        for events in cache:
            self._introduction.append(self._numbered(events))

    def receive(self, message: Start | Cancel | KeepTrace | AnswersWanted) -> None:
        """Pass a router's message on: a trace request to `keep_trace`, any other message to the worker's machine.

        The machine's replies are sent later, through `offer`.
        """
        match message:
            case Start():
                self._absorb(AttemptRequested(stream=self.stream, start=message))
            case Cancel():
                self._absorb(CancelRequested(stream=self.stream, request_id=message.request_id))
            case AnswersWanted():
                self._absorb(AnswersRequested(stream=self.stream, wanted=message))
            case KeepTrace():
                if self._keep_trace is not None:
                    self._keep_trace(message)

    def offer(self, message: WorkerMessage) -> bool:
        """Send a message, or queue it behind earlier messages. Kept answers are dropped if too many of them wait.

        Return False if the queue is full; the caller then has to close the stream.
        """
        if not (self._introduction or self.waiting or self._outlet.full):
            self._outlet.put(message)
        elif isinstance(message, KeptAnswers) and self._answers_wait():
            pass
        elif len(self.waiting) < self._limit:
            self.waiting.append(message)
        else:
            return False
        return True

    def _answers_wait(self) -> bool:
        """Return whether `MAX_WAITING_ANSWERS` messages with kept answers wait already, so that one more has to be dropped."""
        return sum(isinstance(each, KeptAnswers) for each in self.waiting) >= MAX_WAITING_ANSWERS

    def offer_changes(self, events: tuple[KvEvent, ...]) -> bool:
        """Send changes of the cache with the next sequence number of this stream; return False if the queue is full."""
        return self.offer(self._numbered(events))

    def flow(self) -> None:
        """Send waiting messages until the outlet is full.

        The owner of the outlet calls this when the outlet has room again.
        """
        while (queue := self._introduction or self.waiting) and not self._outlet.full:
            self._outlet.put(queue.popleft())
        if self._finished and not queue and not self._ended:
            self._ended = True
            self._outlet.end("")

    def drop(self) -> None:
        """Drop the waiting messages without sending them, because the stream ends now or has ended."""
        self._introduction.clear()
        self.waiting.clear()

    def finish(self) -> None:
        """Let the stream end as soon as the waiting messages are sent."""
        self._finished = True
        self.flow()

    def cut(self, why: str) -> None:
        """End the stream now, drop the waiting messages, and send the router `why` as the cause."""
        self.drop()
        self._ended = True
        self._outlet.end(why)

    def _numbered(self, events: tuple[KvEvent, ...]) -> KvEvents:
        message = KvEvents(sequence=self._sequence, events=events)
        self._sequence += 1
        return message
