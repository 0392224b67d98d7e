"""Tokenizer threads: they tokenize long prompts, and cancelled work leaves nothing behind."""

import asyncio
import threading

import pytest

from fleet.core.errors import Reason, RequestRejected
from fleet.frontend.text.tokenizer_threads import (
    MAX_TASKS,
    MAX_VERY_LONG_TASKS,
    THREADS,
    VERY_LONG_BYTES,
    TokenizerThreads,
)
from tests.support.waiting import turns, until_answered

SIZE = 10_000
VERY_LONG = VERY_LONG_BYTES + 1


class Slow:
    """Work that ends only when the test sets `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started = threading.Event()
        self.begun = 0

    def __call__(self) -> int:
        self.begun += 1
        self.started.set()
        assert self.go.wait(60)
        return 7


@pytest.fixture
async def threads():
    threads = TokenizerThreads()
    yield threads
    threads.close()


async def test_results_and_exceptions_arrive(threads):
    def fail() -> None:
        raise ValueError("no text")

    assert await threads.run(lambda: 7, SIZE) == 7
    with pytest.raises(ValueError, match="no text"):
        await threads.run(fail, SIZE)


async def test_number_of_waiting_prompts_is_bounded(threads):
    slow = Slow()
    waiting = [threads.run(slow, SIZE) for _ in range(MAX_TASKS)]

    with pytest.raises(RequestRejected) as refused:
        threads.run(slow, SIZE)

    assert refused.value.reason is Reason.QUEUE_FULL
    slow.go.set()
    async with asyncio.timeout(60):
        assert [await each for each in waiting] == [7] * MAX_TASKS


async def test_cancelled_waiting_work_frees_its_place(threads):
    slow = Slow()
    running = [threads.run(slow, SIZE) for _ in range(THREADS)]
    for _ in range(3):
        given_up = [threads.run(slow, SIZE) for _ in range(MAX_TASKS - THREADS)]
        for each in given_up:
            each.cancel()
        await turns(2)
    slow.go.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*running)

    assert slow.begun == THREADS


async def test_started_work_counts_until_it_is_done(threads):
    slow = Slow()
    for each in [threads.run(slow, SIZE) for _ in range(THREADS)]:
        each.cancel()
    await turns()
    waiting = [threads.run(slow, SIZE) for _ in range(MAX_TASKS - THREADS)]

    with pytest.raises(RequestRejected):
        threads.run(slow, SIZE)

    slow.go.set()
    async with asyncio.timeout(60):
        for each in waiting:
            await each

        async def runs_again() -> bool:
            try:
                return await threads.run(slow, SIZE) == 7
            except RequestRejected:
                return False

        await until_answered(runs_again)


async def test_long_prompt_passes_very_long_ones(threads):
    very_long = Slow()
    waiting = [threads.run(very_long, VERY_LONG) for _ in range(MAX_VERY_LONG_TASKS)]

    try:
        assert await asyncio.to_thread(very_long.started.wait, 60)
        async with asyncio.timeout(60):
            assert await threads.run(lambda: 7, SIZE) == 7
    finally:
        very_long.go.set()

    async with asyncio.timeout(60):
        assert [await each for each in waiting] == [7] * MAX_VERY_LONG_TASKS


async def test_very_long_prompts_leave_places_for_others(threads):
    slow = Slow()
    waiting = [threads.run(slow, VERY_LONG) for _ in range(MAX_VERY_LONG_TASKS)]

    with pytest.raises(RequestRejected) as refused:
        threads.run(slow, VERY_LONG)

    assert refused.value.reason is Reason.QUEUE_FULL
    waiting += [threads.run(slow, SIZE) for _ in range(MAX_TASKS - MAX_VERY_LONG_TASKS)]
    slow.go.set()
    async with asyncio.timeout(60):
        assert [await each for each in waiting] == [7] * MAX_TASKS


async def test_very_long_prompt_is_not_starved(threads):
    slow, order = Slow(), []
    running = [threads.run(slow, SIZE) for _ in range(THREADS)]
    others = [threads.run(lambda: order.append("long"), SIZE) for _ in range(8)]
    very_long = threads.run(lambda: order.append("very long"), VERY_LONG)

    slow.go.set()
    async with asyncio.timeout(60):
        for each in (*running, *others, very_long):
            await each

    assert order.index("very long") < len(others)


async def test_conversions_have_one_thread_and_leave_the_others(threads):
    slow = Slow()
    waiting = [threads.convert(slow), threads.convert(slow, is_answer=True)]
    assert await asyncio.to_thread(slow.started.wait, 60)

    async with asyncio.timeout(60):
        assert await threads.run(lambda: 7, SIZE) == 7
    assert slow.begun == 1
    slow.go.set()
    async with asyncio.timeout(60):
        assert [await each for each in waiting] == [7, 7]


async def test_number_of_waiting_bodies_is_bounded(threads):
    slow = Slow()
    waiting = [threads.convert(slow) for _ in range(MAX_TASKS)]

    with pytest.raises(RequestRejected, match="large bodies") as refused:
        threads.convert(slow)

    assert refused.value.reason is Reason.QUEUE_FULL
    # Text of an answer is never rejected, because computing its tokens would have been in vain.
    waiting.append(threads.convert(slow, is_answer=True))
    slow.go.set()
    async with asyncio.timeout(60):
        assert [await each for each in waiting] == [7] * (MAX_TASKS + 1)
