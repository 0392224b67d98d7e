"""Long prompts in threads: what is given up leaves nothing behind."""

import asyncio
import threading

import pytest

from fleet.errors import Reason, Refused
from fleet.router.tokenising import MOST, THREADS, TokenisingThreads


class Slow:
    """Work that takes until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = 0

    def __call__(self) -> int:
        self.begun += 1
        assert self.go.wait(10)
        return 7


@pytest.fixture
async def threads():
    threads = TokenisingThreads()
    yield threads
    threads.close()


async def test_results_and_failures_arrive(threads):
    def fail() -> None:
        raise ValueError("no text")

    assert await threads.run(lambda: 7) == 7
    with pytest.raises(ValueError, match="no text"):
        await threads.run(fail)


async def test_no_more_wait_than_so_many(threads):
    slow = Slow()
    waiting = [threads.run(slow) for _ in range(MOST)]

    with pytest.raises(Refused) as refused:
        threads.run(slow)

    assert refused.value.reason is Reason.QUEUE_FULL
    slow.go.set()
    async with asyncio.timeout(10):
        assert [await each for each in waiting] == [7] * MOST


async def test_what_is_given_up_before_it_began_is_held_no_more_and_makes_room_at_once(threads):
    slow = Slow()
    running = [threads.run(slow) for _ in range(THREADS)]
    for _ in range(3):
        given_up = [threads.run(slow) for _ in range(MOST - THREADS)]
        for each in given_up:
            each.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    slow.go.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*running)

    assert slow.begun == THREADS


async def test_what_a_thread_has_begun_counts_until_it_is_done_whoever_waits(threads):
    slow = Slow()
    for each in [threads.run(slow) for _ in range(THREADS)]:
        each.cancel()
    await asyncio.sleep(0)
    waiting = [threads.run(slow) for _ in range(MOST - THREADS)]

    with pytest.raises(Refused):
        threads.run(slow)

    slow.go.set()
    async with asyncio.timeout(10):
        for each in waiting:
            await each
        while True:
            try:
                await threads.run(slow)
                break
            except Refused:
                await asyncio.sleep(0)
