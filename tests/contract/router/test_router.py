"""Contract tests of the router server, for the real router server and for the fake one of the tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from fleet.core.errors import Reason, RequestRejected
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import Role
from fleet.core.system_clock import SystemClock
from fleet.core.work import Cancel, Progress, Start, Step
from fleet.frontend.generation import RouterApi
from fleet.router.machine import RouterMachine
from fleet.router.messages import Complete
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from tests.support.builders import MODEL, a_description, a_kv_report, an_arrival, some_progress
from tests.support.router.fake_router import FakeRouter
from tests.support.router.fake_workers import FakeWorker, FakeWorkers

ANSWER = (5, 6, 7)
SAMPLING = Sampling(max_tokens=3, temperature=0.0)

Cancellations = Callable[[], Awaitable[int]]
"""Function that returns the number of requests that were cancelled at the engine so far."""

Opens = Callable[[], AbstractAsyncContextManager[tuple[RouterApi, Cancellations]]]


class FirstOfAll:
    def randrange(self, stop: int, /) -> int:
        return 0


@asynccontextmanager
async def a_fake() -> AsyncIterator[tuple[RouterApi, Cancellations]]:
    router = FakeRouter(ANSWER)

    async def cancelled() -> int:
        return len(router.cancelled)

    yield router, cancelled


@asynccontextmanager
async def a_real_one() -> AsyncIterator[tuple[RouterApi, Cancellations]]:
    workers = FakeWorkers()
    server = RouterServer(RouterMachine(RouterSettings(), FirstOfAll()), workers, SystemClock())
    workers.hear = server.hear
    count = 0

    async def play(worker: FakeWorker) -> None:
        nonlocal count
        while True:
            match await worker.inbox.get():
                case Start() as start:
                    for index, token in enumerate(ANSWER):
                        last = index == len(ANSWER) - 1 and start.sampling.max_tokens == len(ANSWER)
                        step = some_progress(
                            token,
                            request_id=start.request_id,
                            finish=Finish.LENGTH if last else None,
                            kv=a_kv_report(len(start.tokens) // 4) if last or index == 0 else None,
                        )
                        await worker.say(Step(progress=(step,)))
                case Cancel():
                    count += 1
                case other:
                    raise AssertionError(other)

    async def cancelled() -> int:
        await workers.settle()
        return count

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.run())
        worker = workers.join(a_description(role=Role.BOTH))
        await workers.settle()
        playing = tasks.create_task(play(worker))
        yield server, cancelled
        running.cancel()
        playing.cancel()


@pytest.fixture(params=[a_fake, a_real_one])
def opens(request: pytest.FixtureRequest) -> Opens:
    return request.param


async def test_progress_is_ordered_and_ends_with_complete(opens):
    async with opens() as (router, cancelled):
        async with router.submit(an_arrival(sampling=SAMPLING)) as events:
            received = [event async for event in events]

        *steps, complete = received
        assert [token for step in steps if isinstance(step, Progress) for token in step.token_ids] == list(ANSWER)
        assert isinstance(complete, Complete)
        assert (complete.finish, len(complete.kv)) == (Finish.LENGTH, 1)
        assert await cancelled() == 0


async def test_leaving_a_stream_early_cancels_the_attempt(opens):
    async with opens() as (router, cancelled):
        async with router.submit(an_arrival(sampling=Sampling(max_tokens=99))) as events:
            await anext(events)

        assert await cancelled() == 1


async def test_first_tokens_carry_the_kv_report(opens):
    async with opens() as (router, _):
        async with router.submit(an_arrival(tokens=100, sampling=Sampling(max_tokens=99))) as events:
            await anext(events)
            known = events.kv

        (phase,) = known
        assert phase.report.prompt_blocks == 4
        assert events.kv == known, "leaving the stream changes nothing"


async def test_served_models_are_listed(opens):
    async with opens() as (router, _):
        assert [card.name for card in router.models()] == [MODEL]


async def test_rejection_is_raised_on_entry_or_by_the_iterator():
    fake = FakeRouter(ANSWER)
    fake.refuse = RequestRejected(Reason.NO_WORKER, "no worker")
    real = RouterServer(RouterMachine(RouterSettings(), FirstOfAll()), FakeWorkers(), SystemClock())
    for router in (fake, real):
        with pytest.raises(RequestRejected) as refused:
            async with router.submit(an_arrival()) as events:
                await anext(events)
        assert refused.value.reason is Reason.NO_WORKER
