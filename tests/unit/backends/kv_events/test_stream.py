"""The KV event stream over real sockets: start, gaps, restarts and unreadable batches."""

import asyncio
import json
import random
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet.backends.kv_events import stream as event_stream
from fleet.backends.kv_events.stream import END_OF_REPLAY, EventStreamCounters, read_events
from fleet.core.work import KvCleared, KvStored
from fleet.frontend.openai.prompt_keys import client_salt
from tests.support.waiting import pace, turns
from tests.unit.backends.kv_events.published import SALT, SGLANG, VLLM, a_batch, names, removed, some_books, stored
from workers.cache_view import CacheView

FIRST, LONGER, SALTED, *_ = VLLM
ONE, TWO, SALTED_ONE = KvStored(names(100, 170)), KvStored(names(100, 230)[2:]), KvStored(names(100, 170, SALT))


class Publisher:
    """Plays the publisher of an engine by the documented protocol; it can leave batches out."""

    def __init__(self, folder: Path, topic: bytes = b""):
        import zmq
        import zmq.asyncio

        self.endpoint, self.replay_endpoint = f"ipc://{folder}/e", f"ipc://{folder}/r"
        self._context = zmq.asyncio.Context()
        self._out = self._context.socket(zmq.XPUB)
        self._out.bind(self.endpoint)
        self.replay = self._context.socket(zmq.ROUTER)
        self.replay.bind(self.replay_endpoint)
        self._batches: list[bytes] = []
        self._topic = topic

    async def subscribed(self) -> None:
        await self._out.recv()

    async def publish(self, batch: bytes, *, lost: bool = False) -> None:
        number = len(self._batches).to_bytes(8, "big")
        self._batches.append(batch)
        if not lost:
            await self._out.send_multipart([self._topic, number, batch])

    async def send(self, *frames: bytes) -> None:
        await self._out.send_multipart(frames)

    async def repeat(self, *, kept_from: int = 0, falls: Container[int] = (), ends: bool = True) -> int:
        """Answer the next replay request without the batches in `falls`; return the requested number."""
        client, _, start = await self.replay.recv_multipart()
        asked = int.from_bytes(start, "big")
        before = [client, b""] if not self._topic else [client, b"", self._topic]
        for number, batch in enumerate(self._batches):
            if number >= max(kept_from, asked) and number not in falls:
                await self.replay.send_multipart([*before, number.to_bytes(8, "big"), batch])
        if ends:
            await self.replay.send_multipart([*before, END_OF_REPLAY, b""])
        return asked

    async def questions(self) -> int:
        """Return the number of unanswered replay requests."""
        asked = 0
        while await self.replay.poll(0):
            await self.replay.recv_multipart()
            asked += 1
        return asked

    async def repeat_always(self) -> None:
        while True:
            await self.repeat()

    def keep(self, batches: list[bytes]) -> None:
        """Use these batches for later replays, whatever was published."""
        self._batches = list(batches)

    def restart(self) -> None:
        self._batches = []

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def a_publisher(topic: bytes = b"") -> Iterator[Publisher]:
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        publisher = Publisher(Path(folder), topic)
        try:
            yield publisher
        finally:
            publisher.close()


async def read(
    publisher: Publisher, batches: int, drive, *, replay: bool = True, books=None
) -> tuple[list, EventStreamCounters]:
    """Return the events of the first `batches` batches and the stream's counters; meanwhile `drive` lets the publisher act."""
    told: list = []
    counters = EventStreamCounters()

    async def listen() -> None:
        endpoint = publisher.replay_endpoint if replay else ""
        async for events in read_events(
            publisher.endpoint, endpoint, some_books() if books is None else books, counters
        ):
            told.append(events)
            if len(told) == batches:
                return

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(listen())
        await publisher.subscribed()
        await drive()
    return told, counters


async def test_idle_engine_is_known_from_its_replay():
    with a_publisher() as publisher:
        await publisher.publish(FIRST, lost=True)
        await publisher.publish(LONGER, lost=True)

        told, counters = await read(publisher, 2, publisher.repeat)

    assert told == [[ONE], [TWO]]
    assert (counters.recovered, counters.gaps) == (2, 0)


