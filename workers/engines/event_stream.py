"""The stream of an engine's KV events over ZeroMQ, without gaps (`workers.engines.engine_events` has the format).

Rules:

1. Who begins to listen asks first for all that the engine still repeats, so that an idle engine is known too. What is older
   than that has no name here, since the blocks before it are not known.
2. Batches are numbered. A gap is filled from where the engine repeats them; when that fails, everything known is void
   (`KvCleared`) and counting starts again with what comes.
3. A number that was there before, with something else in it, is of another process of the engine: everything known is void.
4. So it is after a batch that cannot be read.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from fleet.work import KvEvent
from workers.engines.cache_books import CacheBooks
from workers.engines.engine_events import Unreadable

if TYPE_CHECKING:
    from zmq.asyncio import Context

log = logging.getLogger(__name__)

REPLAY_TIMEOUT_SECONDS = 2.0  # the publisher looks at its replay socket every 0.1 s
RECEIVE_BATCHES = 100_000  # buffered here at most, as many as the publisher keeps

REMEMBERED_BATCHES = 1024
BATCHES_A_TURN = 64  # of the event loop, of those that are repeated at the beginning

END_OF_REPLAY = b"\xff" * 8
NUMBER_BYTES = 8


class Heard(Struct):
    """What came, and what did not."""

    batches: int = 0
    recovered: int = 0  # batches that were repeated
    gaps: int = 0  # that could not be filled
    restarts: int = 0  # of the engine
    unreadable: int = 0  # batches
    why: str = ""  # the latest could not be read


async def read_events(
    endpoint: str, replay_endpoint: str, books: CacheBooks, heard: Heard | None = None
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

    heard = heard or Heard()
    context = Context()
    subscriber = context.socket(SUB)
    subscriber.set_hwm(RECEIVE_BATCHES)
    try:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        expected: int | None = None  # the first that comes may have any number
        latest = _Latest()
        before = (await _replayed(context, replay_endpoint, 0) or {}) if replay_endpoint else {}
        for number in sorted(before):
            heard.recovered += 1
            expected = number + 1
            latest.note(number, before[number])
            yield _taken(before[number], books, heard)
            if number % BATCHES_A_TURN == 0:
                await asyncio.sleep(0)
        while True:
            frames = await subscriber.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                yield _void(books, heard, f"a message of {len(frames)} frames")
                continue
            number = int.from_bytes(frames[1], "big")
            if latest.has(number, frames[2]):
                continue  # was published while it was asked for, or overtaken
            events: list[KvEvent] = []
            if expected is not None and number < expected:
                log.warning("an engine publishes its KV events from the first one on again; starting over")
                heard.restarts += 1
                events.append(books.clear())
                expected, latest = 0, _Latest()
            if expected is not None and number > expected:
                missed = await _missed(context, replay_endpoint, range(expected, number))
                if missed is None:
                    log.warning("KV events were lost; starting over", extra={"from": expected, "to": number})
                    heard.gaps += 1
                    events.append(books.clear())
                else:
                    heard.recovered += len(missed)
                    for position, payload in enumerate(missed, start=expected):
                        latest.note(position, payload)
                        events += _taken(payload, books, heard)
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

    def note(self, number: int, payload: bytes) -> None:
        self._seen[number] = hash(payload)
        if len(self._seen) > REMEMBERED_BATCHES:
            del self._seen[next(iter(self._seen))]


def _taken(payload: bytes, books: CacheBooks, heard: Heard) -> list[KvEvent]:
    heard.batches += 1
    try:
        return books.take(payload)
    except Unreadable as error:
        return _void(books, heard, str(error))


def _void(books: CacheBooks, heard: Heard, why: str) -> list[KvEvent]:
    if not heard.unreadable:  # not at every batch
        log.error("an engine's KV events cannot be read; its version may be too new", extra={"cause": why})
    heard.unreadable += 1
    heard.why = why
    return [books.clear()]


async def _missed(context: "Context", endpoint: str, wanted: range) -> list[bytes] | None:
    """The batches with these numbers; None if they cannot be had in time."""
    if not endpoint:
        return None
    batches = await _replayed(context, endpoint, wanted.start)
    if batches is None or any(number not in batches for number in wanted):
        return None
    return [batches[number] for number in wanted]


async def _replayed(context: "Context", endpoint: str, start: int) -> Mapping[int, bytes] | None:
    """All batches from a number on that are still repeated; None if they do not come in time."""
    from zmq.constants import DEALER  # noqa: PLC0415 - comes with vLLM

    socket = context.socket(DEALER)
    batches: dict[int, bytes] = {}
    try:
        async with asyncio.timeout(REPLAY_TIMEOUT_SECONDS):
            socket.connect(endpoint)
            await socket.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")])
            while True:
                *_, number, payload = await socket.recv_multipart()  # SGLang puts the topic before
                if number == END_OF_REPLAY:
                    return batches
                batches[int.from_bytes(number, "big")] = payload
    except (TimeoutError, ValueError):  # of one frame
        return None
    finally:
        socket.close(linger=0)
