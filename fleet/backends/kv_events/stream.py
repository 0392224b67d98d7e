"""KV event stream: receives an engine's KV events (`fleet.backends.kv_events.formats`) over ZeroMQ without gaps.

Rules:

1. A new listener first requests all batches that the engine can still repeat, so that the cache of an idle engine is
   known too. A block cannot be named if an earlier block of its chain was stored by a batch that the engine can no
   longer repeat.
2. Batches are numbered. Missing batches are requested from the engine's replay endpoint. If that fails, all knowledge
   of the engine's cache is dropped (`KvCleared`), and the listener goes on with the next batch.
3. If a batch number comes a second time with other content, the engine was restarted, and its new process publishes
   now. So all knowledge of the cache is dropped. Consecutive numbers do not prove that the process is the same.
   Therefore a request for missing batches also includes the batch before them, to compare it with the one that was
   received.
4. After an unreadable batch, all knowledge is dropped, too.
5. A long replay may have gaps, because an engine's socket drops messages while too many wait for the listener. The
   missing batches are requested again, as a further piece of the replay. If a gap remains, only the batches after the
   gap are used.
6. If a replay endpoint does not answer, it is not queried again at every gap, because each query costs a timeout. It is
   queried again after a pause, which doubles with each query without an answer, up to `LONGEST_PAUSE_SECONDS`.
7. The listener yields to the event loop regularly, even if messages arrive without a break.
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

# Maximum wait for the next message of a replay, in seconds. The publisher polls its replay socket every 0.1 s.
REPLAY_TIMEOUT_SECONDS = 2.0
REPLAY_SECONDS = 60.0  # time limit for a whole replay, which takes less for a hundred thousand batches
# Pause after a replay without an answer. If a gap appears during the pause, the listener requests no replay, and drops all
# knowledge of the cache at once.
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 300.0
# Maximum number of received batches that wait in the socket's buffer: as many as the publisher keeps. ZeroMQ drops further
# ones, which then count as missing (rule 2).
RECEIVE_BATCHES = 100_000

REMEMBERED_BATCHES = 1024
# After this many batches the listener yields to the event loop; receiving messages that already wait does not yield.
BATCHES_A_TURN = 16
# Maximum number of requests for the pieces of one replay (rule 5). About ten are usually enough, because the engine's socket
# keeps a thousand unsent batches, and its replay buffer ten thousand.
MOST_PIECES = 32

END_OF_REPLAY = b"\xff" * 8
NUMBER_BYTES = 8


class EventStreamCounters(Struct):
    """Counts the batches that arrived from one engine, and the faults in them."""

    batches: int = 0
    recovered: int = 0  # number of batches that came from the replay endpoint
    gaps: int = 0  # number of gaps in the batch numbers that the replay endpoint could not fill
    restarts: int = 0  # number of times that another process of the engine began to publish (rule 3)
    unreadable: int = 0  # number of batches that could not be read
    why: str = ""  # error text of the latest unreadable batch; empty: there was none


async def read_events(
    endpoint: str, replay_endpoint: str, books: KvEventTranslator, counters: EventStreamCounters | None = None
) -> AsyncIterator[list[KvEvent]]:
    """Yield the events of each batch that the engine publishes, one list for a batch, even if the list is empty.

    The events of missing batches that were repeated are in the list of the batch after them.

    Args:
        endpoint: The publisher's address in ZeroMQ's notation.
        replay_endpoint: Address at which the engine repeats published batches; empty: there is none.
        books: The translator of this engine's events. It must be empty, and nothing else may change it.
        counters: The counters to increment; None to count nothing.
    """
    from zmq.asyncio import Context  # noqa: PLC0415 - optional
    from zmq.constants import SUB  # noqa: PLC0415

    counters = counters or EventStreamCounters()
    context = Context()
    subscriber = context.socket(SUB)
    subscriber.set_hwm(RECEIVE_BATCHES)
    try:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        expected: int | None = None  # number of the next batch; None before the first one, which may have any number
        latest = _Latest()
        replay = _Replay(context, replay_endpoint)
        before = await replay.since(0)
        for number in sorted(before):
            counters.recovered += 1
            expected = number + 1
            latest.note(number, before[number])
            yield _taken(before[number], books, counters)
            if number % BATCHES_A_TURN == 0:
                await asyncio.sleep(0)
        for turn in count():
            if turn % BATCHES_A_TURN == 0:
                await asyncio.sleep(0)
            frames = await subscriber.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                yield _void(books, counters, f"a message of {len(frames)} frames")
                continue
            number = int.from_bytes(frames[1], "big")
            if latest.has(number, frames[2]):
                continue  # this batch was received before, from the replay or from the publisher
            events: list[KvEvent] = []
            if expected is not None and number < expected:
                events.append(_restarted(books, counters))
                expected, latest = 0, _Latest()
            if expected is not None and number > expected:
                repeated = await replay.since(max(0, expected - 1))
                if not latest.agrees(expected - 1, repeated):
                    events.append(_restarted(books, counters))
                    expected, latest = 0, _Latest()
                    repeated = await replay.since(0)
                missed = [repeated[each] for each in sorted(repeated) if expected <= each < number]
                if len(missed) < number - expected:
                    log.warning("kv events lost, starting over", extra={"from": expected, "to": number})
                    counters.gaps += 1
                    events.append(books.clear())
                else:
                    counters.recovered += len(missed)
                    for position, payload in enumerate(missed, start=expected):
                        latest.note(position, payload)
                        events += _taken(payload, books, counters)
                        if position % BATCHES_A_TURN == 0:
                            await asyncio.sleep(0)
            expected = number + 1
            latest.note(number, frames[2])
            yield [*events, *_taken(frames[2], books, counters)]
    finally:
        subscriber.close(linger=0)
        context.destroy(linger=0)


class _Latest:
    """Remembers hashes of the latest batches, to find out whether another batch comes under a number that has come before."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def has(self, number: int, payload: bytes) -> bool:
        return self._seen.get(number) == hash(payload)

    def agrees(self, number: int, repeated: Mapping[int, bytes]) -> bool:
        """Return False if a repeated batch differs from the batch with the same number that was received before."""
        return number not in self._seen or number not in repeated or self.has(number, repeated[number])

    def note(self, number: int, payload: bytes) -> None:
        self._seen[number] = hash(payload)
        if len(self._seen) > REMEMBERED_BATCHES:
            del self._seen[next(iter(self._seen))]