async def test_batch_published_during_replay_counts_once():
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.publish(FIRST)  # this batch is published, and also replayed
            await publisher.repeat()
            await publisher.publish(LONGER)

        told, counters = await read(publisher, 2, drive)

    assert told == [[ONE], [TWO]]
    assert counters.restarts == 0


@pytest.mark.parametrize("topic", [b"", b"kv-events"], ids=["vLLM", "SGLang"])
async def test_a_gap_is_filled_from_the_replay(topic):
    with a_publisher(topic) as publisher:

        async def drive() -> None:
            await publisher.repeat()
            await publisher.publish(FIRST)
            await publisher.publish(LONGER, lost=True)
            await publisher.publish(SALTED)
            await publisher.repeat()

        told, counters = await read(publisher, 2, drive)

    assert told == [[ONE], [TWO, SALTED_ONE]]
    assert (counters.batches, counters.recovered, counters.gaps) == (3, 1, 0)


CHAIN = [
    a_batch(stored([number], number - 1 if number else None, 32 * number, 32 * number + 32)) for number in range(8)
]
BLOCKS = names(0, 256)


@pytest.mark.parametrize(
    ("falls", "ends", "asked"),
    [({3, 4}, True, [0, 3]), ({3, 6}, True, [0, 3]), ({5, 6, 7}, False, [0, 5]), ({}, False, [0, 8])],
    ids=["the middle", "twice", "the end", "the mark"],
)
async def test_dropped_part_of_a_replay_is_requested_again(monkeypatch, falls, ends, asked):
    monkeypatch.setattr(event_stream, "REPLAY_TIMEOUT_SECONDS", 60.0 if ends else 2.0)
    heard_from = []
    with a_publisher() as publisher:
        publisher.keep(CHAIN)

        async def drive() -> None:
            heard_from.append(await publisher.repeat(falls=falls, ends=ends))
            heard_from.append(await publisher.repeat())

        told, counters = await read(publisher, 8, drive)

    assert told == [[KvStored((name,))] for name in BLOCKS]
    assert heard_from == asked
    assert counters.recovered == 8


async def test_replay_with_lasting_hole_counts_only_after_the_hole():
    """Leave batches out of a replay: as they may contain removals, earlier batches do not count."""
    with a_publisher() as publisher:
        publisher.keep([*CHAIN[:6], FIRST, SALTED])

        async def drive() -> None:
            await publisher.repeat(falls={4, 5})
            await publisher.repeat(falls={4, 5})
            await publisher.publish(LONGER)

        told, counters = await read(publisher, 3, drive)

    assert told == [[ONE], [SALTED_ONE], [TWO]]
    assert (counters.recovered, counters.gaps) == (2, 0)


async def test_long_backlog_lets_other_tasks_run():
    """Count the turns of another task, because receiving messages that already wait does not yield to the event loop by itself."""
    many, others_turns = 400, 0
    with a_publisher() as publisher:

        async def others() -> None:
            nonlocal others_turns
            while True:
                others_turns += 1
                await turns()

        async with asyncio.timeout(60):
            stream = read_events(publisher.endpoint, "", some_books())
            first = asyncio.ensure_future(anext(stream))
            await publisher.subscribed()
            for _ in range(many):
                await publisher.publish(FIRST)
            await first
            await pace(0.05, "the backlog crosses the socket; if a part is late, the test checks only less")
            working = asyncio.ensure_future(others())
            await turns()
            before = others_turns
            for _ in range(many - 2):
                await anext(stream)
            working.cancel()
            await stream.aclose()

    assert others_turns - before > many / event_stream.BATCHES_A_TURN / 2


async def test_unfillable_gap_clears_everything():
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.repeat()
            await publisher.publish(FIRST)
            await publisher.publish(LONGER, lost=True)
            await publisher.publish(SALTED)
            await publisher.repeat(kept_from=2)

        told, counters = await read(publisher, 2, drive)

    assert told == [[ONE], [KvCleared(), SALTED_ONE]]
    assert counters.gaps == 1


