"""The stream of an engine's KV events over ZeroMQ, without gaps (`fleet.backends.kv_events.formats` has the format).

Rules:

1. Who begins to listen asks first for all that the engine still repeats, so that an idle engine is known too. What is older
   than that has no name here, since the blocks before it are not known.
2. Batches are numbered. A gap is filled from where the engine repeats them; when that fails, everything known is void
   (`KvCleared`) and counting starts again with what comes.
3. A number that was there before, with something else in it, is of another process of the engine: everything known is void.
   Numbers that go on do not tell, so who asks for a gap asks for the batch before it too.
4. So it is after a batch that cannot be read.
5. Who repeats a lot is heard in pieces: an engine's socket lets fall what its listener has not taken, in the middle too. What is
   missing is asked for again; of what has a hole still, only what follows the hole counts.
6. Who does not answer at all is not asked at every gap, which would be waited for each time: only after a pause, which doubles while
   it does not.
7. However much there is to take in, other tasks of the event loop have their turn in between.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from itertools import count
from typing import TYPE_CHECKING

from msgspec import Struct

from fleet.backends.kv_events.formats import UnreadableEngineEvent
from fleet.backends.kv_events.translator import KvEventTranslator
from fleet.core.work import KvEvent

if TYPE_CHECKING:
    from zmq.asyncio import Context

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_SECONDS = 2.0  # without anything; the publisher looks at its replay socket every 0.1 s
REPLAY_SECONDS = 60.0  # for all of it, however it comes; a hundred thousand batches take less
FIRST_PAUSE_SECONDS = 10.0  # after no answer at all; a gap meanwhile costs what is known, and no wait
LONGEST_PAUSE_SECONDS = 300.0
RECEIVE_BATCHES = 100_000  # buffered here at most, as many as the publisher keeps

REMEMBERED_BATCHES = 1024
BATCHES_A_TURN = 16  # of the event loop: a receipt of what is there does not give it up
MOST_PIECES = 32  # of a replay; an engine's socket holds a thousand batches, its buffer ten thousand

END_OF_REPLAY = b"\xff" * 8
NUMBER_BYTES = 8


class EventStreamCounters(Struct):
    """What came, and what did not."""

    batches: int = 0
    recovered: int = 0  # batches that were repeated
    gaps: int = 0  # that could not be filled
    restarts: int = 0  # of the engine
    unreadable: int = 0  # batches
    why: str = ""  # the latest could not be read


async def read_events(
    endpoint: str, replay_endpoint: str, books: KvEventTranslator, heard: EventStreamCounters | None = None
) -> AsyncIterator[list[KvEvent]]:
    """Batches of events as the engine publishes them; an item for each that was heard, however little it says.

    Args:
        endpoint: Where the engine publishes, as ZeroMQ writes it.
        replay_endpoint: Where it repeats what it published; empty: nowhere.
        books: Not used by anything else, and empty.
        heard: Is counted in.
    """
    from zmq.asyncio import Context  # noqa: PLC0415 - comes with vLLM
    from zmq.constants import SUB  # noqa: PLC0415

    heard = heard or EventStreamCounters()
    context = Context()
    subscriber = context.socket(SUB)
    subscriber.set_hwm(RECEIVE_BATCHES)
    try:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        expected: int | None = None  # the first that comes may have any number
        latest = _Latest()
        replay = _Replay(context, replay_endpoint)
        before = await replay.since(0)
        for number in sorted(before):
            heard.recovered += 1
            expected = number + 1
            latest.note(number, before[number])
            yield _taken(before[number], books, heard)
            if number % BATCHES_A_TURN == 0:
                await asyncio.sleep(0)
        for turn in count():
            if turn % BATCHES_A_TURN == 0:
                await asyncio.sleep(0)
            frames = await subscriber.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                yield _void(books, heard, f"a message of {len(frames)} frames")
                continue
            number = int.from_bytes(frames[1], "big")
            if latest.has(number, frames[2]):
                continue  # was published while it was asked for, or overtaken
            events: list[KvEvent] = []
            if expected is not None and number < expected:
                events.append(_restarted(books, heard))
                expected, latest = 0, _Latest()
            if expected is not None and number > expected:
                repeated = await replay.since(max(0, expected - 1))
                if not latest.agrees(expected - 1, repeated):
                    events.append(_restarted(books, heard))
                    expected, latest = 0, _Latest()
                    repeated = await replay.since(0)
                missed = [repeated[each] for each in sorted(repeated) if expected <= each < number]
                if len(missed) < number - expected:
                    log.warning("KV events were lost; starting over", extra={"from": expected, "to": number})
                    heard.gaps += 1
                    events.append(books.clear())
                else:
                    heard.recovered += len(missed)
                    for position, payload in enumerate(missed, start=expected):
                        latest.note(position, payload)
                        events += _taken(payload, books, heard)
                        if position % BATCHES_A_TURN == 0:
                            await asyncio.sleep(0)
            expected = number + 1
            latest.note(number, frames[2])
            yield [*events, *_taken(frames[2], books, heard)]
    finally:
        subscriber.close(linger=0)
        context.destroy(linger=0)


class _Latest:
    """The latest batches that were taken, by number: what comes again is no sign of a new process."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def has(self, number: int, payload: bytes) -> bool:
        return self._seen.get(number) == hash(payload)

    def agrees(self, number: int, repeated: Mapping[int, bytes]) -> bool:
        """Whether the batch of a number may be the one that was taken, as far as both are known."""
        return number not in self._seen or number not in repeated or self.has(number, repeated[number])

    def note(self, number: int, payload: bytes) -> None:
        self._seen[number] = hash(payload)
        if len(self._seen) > REMEMBERED_BATCHES:
            del self._seen[next(iter(self._seen))]


