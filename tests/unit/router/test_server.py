"""The router server, with fake workers in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec import structs

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import Phase, Role
from fleet.core.system_clock import SystemClock
from fleet.core.work import Cancel, Progress, Start, Step
from fleet.router.machine import RouterMachine
from fleet.router.messages import Complete, WorkerLeft
from fleet.router.server import AnswerKeyChanged, RouterServer
from fleet.router.settings.router import RouterSettings
from tests.support.builders import BLOCK_TOKENS, a_description, a_handoff, a_kv_report, an_arrival, some_progress
from tests.support.router.fake_workers import FakeWorker, FakeWorkers
from tests.support.waiting import turns


class FirstOfAll:
    """A random source that takes the first of equal workers."""

    def randrange(self, stop: int, /) -> int:
        return 0


class Router:
    def __init__(self, **settings):
        self.workers = FakeWorkers()
        self.machine = RouterMachine(RouterSettings(**settings), FirstOfAll())
        self.clock = SystemClock()
        self.server = RouterServer(self.machine, self.workers, self.clock)
        self.workers.hear = self.server.hear

    async def join(self, worker_id: str = "d1", role: Role = Role.DECODE, **fields) -> FakeWorker:
        worker = self.workers.join(a_description(worker_id=worker_id, role=role, **fields))
        await self.workers.settle()
        return worker


@asynccontextmanager
async def a_router(**settings) -> AsyncIterator[Router]:
    router = Router(**settings)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(router.server.run())
        yield router
        running.cancel()
    router.machine.check()
    assert router.server.status().active == 0, "a request was left behind"


async def a_start_at(worker: FakeWorker) -> Start:
    message = await worker.heard()
    assert isinstance(message, Start), message
    return message


async def answer(worker: FakeWorker, start: Start, *tokens: int, finish: Finish | None = None) -> None:
    await worker.say(Step(progress=(some_progress(*tokens, request_id=start.request_id, finish=finish),)))


async def test_stream_ends_with_complete():
    async with a_router() as router:
        worker = await router.join()
        async with router.server.submit(an_arrival()) as events:
            start = await a_start_at(worker)
            await answer(worker, start, 11)
            await answer(worker, start, 12, finish=Finish.STOP)
            received = [event async for event in events]

        assert [event.token_ids for event in received if isinstance(event, Progress)] == [(11,), (12,)]
        assert isinstance(received[-1], Complete)
        assert worker.inbox.empty(), "nothing is cancelled that is over"


async def test_key_of_kept_tokens_changes_with_a_lost_attempt():
    """Lose a worker: the second attempt gets another key, so that a client never gets its tokens under the key of the first."""
    async with a_router() as router:
        first, second = await router.join("d1"), await router.join("d2")
        async with router.server.submit(structs.replace(an_arrival(), answer_key=70)) as events:
            start = await a_start_at(first)
            assert start.answer_key == 70
            await answer(first, start, 11)
            assert (await anext(events)).token_ids == (11,)
            router.server.hear(WorkerLeft(worker_id=WorkerId("d1")))
            start = await a_start_at(second)
            assert (start.answer_key, start.generated_tokens) == (71, 1)
            await answer(second, start, 12, finish=Finish.STOP)
            received = [event async for event in events]

    assert [event.token_ids if isinstance(event, Progress) else event for event in received[:-1]] == [
        AnswerKeyChanged(71),
        (12,),
    ]


async def test_only_the_decode_attempt_has_the_key_of_kept_tokens():
    """Disaggregate a request: only the decode worker may keep tokens, because it may sample another first token than the prefill worker."""
    async with a_router() as router:
        prefill, decode = await router.join("p1", Role.PREFILL), await router.join("d1")
        arrived = structs.replace(an_arrival(tokens=1024), answer_key=70)
        async with router.server.submit(arrived) as events:
            start = await a_start_at(prefill)
            assert start.answer_key == 0
            handed_over = some_progress(11, request_id=start.request_id, finish=Finish.LENGTH, handoff=a_handoff())
            await prefill.say(Step(progress=(handed_over,)))
            start = await a_start_at(decode)
            assert (start.answer_key, start.generated_tokens) == (70, 1)
            assert (await anext(events)).token_ids == (11,)


async def test_nothing_starts_before_the_context_is_entered():
    async with a_router() as router:
        worker = await router.join()
        router.server.submit(an_arrival())

        assert router.server.status().active == 0
        assert worker.inbox.empty()


async def test_leaving_early_cancels_the_attempt():
    async with a_router() as router:
        worker = await router.join()
        async with router.server.submit(an_arrival()) as events:
            start = await a_start_at(worker)
            await answer(worker, start, 11)
            await anext(events)

        assert await worker.heard() == Cancel(request_id=start.request_id)


async def test_kv_report_is_readable_after_leaving_early():
    async with a_router() as router:
        worker = await router.join()
        async with router.server.submit(an_arrival(tokens=320)) as events:
            assert (events.kv, events.cached_tokens) == ((), 0)
            start = await a_start_at(worker)
            report = a_kv_report(320, cached_blocks=4)
            await worker.say(Step(progress=(some_progress(11, request_id=start.request_id, kv=report),)))
            await answer(worker, start, 12)
            await anext(events)

        assert [(phase.phase, phase.worker_id, phase.report) for phase in events.kv] == [
            (Phase.AGGREGATED, "d1", report)
        ]
        assert events.cached_tokens == 4 * BLOCK_TOKENS


async def test_cancelled_consumer_cancels_the_attempt():
    async with a_router() as router:
        worker = await router.join()

        async def consume() -> None:
            async with router.server.submit(an_arrival()) as events:
                async for _ in events:
                    pass

        async with asyncio.TaskGroup() as tasks:
            consumer = tasks.create_task(consume())
            start = await a_start_at(worker)
            consumer.cancel()
        assert await worker.heard() == Cancel(request_id=start.request_id)


async def test_rejection_on_arrival_is_raised_on_entering():
    async with a_router() as router:
        with pytest.raises(RequestRejected) as refusal:
            async with router.server.submit(an_arrival()):
                pytest.fail("was entered")

        assert refusal.value.reason is Reason.NO_WORKER
        assert refusal.value.retry_after_ms == 1000


async def test_later_rejection_is_raised_after_the_tokens():
    async with a_router() as router:
        worker = await router.join()
        async with router.server.submit(an_arrival()) as events:
            start = await a_start_at(worker)
            await answer(worker, start, 11)
            await worker.leave()
            assert (await anext(events)).token_ids == (11,)
            with pytest.raises(RequestRejected) as refusal:
                await anext(events)

        assert refusal.value.reason is Reason.WORKER_LOST


async def test_two_requests_with_one_id_cannot_run():
    async with a_router() as router:
        worker = await router.join()
        async with router.server.submit(an_arrival()) as events:
            start = await a_start_at(worker)
            with pytest.raises(RequestRejected) as refusal:
                async with router.server.submit(an_arrival()):
                    pytest.fail("was entered")
            await answer(worker, start, 11, finish=Finish.STOP)
            assert [type(event) for event in [event async for event in events]] == [Progress, Complete]

        assert (refusal.value.reason, refusal.value.field) == (Reason.INVALID_ARGUMENT, "request_id")


async def test_undeliverable_attempt_goes_to_another_worker():
    async with a_router() as router:
        await router.join("d1")
        second = await router.join("d2")
        router.workers.cut(WorkerId("d1"))
        async with router.server.submit(an_arrival()) as events:
            start = await a_start_at(second)
            await answer(second, start, 11, finish=Finish.STOP)
            received = [event async for event in events]

        assert isinstance(received[-1], Complete)


async def test_lost_worker_is_replaced_within_one_stream():
    async with a_router() as router:
        first = await router.join("d1")
        second = await router.join("d2")
        async with router.server.submit(an_arrival()) as events:
            await answer(first, await a_start_at(first), 11)
            await first.leave()
            await answer(second, await a_start_at(second), 12, finish=Finish.LENGTH)
            received = [event async for event in events]

        assert [event.token_ids for event in received if isinstance(event, Progress)] == [(11,), (12,)]


async def test_handoff_reaches_the_decode_worker():
    async with a_router() as router:
        prefill_worker = await router.join("p1", Role.PREFILL)
        decode_worker = await router.join("d1")
        async with router.server.submit(an_arrival(tokens=1000)) as events:
            prefill = await a_start_at(prefill_worker)
            handoff = a_handoff(num_tokens=1000)
            progress = some_progress(11, request_id=prefill.request_id, finish=Finish.LENGTH, handoff=handoff)
            await prefill_worker.say(Step(progress=(progress,)))
            decode = await a_start_at(decode_worker)
            assert (decode.phase, decode.handoff) == (Phase.DECODE, handoff)
            await answer(decode_worker, decode, 12, finish=Finish.STOP)
            received = [event async for event in events]

        assert [event.token_ids for event in received if isinstance(event, Progress)] == [(11,), (12,)]


async def test_deadline_fires_without_other_events():
    async with a_router() as router:
        worker = await router.join()
        soon = Nanos(router.clock.now() + 30 * MILLISECOND)
        async with router.server.submit(an_arrival(deadline=soon)) as events:
            start = await a_start_at(worker)
            with pytest.raises(RequestRejected) as refusal:
                await anext(events)

        assert refusal.value.reason is Reason.DEADLINE_PASSED
        assert router.clock.now() >= soon
        assert await worker.heard() == Cancel(request_id=start.request_id)


async def test_earlier_deadline_that_arrives_later_fires_in_time():
    async with a_router() as router:
        await router.join()
        now = router.clock.now()
        async with router.server.submit(an_arrival(request_id="patient", deadline=Nanos(now + 60 * SECOND))):
            await turns()  # the timer is set for the later deadline
            hasty = an_arrival(request_id="hasty", deadline=Nanos(now + 20 * MILLISECOND))
            async with router.server.submit(hasty) as events:
                with pytest.raises(RequestRejected):
                    await anext(events)


async def test_stopping_rejects_streams_and_cancels_attempts():
    router = Router()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(router.server.run())
        worker = await router.join()
        async with router.server.submit(an_arrival()) as events:
            start = await a_start_at(worker)
            running.cancel()
            with pytest.raises(RequestRejected) as refusal:
                await anext(events)
            assert refusal.value.reason is Reason.DRAINING
            assert await worker.heard() == Cancel(request_id=start.request_id)
    with pytest.raises(RequestRejected):
        async with router.server.submit(an_arrival(request_id="later")):
            pytest.fail("was entered")


async def test_drain_finishes_running_requests_only():
    async with a_router() as router:
        worker = await router.join()
        async with router.server.submit(an_arrival()) as events, asyncio.TaskGroup() as tasks:
            start = await a_start_at(worker)
            draining = tasks.create_task(router.server.drain(Nanos(10 * SECOND)))
            await turns()
            with pytest.raises(RequestRejected) as refusal:
                async with router.server.submit(an_arrival(request_id="late")):
                    pytest.fail("was entered")
            await answer(worker, start, 11, finish=Finish.STOP)
            assert [type(event) for event in [event async for event in events]] == [Progress, Complete]

        assert refusal.value.reason is Reason.DRAINING
        assert draining.result() == 0


async def test_drain_ends_after_its_limit():
    async with a_router() as router:
        await router.join()
        async with router.server.submit(an_arrival()) as events:
            assert await router.server.drain(Nanos(10 * MILLISECOND)) == 1
            with pytest.raises(RequestRejected) as refusal:
                await anext(events)

        assert refusal.value.reason is Reason.DRAINING


async def test_server_passes_views_of_the_machine():
    async with a_router() as router:
        await router.join()
        async with router.server.submit(an_arrival()):
            assert router.server.status().active == 1
            assert [card.name for card in router.server.models()] == ["tiny"]
            assert router.server.explain(RequestId("r1")).placements[0].decode == "d1"


def hear(router: Router, listener: "Told") -> None:
    router.server.hear(WorkerLeft(worker_id=WorkerId("w1")))


def tune(router: Router, listener: "Told") -> None:
    router.server.tune(router.server.thresholds())


def open_another(router: Router, listener: "Told") -> None:
    router.server.open(an_arrival(request_id="another"), Told())


def close(router: Router, listener: "Told") -> None:
    router.server.close(RequestId("r1"), listener)


class Told(list):
    """A listener that records its events."""

    put = list.append


@pytest.mark.parametrize("say", [hear, tune, open_another, close])
async def test_exception_in_a_decision_ends_the_router(monkeypatch, say):
    router, told = Router(), Told()

    async def run() -> None:
        with pytest.raises(ExceptionGroup) as ended:
            await router.server.run()
        assert ended.group_contains(ZeroDivisionError)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(run())
        await router.join()
        router.server.open(an_arrival(), told)
        router.server.open(an_arrival(request_id="beside"), beside := Told())
        monkeypatch.setattr(router.machine, "handle", lambda event, now: 1 / 0)

        with pytest.raises(ZeroDivisionError):
            say(router, told)

    assert [refused.reason for refused in beside] == [Reason.DRAINING]
    assert [refused.reason for refused in told] == ([] if say is close else [Reason.DRAINING])
    with pytest.raises(RequestRejected):
        router.server.open(an_arrival(request_id="later"), Told())