def _taken(payload: bytes, books: KvEventTranslator, counters: EventStreamCounters) -> list[KvEvent]:
    counters.batches += 1
    try:
        return books.take(payload)
    except UnreadableEngineEvent as error:
        return _void(books, counters, str(error))


def _restarted(books: KvEventTranslator, counters: EventStreamCounters) -> KvEvent:
    """Drop all knowledge of the engine's cache, because another process of the engine publishes now."""
    log.warning("kv event publisher restarted, starting over")
    counters.restarts += 1
    return books.clear()


def _void(books: KvEventTranslator, counters: EventStreamCounters, why: str) -> list[KvEvent]:
    if not counters.unreadable:  # log only the first unreadable batch
        log.error("kv events unreadable, engine version may be too new", extra={"cause": why})
    counters.unreadable += 1
    counters.why = why
    return [books.clear()]


class _Replay:
    """Requests published batches again from an engine's replay endpoint; an empty address means that there is none."""

    def __init__(self, context: "Context", endpoint: str) -> None:
        self._context = context
        self._endpoint = endpoint
        self._not_before = 0.0  # no replay is requested before this time of the event loop's clock
        self._pause_seconds = FIRST_PAUSE_SECONDS

    async def since(self, start: int) -> Mapping[int, bytes]:
        """Return the batches from number `start` on that the engine can repeat, by number.

        If they have gaps, only the batches after the last gap are returned (rule 5). The result is empty if no
        batch arrives, if there is no replay endpoint, or during a pause (rule 6).
        """
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
            # Stop if no more batches exist, or if the engine cannot repeat the first missing batch.
            if missing == start or (ended and missing > max(batches)):
                break
            start = missing
        return _after_holes(batches)

    async def _piece(self, start: int, until: float) -> tuple[Mapping[int, bytes], bool]:
        """Receive batches from number `start` on, at most until the time `until` of the event loop's clock.

        Return the batches by number, and True if the message that ends the replay has arrived. After a message that
        cannot be read, return no batches and True.
        """
        from zmq.constants import DEALER  # noqa: PLC0415 - optional

        socket = self._context.socket(DEALER)
        socket.set_hwm(RECEIVE_BATCHES)
        batches: dict[int, bytes] = {}
        clock = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(until, clock.time() + REPLAY_TIMEOUT_SECONDS)) as patience:
                socket.connect(self._endpoint)
                await socket.send_multipart([b"", start.to_bytes(NUMBER_BYTES, "big")])
                # A batch that comes twice counts twice, so that the loop ends.
                for received in range(1, RECEIVE_BATCHES + 1):
                    *_, number, payload = await socket.recv_multipart()  # SGLang sends the topic before the number
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
        except ValueError:  # a message of a single frame cannot be unpacked
            return {}, True
        finally:
            socket.close(linger=0)
        return batches, False


def _after_holes(batches: Mapping[int, bytes]) -> Mapping[int, bytes]:
    """Return only the batches after the last gap in their numbers."""
    if not batches:
        return {}
    last = max(batches)
    first = next(number for number in count(last, -1) if number - 1 not in batches)
    return {number: batches[number] for number in range(first, last + 1)}