async def test_silent_replay_endpoint_is_not_asked_at_every_gap(monkeypatch):
    monkeypatch.setattr(event_stream, "REPLAY_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(event_stream, "FIRST_PAUSE_SECONDS", 3600.0)
    with a_publisher() as publisher:

        async def drive() -> None:
            for _ in range(4):
                await publisher.publish(FIRST)
                await publisher.publish(LONGER, lost=True)

        told, counters = await read(publisher, 4, drive)

        assert told == [[ONE], *[[KvCleared(), ONE]] * 3]
        assert counters.gaps == 3
        assert await publisher.questions() <= 1


async def test_silent_replay_endpoint_is_asked_again_after_pause(monkeypatch):
    monkeypatch.setattr(event_stream, "REPLAY_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(event_stream, "FIRST_PAUSE_SECONDS", 0.0)
    with a_publisher() as publisher:
        async with asyncio.timeout(60):
            stream = read_events(publisher.endpoint, publisher.replay_endpoint, some_books())
            first = asyncio.ensure_future(anext(stream))
            await publisher.subscribed()
            await publisher.publish(FIRST)
            assert await first == [ONE]
            monkeypatch.setattr(event_stream, "REPLAY_TIMEOUT_SECONDS", 60.0)
            await publisher.publish(LONGER, lost=True)
            await publisher.publish(SALTED)
            repeating = asyncio.ensure_future(publisher.repeat_always())

            assert await anext(stream) == [TWO, SALTED_ONE]
            repeating.cancel()
            await stream.aclose()


async def test_without_replay_a_gap_clears_everything():
    with a_publisher() as publisher:
        await publisher.publish(FIRST, lost=True)

        async def drive() -> None:
            await publisher.publish(FIRST)
            await publisher.publish(LONGER, lost=True)
            await publisher.publish(SALTED)

        told, counters = await read(publisher, 2, drive, replay=False)

    assert told == [[ONE], [KvCleared(), SALTED_ONE]]
    assert counters.gaps == 1


async def test_restarted_engine_is_followed_from_its_first_batch():
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.repeat()
            await publisher.publish(FIRST)
            await publisher.publish(LONGER)
            publisher.restart()
            await publisher.publish(SALTED)
            await publisher.publish(FIRST)

        told, counters = await read(publisher, 4, drive)

    assert told == [[ONE], [TWO], [KvCleared(), SALTED_ONE], [ONE]]
    assert (counters.restarts, counters.gaps) == (1, 0)


async def test_unnoticed_engine_restart_is_detected_at_a_gap():
    """Lose the first batches of a restarted engine, so that the next number continues those of the earlier process."""
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.repeat()
            await publisher.publish(FIRST)
            publisher.restart()
            await publisher.publish(SALTED, lost=True)
            await publisher.publish(FIRST, lost=True)
            await publisher.publish(LONGER)
            await publisher.repeat()
            await publisher.repeat()

        told, counters = await read(publisher, 2, drive)

    assert told == [[ONE], [KvCleared(), SALTED_ONE, ONE, TWO]]
    assert (counters.restarts, counters.gaps, counters.recovered) == (1, 0, 2)


async def test_view_is_right_with_lost_and_reordered_batches():
    rng = random.Random(11)
    truth: dict[int, tuple[bytes, ...]] = {}
    batches = []
    for number in range(300):
        if truth and rng.random() < 0.4:
            gone = rng.choice(list(truth))
            del truth[gone]
            batches.append(a_batch(removed(gone)))
        else:
            truth[number] = names(number * 32, number * 32 + 32)
            batches.append(a_batch(stored([number], None, number * 32, number * 32 + 32)))
    books, view = some_books(1000), CacheView()
    with a_publisher() as publisher:

        async def drive() -> None:
            answering = asyncio.create_task(publisher.repeat_always())
            order = list(range(len(batches) - 1))
            for place in rng.sample(range(0, len(order) - 1, 2), len(order) // 20):
                order[place], order[place + 1] = order[place + 1], order[place]
            lost = set(rng.sample(order, len(order) // 20))
            publisher.keep(batches)
            for number in order:
                if number not in lost:
                    await publisher.send(b"", number.to_bytes(8, "big"), batches[number])
            await publisher.send(b"", (len(batches) - 1).to_bytes(8, "big"), batches[-1])
            await finished.wait()
            answering.cancel()

        finished = asyncio.Event()
        counters = EventStreamCounters()

        async def listen() -> None:
            async for events in read_events(publisher.endpoint, publisher.replay_endpoint, books, counters):
                view.apply(events)
                if counters.batches == len(batches):
                    finished.set()
                    return

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(listen())
            await publisher.subscribed()
            await drive()

    held = {name for chunk in view.dump()[1:] for event in chunk for name in event.hashes}
    assert held == {name for blocks in truth.values() for name in blocks}
    assert counters.recovered >= 14
    assert (counters.gaps, counters.restarts) == (0, 0)


async def test_unreadable_batch_clears_everything_and_stream_goes_on():
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.repeat()
            await publisher.publish(FIRST)
            await publisher.publish(b"\xc1")
            await publisher.send(b"one frame")
            await publisher.publish(SALTED)

        told, counters = await read(publisher, 4, drive)

    assert told == [[ONE], [KvCleared()], [KvCleared()], [SALTED_ONE]]
    assert counters.unreadable == 2
    assert "frames" in counters.why


async def test_number_far_ahead_costs_no_more_than_one_gap():
    with a_publisher() as publisher:

        async def drive() -> None:
            await publisher.repeat()
            await publisher.publish(FIRST)
            await publisher.send(b"", (2**63).to_bytes(8, "big"), SALTED)
            await publisher.repeat()

        told, counters = await read(publisher, 2, drive)

    assert told == [[ONE], [KvCleared(), SALTED_ONE]]
    assert (counters.gaps, counters.restarts) == (1, 0)


@pytest.mark.parametrize("seconds", ["REPLAY_TIMEOUT_SECONDS", "REPLAY_SECONDS"])
async def test_endless_replay_is_cut_and_lets_other_tasks_run(monkeypatch, seconds):
    """Replay without end, the same batches or new ones, so fast that the publisher does not count as silent."""
    monkeypatch.setattr(event_stream, seconds, 0.3)
    again = seconds == "REPLAY_TIMEOUT_SECONDS"
    monkeypatch.setattr(event_stream, "RECEIVE_BATCHES", 200 if again else 10**9)
    with a_publisher() as publisher:

        async def drive() -> None:
            client, _, _ = await publisher.replay.recv_multipart()
            for number in range(10**9):
                counted = number % 16 if again else number
                await publisher.replay.send_multipart([client, b"", counted.to_bytes(8, "big"), FIRST])
                await turns()

        async with asyncio.timeout(60):
            stream = read_events(publisher.endpoint, publisher.replay_endpoint, some_books())
            driving = asyncio.ensure_future(drive())
            assert await anext(stream) == [ONE]
            driving.cancel()
            await stream.aclose()


@pytest.mark.parametrize("number", [b"", bytes(7), b"\x01" + bytes(8)])
async def test_garbage_replay_counts_as_none(number):
    with a_publisher() as publisher:

        async def drive() -> None:
            client, _, _ = await publisher.replay.recv_multipart()
            await publisher.replay.send_multipart([client, b"", number, FIRST])
            await publisher.publish(SALTED)

        told, counters = await read(publisher, 1, drive)

    assert told == [[SALTED_ONE]]
    assert counters.recovered == 0


async def test_recorded_sglang_frames_arrive_whole():
    with a_publisher(b"kv-events") as publisher:

        async def drive() -> None:
            await publisher.repeat()
            for batch in SGLANG:
                await publisher.publish(batch)

        told, counters = await read(publisher, 7, drive, books=some_books(100, 16, salt_of=client_salt))

    assert [len(events) for events in told] == [1, 1, 1, 1, 1, 2, 1]
    assert counters.batches == 7


def test_recorded_sglang_replay_ends_like_ours():
    recorded = json.loads(Path(__file__).with_name("sglang_kv_events.json").read_text(encoding="utf-8"))
    *batches, end = recorded["replayed"]

    assert [int(number, 16) for *_, number, _ in batches] == [5, 6]
    assert bytes.fromhex(end[-2]) == END_OF_REPLAY
