"""One router's stream, from the worker's side: what was said and not yet sent."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Never

from fleet.work import Cancel, Description, KvEvent, KvEvents, Start, WorkerMessage
from workers.messages import CancelRequested, Requested, StreamId


class StreamCut(Exception):
    """The worker ended this stream; the message says why. The router may connect again."""


class Session:
    """A bounded queue of messages to one router, and the door for what it says.

    The introduction (who we are, what our cache holds) is as large as it is and does not count; after that at most
    `limit` messages wait, and one more cuts the stream: a router that does not read must not cost memory.
    """

    def __init__(
        self,
        stream: StreamId,
        *,
        description: Description,
        cache: Sequence[tuple[KvEvent, ...]],
        limit: int,
        absorb: Callable[[Requested | CancelRequested], None],
    ) -> None:
        self.stream = stream
        self._absorb = absorb
        self._limit = limit
        self._introduction: deque[WorkerMessage] = deque([description])
        self._waiting: deque[WorkerMessage] = deque()
        self._sequence = 0
        self._wake = asyncio.Event()
        self._finished = False
        self._cut: str | None = None
        self._was_cut = asyncio.Event()
        for events in cache:
            self._introduction.append(self._numbered(events))

    def receive(self, message: Start | Cancel) -> None:
        """What the router said; the answer comes among `messages`."""
        match message:
            case Start():
                self._absorb(Requested(stream=self.stream, start=message))
            case Cancel():
                self._absorb(CancelRequested(stream=self.stream, request_id=message.request_id))

    def offer(self, message: WorkerMessage) -> bool:
        """Queue a message; False when there is no room, and the stream has to be cut."""
        if len(self._waiting) >= self._limit:
            return False
        self._waiting.append(message)
        self._wake.set()
        return True

    def offer_changes(self, events: tuple[KvEvent, ...]) -> bool:
        """Queue changes of the cache, numbered for this stream."""
        return self.offer(self._numbered(events))

    def finish(self) -> None:
        """Nothing more will come: `messages` ends after what waits."""
        self._finished = True
        self._wake.set()

    def cut(self, why: str) -> None:
        """End now: what waits is dropped and `messages` raises."""
        self._cut = self._cut or why
        self._introduction.clear()
        self._waiting.clear()
        self._wake.set()
        self._was_cut.set()

    async def cut_off(self) -> Never:
        """Wait until the worker ends the stream, which raises `StreamCut`; for whoever waits elsewhere meanwhile."""
        await self._was_cut.wait()
        raise StreamCut(self._cut)

    async def messages(self) -> AsyncIterator[WorkerMessage]:
        """What to send, in order; one consumer.

        Raises:
            StreamCut: The worker ends the stream.
        """
        while True:
            if self._cut is not None:
                raise StreamCut(self._cut)
            if self._introduction:
                yield self._introduction.popleft()
            elif self._waiting:
                yield self._waiting.popleft()
            elif self._finished:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    def _numbered(self, events: tuple[KvEvent, ...]) -> KvEvents:
        message = KvEvents(sequence=self._sequence, events=events)
        self._sequence += 1
        return message
