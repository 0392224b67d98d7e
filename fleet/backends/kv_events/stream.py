"""KV event stream: receives an engine's KV events (`fleet.backends.kv_events.formats`) over ZeroMQ without gaps.

Rules:

1. A new listener first asks for all batches that the engine still repeats, so that an idle engine's cache is known
   too. Older blocks cannot be named, because the blocks before them are unknown.
2. Batches are numbered. A gap is filled from the engine's replay endpoint. If that fails, everything known is void
   (`KvCleared`), and counting starts again with the next batch.
3. A number that came before with another content belongs to another process of the engine, so everything known is
   void. Continuous numbers do not prove the same process, so a listener that asks for a gap also asks for the batch
   before it.
4. An unreadable batch has the same effect.
5. A long replay arrives in pieces, because an engine's socket drops what its listener has not taken, also in the
   middle. Missing batches are requested again. If a hole remains, only the batches after it count.
6. A replay endpoint that does not answer is not asked at every gap, because each call would wait. It is asked again
   after a pause that doubles while it stays silent.
7. However much arrives, other tasks of the event loop get their turn in between.
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

REPLAY_TIMEOUT_SECONDS = 2.0  # without any message; the publisher polls its replay socket every 0.1 s
REPLAY_SECONDS = 60.0  # for the whole replay; a hundred thousand batches take less
FIRST_PAUSE_SECONDS = 10.0  # after no answer at all; a gap meanwhile clears what is known, without a wait
LONGEST_PAUSE_SECONDS = 300.0
RECEIVE_BATCHES = 100_000  # the most batches buffered here, as many as the publisher keeps

REMEMBERED_BATCHES = 1024
BATCHES_A_TURN = 16  # then the event loop gets its turn, because receiving waiting messages does not yield
MOST_PIECES = 32  # in one replay; an engine's socket holds a thousand batches, its buffer ten thousand

END_OF_REPLAY = b"\xff" * 8
NUMBER_BYTES = 8


class EventStreamCounters(Struct):
    """Counts what arrived, and what did not."""

    batches: int = 0
    recovered: int = 0  # batches that were repeated
    gaps: int = 0  # gaps that could not be filled
    restarts: int = 0  # restarts of the engine
    unreadable: int = 0  # batches
    why: str = ""  # why the latest unreadable batch could not be read


async def read_events(
    endpoint: str, replay_endpoint: str, books: KvEventTranslator, heard: EventStreamCounters | None = None
) -> AsyncIterator[list[KvEvent]]:
    """Yield batches of events as the engine publishes them, one item for each received batch, even if it is empty.

    Args:
        endpoint: The publisher's address in ZeroMQ's notation.
        replay_endpoint: Where the engine repeats published batches; empty: nowhere.
        books: The translator. It must be empty, and nothing else may use it.
        heard: Counters to increment.
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
        expected: int | None = None  # the first batch may have any number
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
                continue  # it was published while the replay ran, or overtaken
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
                    log.warning("kv events lost, starting over", extra={"from": expected, "to": number})
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
    """Hashes of the latest batches by number, so that a repeated batch does not look like a new process."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def has(self, number: int, payload: bytes) -> bool:
        return self._seen.get(number) == hash(payload)

    def agrees(self, number: int, repeated: Mapping[int, bytes]) -> bool:
        """Return whether the repeated batch of a number may be the one that was taken, as far as both are known."""
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
    """Clear everything known, because another process of the engine publishes now."""
    log.warning("kv event publisher restarted, starting over")
    heard.restarts += 1
    return books.clear()


def _void(books: KvEventTranslator, heard: EventStreamCounters, why: str) -> list[KvEvent]:
    if not heard.unreadable:  # once, not at every batch
        log.error("kv events unreadable, engine version may be too new", extra={"cause": why})
    heard.unreadable += 1
    heard.why = why
    return [books.clear()]


class _Replay:
    """The replay endpoint of an engine; an empty address means none."""

    def __init__(self, context: "Context", endpoint: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self._not_before = 0.0  # on the event loop's clock, after a missing answer
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def since(self, start: int) -> Mapping[int, bytes]:
        """Return the batches from a number on that the engine still repeats; empty if they do not come in time."""
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
            if missing == start or (ended and missing > max(batches)):  # no more batches exist, or can be had
                break
            start = missing
        return _after_holes(batches)

    async def _piece(self, start: int, until: float) -> tuple[Mapping[int, bytes], bool]:
        """Receive batches from a number on until the given instant of the event loop's clock.

        Also return whether the replay's end came.
        """
        from zmq.constants import DEALER  # noqa: PLC0415 - comes with vLLM

        socket = self._context.socket(DEALER)
        socket.set_hwm(RECEIVE_BATCHES)
        batches: dict[int, bytes] = {}
        clock = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(until, clock.time() + REPLAY_TIMEOUT_SECONDS)) as patience:
                socket.connect(self._endpoint)
                await socket.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")])
                for received in range(1, RECEIVE_BATCHES + 1):  # some may come twice
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
        except ValueError:  # a message with a single frame
            return {}, True
        finally:
            socket.close(linger=0)
        return batches, False


def _after_holes(batches: Mapping[int, bytes]) -> Mapping[int, bytes]:
    """Return the batches after the last hole."""
    if not batches:
        return {}
    last = max(batches)
    first = next(number for number in count(last, -1) if number - 1 not in batches)
    return {number: batches[number] for number in range(first, last + 1)}