def _taken(payload: bytes, books: KvEventTranslator, heard: EventStreamCounters) -> list[KvEvent]:
    heard.batches += 1
    try:
        return books.take(payload)
    except UnreadableEngineEvent as error:
        return _void(books, heard, str(error))


def _restarted(books: KvEventTranslator, heard: EventStreamCounters) -> KvEvent:
    """Another process of the engine publishes: everything known is void."""
    log.warning("an engine publishes its KV events from the first one on again; starting over")
    heard.restarts += 1
    return books.clear()


def _void(books: KvEventTranslator, heard: EventStreamCounters, why: str) -> list[KvEvent]:
    if not heard.unreadable:  # not at every batch
        log.error("an engine's KV events cannot be read; its version may be too new", extra={"cause": why})
    heard.unreadable += 1
    heard.why = why
    return [books.clear()]


class _Replay:
    """Where an engine repeats its batches; empty: nowhere."""

    def __init__(self, context: "Context", endpoint: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self._not_before = 0.0  # by the event loop's clock, after it did not answer
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def since(self, start: int) -> Mapping[int, bytes]:
        """All batches from a number on that are still repeated; none if they do not come in time, or from nowhere."""
        batches: dict[int, bytes] = {}
        clock = asyncio.get_running_loop()
        if not self._endpoint or clock.time() < self._not_before:
            return {}
        until = clock.time() + REPLAY_SECONDS
        for _ in range(MOST_PIECES):
            piece, ended = await self._piece(start, until)
            batches |= piece
            if not batches:
                if not ended:
                    self._not_before = clock.time() + self._pause_seconds
                    self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
                return {}
            self._pause_seconds = FIRST_PAUSE_SECONDS
            missing = next(number for number in count(min(batches)) if number not in batches)
            if missing == start or (ended and missing > max(batches)):  # no more can be had, or is there
                break
            start = missing
        return _after_holes(batches)

    async def _piece(self, start: int, until: float) -> tuple[Mapping[int, bytes], bool]:
        """What comes from a number on, and whether its end comes; not after an instant of the event loop's clock."""
        from zmq.constants import DEALER  # noqa: PLC0415 - comes with vLLM

        socket = self._context.socket(DEALER)
        socket.set_hwm(RECEIVE_BATCHES)
        batches: dict[int, bytes] = {}
        clock = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(until, clock.time() + REPLAY_TIMEOUT_SECONDS)) as patience:
                socket.connect(self._endpoint)
                await socket.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")])
                for received in range(1, RECEIVE_BATCHES + 1):  # of them some may have come twice
                    *_, number, payload = await socket.recv_multipart()  # SGLang puts the topic before
                    if number == END_OF_REPLAY:
                        return batches, True
                    if len(number) != NUMBER_BYTES:
                        return {}, True
                    batches[int.from_bytes(number, "big")] = payload
                    if received % BATCHES_A_TURN == 0:
                        patience.reschedule(min(until, clock.time() + REPLAY_TIMEOUT_SECONDS))
                        await asyncio.sleep(0)
        except TimeoutError:
            return batches, False
        except ValueError:  # of one frame
            return {}, True
        finally:
            socket.close(linger=0)
        return batches, False


def _after_holes(batches: Mapping[int, bytes]) -> Mapping[int, bytes]:
    """Those from which on none is missing."""
    if not batches:
        return {}
    last = max(batches)
    first = next(number for number in count(last, -1) if number - 1 not in batches)
    return {number: batches[number] for number in range(first, last + 1)}
