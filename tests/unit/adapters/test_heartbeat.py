"""When a child counts as silent, by a clock that the test moves."""

import asyncio

import pytest

from fleet.adapters.heartbeat import BEAT_SECONDS, fell_silent

LIMIT = 5


class Leaping(asyncio.SelectorEventLoop):
    """An event loop whose clock leaps."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    async def leap(self, seconds: float) -> None:
        """Let so much time pass at once, and then everybody have a few turns."""
        self.ahead += seconds
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
def runner():
    with asyncio.Runner(loop_factory=Leaping) as runner:
        yield runner


async def watching():
    """A child that has been heard, and who watches it."""
    loop, beats = asyncio.get_running_loop(), asyncio.StreamReader()
    assert isinstance(loop, Leaping)
    watch = asyncio.ensure_future(fell_silent(beats, LIMIT))
    beats.feed_data(b".")
    await loop.leap(0)
    return loop, beats, watch


def test_who_says_nothing_for_as_many_seconds_as_that_is_silent(runner):
    async def scenario():
        loop, _, watch = await watching()
        for _ in range(LIMIT - 1):
            await loop.leap(BEAT_SECONDS)
        assert not watch.done()
        await loop.leap(BEAT_SECONDS)
        assert await watch is True

    runner.run(scenario())


def test_who_says_something_now_and_then_is_not(runner):
    async def scenario():
        loop, beats, watch = await watching()
        for _ in range(100):
            for _ in range(LIMIT - 1):
                await loop.leap(BEAT_SECONDS)
            beats.feed_data(b".")
            await loop.leap(0)
        assert not watch.done()
        watch.cancel()

    runner.run(scenario())


def test_time_in_which_the_watcher_was_asleep_too_is_none(runner):
    async def scenario():
        loop, _, watch = await watching()
        for _ in range(LIMIT - 1):
            await loop.leap(3600)
        assert not watch.done()
        watch.cancel()

    runner.run(scenario())


def test_who_has_ended_is_not_silent_but_gone(runner):
    async def scenario():
        _, beats, watch = await watching()
        beats.feed_eof()
        assert await watch is False

    runner.run(scenario())
