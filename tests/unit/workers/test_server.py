"""Worker server with a simulated engine, and routers in memory; the tests take milliseconds of real time."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, RequestId, WorkerId
from fleet.core.requests import Finish
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.system_clock import SystemClock
from fleet.core.work import (
    AnswersWanted,
    Cancel,
    Draining,
    KeptAnswers,
    KvCleared,
    KvEvents,
    KvRemoved,
    KvStored,
    LoadReport,
    Rejected,
    Step,
    WantedAnswer,
    WorkerDescription,
)
from kvstore.block import chain
from tests.support.stopwatch import at_most
from tests.support.waiting import turns, until
from tests.support.workers.engine_driver import an_attempt, fresh_prompt, greedy
from workers.cache_view import CHUNK, CacheView
from workers.engines.simulated.launch import open_engine
from workers.machine import LifePhase
from workers.ports import EngineDied, EngineHung
from workers.router_session import MAX_WAITING_ANSWERS, RouterSession
from workers.server import END_SECONDS, WorkerServer
from workers.settings import SimulatedSettings, WorkerSettings
from workers.watchdog import WatchdogSettings


def settings(**fields) -> WorkerSettings:
    simulated = SimulatedSettings(speedup=fields.pop("speedup", 20), kv_blocks=fields.pop("kv_blocks", 64))
    return WorkerSettings(
        **{
            "worker_id": WorkerId("w1"),
            "role": Role.BOTH,
            "engine": "simulated",
            "model": ModelName("tiny"),
            "kv_paths": (KvPath.DIRECT,),
            "load_interval_ms": 10,
            "heartbeat_ms": 50,
            "simulated": simulated,
            **fields,
        }
    )


class Router:
    """The router's end of a session; implements `workers.ports.Outlet`."""

    def __init__(self, *, full: bool = False) -> None:
        self.full = full
        self.session: RouterSession
        self.heard: list = []
        self.cached: dict[bytes, None] = {}
        self.sequence = 0
        self.end_reason: str | None = None
        self._changed = asyncio.Event()

    def put(self, message) -> None:
        assert self.end_reason is None, "nothing follows the end"
        self._hear(message)
        self._changed.set()

    def end(self, why: str) -> None:
        assert self.end_reason is None, "an end comes once"
        self.end_reason = why
        self._changed.set()

    def _hear(self, message) -> None:
        self.heard.append(message)
        if isinstance(message, KvEvents):
            assert message.sequence == self.sequence, "a gap"
            self.sequence += 1
            for event in message.events:
                match event:
                    case KvStored(hashes=hashes):
                        self.cached.update(dict.fromkeys(hashes))
                    case KvRemoved(hashes=hashes):
                        for name in hashes:
                            del self.cached[name]
                    case KvCleared():
                        self.cached.clear()

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not (result := condition()):
                self._changed.clear()
                await self._changed.wait()
        return result

    async def ended(self) -> str:
        await self.until(lambda: self.end_reason is not None)
        assert self.end_reason is not None
        return self.end_reason

    def all(self, kind) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    def progress(self, request_id: RequestId) -> list:
        return [one for step in self.all(Step) for one in step.progress if one.request_id == request_id]

    async def end_of(self, request_id: RequestId):
        """Wait for the end of a request; return its last progress, or its rejection."""

        def ends() -> list:
            finished = [one for one in self.progress(request_id) if one.finish is not None]
            return finished + [one for one in self.all(Rejected) if one.request_id == request_id]

        await self.until(ends)
        (end,) = ends()
        return end


class Running:
    """A worker server that runs in a task."""

    def __init__(self, server: WorkerServer, task: asyncio.Task) -> None:
        self.server = server
        self.task = task

    @asynccontextmanager
    async def router(self, name: str = "router", *, full: bool = False):
        router = Router(full=full)
        router.session = self.server.open(name, router)
        try:
            yield router
        finally:
            self.server.close(router.session)


@asynccontextmanager
async def a_worker(told: WorkerSettings | None = None, clock: Clock | None = None):
    told = told or settings()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(open_engine(told))
        server = WorkerServer(told, engine, clock or SystemClock(), Incarnation("one"))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())

        async def run() -> EngineDied | None:
            try:
                await server.run()
            except EngineDied as died:
                return died
            return None

        running = Running(server, tasks.create_task(run()))
        await turns()
        yield running
        running.task.cancel()


async def test_router_first_gets_description_cache_and_load():
    async with a_worker() as worker, worker.router() as router:
        await router.until(lambda: len(router.heard) >= 3)

        description, cache, load = router.heard[:3]

        assert isinstance(description, WorkerDescription)
        assert (description.worker_id, description.incarnation, description.role) == ("w1", "one", Role.BOTH)
        assert description.engine == "simulated 1"
        assert cache == KvEvents(sequence=0, events=(KvCleared(),))
        assert load == LoadReport(running=0, waiting=0, kv_blocks_used=0)


async def test_decode_step_is_one_message_for_all_requests():
    async with a_worker() as worker, worker.router() as router:
        starts = [an_attempt(fresh_prompt(40), 20) for _ in range(4)]
        for start in starts:
            router.session.receive(start)
        for start in starts:
            end = await router.end_of(start.request_id)
            assert end.finish is Finish.LENGTH
            assert sum(len(one.token_ids) for one in router.progress(start.request_id)) == 20

        assert len(router.all(Step)) <= 20 + 4
        assert max(len(step.progress) for step in router.all(Step)) == 4


async def test_unfetched_blocks_keep_worker_no_longer_than_their_lease():
    brief = SimulatedSettings(speedup=20, kv_blocks=64, direct_lease_ms=200)
    async with a_worker(settings(role=Role.PREFILL, simulated=brief)) as worker, worker.router() as router:
        start = an_attempt(fresh_prompt(40), phase=Phase.PREFILL, kv_path=KvPath.DIRECT)
        router.session.receive(start)
        await router.end_of(start.request_id)
        lending = worker.server.engine.lending
        assert lending.leases == 1

        assert await worker.server.drain(Nanos(10 * SECOND)) == 0

        assert (lending.leases, lending.expired) == (0, 1)


async def test_steps_of_different_routers_do_not_mix():
    async with a_worker() as worker, worker.router("a") as a, worker.router("b") as b:
        same = an_attempt(fresh_prompt(20), 6)
        a.session.receive(same)
        b.session.receive(same)

        ours, theirs = await a.end_of(same.request_id), await b.end_of(same.request_id)

        assert ours.request_id == theirs.request_id == same.request_id
        tokens = [[token for one in router.progress(same.request_id) for token in one.token_ids] for router in (a, b)]
        assert tokens[0] == tokens[1]
        assert len(tokens[0]) == 6


async def test_late_router_gets_whole_cache_then_every_change():
    async with a_worker() as worker, worker.router("early") as early:
        for _ in range(4):
            start = an_attempt(fresh_prompt(500), 2)  # 15 full blocks of 64: some are evicted again
            early.session.receive(start)
            await early.end_of(start.request_id)

        async with worker.router("late") as late:
            await late.until(lambda: late.cached == early.cached)
            assert len(late.cached) > 45
            last = an_attempt(fresh_prompt(500), 2)
            early.session.receive(last)
            names = set(chain(last.tokens, 32))
            await late.until(lambda: names <= late.cached.keys())
            await early.until(lambda: early.cached == late.cached)
            assert len(late.cached) <= 64


async def test_handoffs_name_the_worker_that_holds_the_blocks():
    async with a_worker() as worker, worker.router() as router:
        start = an_attempt(fresh_prompt(100), phase=Phase.PREFILL, kv_path=KvPath.DIRECT)
        router.session.receive(start)

        end = await router.end_of(start.request_id)

        assert end.handoff.prefill_worker == "w1"
        assert end.handoff.num_tokens == 96


async def test_cancel_ends_the_work():
    async with a_worker() as worker, worker.router() as router:
        start = an_attempt(fresh_prompt(10), 2000)
        router.session.receive(start)
        await router.until(lambda: router.progress(start.request_id))

        router.session.receive(Cancel(request_id=start.request_id))

        assert (await router.end_of(start.request_id)).finish is Finish.CANCELLED
        assert worker.server.held == 0


async def freed(worker: Running) -> None:
    """Wait until no request is held and all blocks are free; fail after two seconds, long before the requests could end by themselves."""
    with at_most(2):
        await until(lambda: not (worker.server.held or worker.server.engine.load().kv_blocks_used))


async def test_disconnected_routers_work_is_cancelled():
    async with a_worker(settings(speedup=1)) as worker:
        async with worker.router() as router:
            for _ in range(20):
                router.session.receive(an_attempt(fresh_prompt(10), 2000))
            await router.until(lambda: router.all(Step))
            assert worker.server.held == 20

        await freed(worker)


async def test_router_that_does_not_read_is_cut_alone():
    told = settings(stream_buffer=16, speedup=1, kv_blocks=256)
    async with (
        a_worker(told) as worker,
        worker.router("reads") as reads,
        worker.router("sleeps", full=True) as sleeps,
    ):
        sleeps.session.receive(an_attempt(fresh_prompt(10), 4000))
        ours = an_attempt(fresh_prompt(10), 50)
        reads.session.receive(ours)
        assert "fast enough" in await sleeps.ended()
        assert not sleeps.session.waiting, "what waited is dropped"
        assert sleeps.heard == []

        assert (await reads.end_of(ours.request_id)).finish is Finish.LENGTH
        await freed(worker)


async def test_unread_cache_changes_and_load_cut_the_stream():
    told = settings(stream_buffer=16, load_interval_ms=60_000, heartbeat_ms=60_000)
    async with (
        a_worker(told) as worker,
        worker.router("works") as works,
        worker.router("sleeps", full=True) as sleeps,
    ):
        for _ in range(20):
            start = an_attempt(fresh_prompt(40), 1)
            works.session.receive(start)
            await works.end_of(start.request_id)  # each request changes the cache
        assert "fast enough" in await sleeps.ended()


async def test_unread_answers_are_dropped_before_memory_is_full():
    """Read nothing while kept answers are sent: only a few may wait, because each may have a MiB. More are dropped; the stream goes on."""
    told = settings(stream_buffer=100_000, load_interval_ms=60_000, heartbeat_ms=60_000)
    async with a_worker(told) as worker, worker.router("sleeps", full=True) as sleeps:
        for asked in range(MAX_WAITING_ANSWERS + 1):
            sleeps.session.receive(AnswersWanted(answers=(WantedAnswer(asked, 1),)))
            assert sleeps.end_reason is None, asked
        assert sum(isinstance(each, KeptAnswers) for each in sleeps.session.waiting) == MAX_WAITING_ANSWERS


async def test_messages_for_a_router_that_has_gone_are_dropped():
    async with a_worker() as worker:
        async with worker.router(full=True) as router:
            router.session.receive(AnswersWanted(answers=(WantedAnswer(1, 1),)))
            assert router.session.waiting
        assert not router.session.waiting


async def test_router_that_reads_again_gets_everything_in_order():
    async with a_worker() as worker, worker.router(full=True) as router:
        start = an_attempt(fresh_prompt(40), 20)
        router.session.receive(start)
        await until(lambda: not worker.server.held)
        assert router.heard == []

        router.full = False
        router.session.flow()

        assert isinstance(router.heard[0], WorkerDescription)
        assert (await router.end_of(start.request_id)).finish is Finish.LENGTH
        assert sum(len(one.token_ids) for one in router.progress(start.request_id)) == 20


async def test_a_router_that_connects_twice_keeps_the_newer_stream():
    async with a_worker() as worker, worker.router("same") as older:
        start = an_attempt(fresh_prompt(10), 2000)
        older.session.receive(start)
        async with worker.router("same") as newer:
            assert "connected again" in await older.ended()
            newer.session.receive(start)
            await newer.until(lambda: newer.progress(start.request_id))


async def test_routers_with_one_id_are_in_the_log_once(caplog):
    async with a_worker() as worker, AsyncExitStack() as routers:
        for _ in range(20):
            await routers.enter_async_context(worker.router("same"))
        (warning,) = [each for each in caplog.records if each.getMessage() == "router connects again and again"]
        assert warning.router == "same"
        assert "set another router_id" in warning.cause


async def test_load_is_reported_on_change_and_as_a_heartbeat():
    async with a_worker() as worker, worker.router() as router:
        await router.until(lambda: len(router.all(LoadReport)) >= 4)  # heartbeats come although nothing changes
        start = an_attempt(fresh_prompt(10), 2000)
        router.session.receive(start)
        await router.until(lambda: any(load.running == 1 for load in router.all(LoadReport)))
        router.session.receive(Cancel(request_id=start.request_id))
        await router.until(lambda: router.all(LoadReport)[-1] == LoadReport(running=0, waiting=0, kv_blocks_used=0))


async def test_a_deadline_that_passes_ends_the_work():
    async with a_worker(settings(speedup=1)) as worker, worker.router() as router:
        start = an_attempt(fresh_prompt(10), 2000, timeout_ms=50)
        router.session.receive(start)

        end = await router.end_of(start.request_id)

        assert end.reason is Reason.DEADLINE_PASSED
        await freed(worker)


async def test_drain_finishes_work_refuses_new_work_and_ends():
    async with a_worker() as worker, worker.router() as router:
        running = an_attempt(fresh_prompt(10), 100)
        router.session.receive(running)
        await router.until(lambda: router.progress(running.request_id))
        async with asyncio.TaskGroup() as tasks:
            drained = tasks.create_task(worker.server.drain(Nanos(10 * SECOND)))
            await router.until(lambda: router.all(Draining))
            late = an_attempt(fresh_prompt(10))
            router.session.receive(late)
            assert (await router.end_of(late.request_id)).reason is Reason.DRAINING

        assert drained.result() == 0
        assert (await router.end_of(running.request_id)).finish is Finish.LENGTH
        assert await worker.task is None
        assert worker.server.phase is LifePhase.GONE
        assert await router.ended() == "", "a stream ends properly after all was said"


async def test_a_drain_gives_up_at_its_deadline():
    async with a_worker(settings(speedup=1)) as worker, worker.router() as router:
        start = an_attempt(fresh_prompt(10), 2000)
        router.session.receive(start)
        await router.until(lambda: router.progress(start.request_id))

        assert await worker.server.drain(Nanos(50 * MILLISECOND)) == 1
        assert (await router.end_of(start.request_id)).reason is Reason.DRAINING


async def test_a_broken_engine_ends_the_worker_with_an_error(monkeypatch):
    async with a_worker() as worker, worker.router() as router:
        monkeypatch.setattr(worker.server.engine.batch, "plan", lambda: 1 / 0)
        router.session.receive(an_attempt(fresh_prompt(10)))

        died = await asyncio.wait_for(worker.task, 60)

        assert isinstance(died, EngineDied)
        assert "simulated 1" in str(died)
        assert await router.ended(), "the router must not take this for a proper end"


class LaterClock(SystemClock):
    """A clock of real time that a test can move forward."""

    later = Nanos(0)

    def now(self) -> Nanos:
        return Nanos(super().now() + self.later)


async def test_a_hung_engine_ends_the_worker_and_all_its_streams(tmp_path):
    told = settings(speedup=1, watchdog=WatchdogSettings(floor_seconds=0.2, ceiling_seconds=0.5))
    fault = tmp_path / "hang"
    simulated = msgspec.structs.replace(told.simulated, hang_file=str(fault))
    clock = LaterClock()
    async with a_worker(msgspec.structs.replace(told, simulated=simulated), clock) as worker:
        async with worker.router("one") as one, worker.router("two") as two:
            one.session.receive(an_attempt(fresh_prompt(10), 1500))
            await one.until(lambda: one.all(Step))
            assert (worker.server.hung, worker.server.live) == (False, True)

            fault.touch()

            assert await one.ended() == await two.ended() == "its engine hangs"
            assert isinstance(await worker.task, EngineHung)
            assert worker.server.phase is LifePhase.GONE
        assert (worker.server.hung, worker.server.live) == (True, True)
        clock.later = Nanos(END_SECONDS * SECOND)
        assert not worker.server.live, "it should have ended"


async def test_a_draining_worker_whose_engine_hangs_ends_at_once(tmp_path):
    told = settings(speedup=1, watchdog=WatchdogSettings(floor_seconds=0.2, ceiling_seconds=0.5))
    fault = tmp_path / "hang"
    simulated = msgspec.structs.replace(told.simulated, hang_file=str(fault))
    async with a_worker(msgspec.structs.replace(told, simulated=simulated)) as worker, worker.router() as router:
        router.session.receive(an_attempt(fresh_prompt(10), 1500))
        await router.until(lambda: router.all(Step))
        fault.touch()

        assert await worker.server.drain(Nanos(600 * SECOND)) == 1

        assert isinstance(await worker.task, EngineHung)


async def test_requests_over_capacity_are_refused_and_the_rest_served():
    told = msgspec.structs.replace(settings(), max_running=2, max_waiting=3)
    async with a_worker(told) as worker, worker.router() as router:
        starts = [an_attempt(fresh_prompt(10), sampling=greedy(20)) for _ in range(9)]
        for start in starts:
            router.session.receive(start)
        ends = [await router.end_of(start.request_id) for start in starts]

        refused = [end for end in ends if isinstance(end, Rejected)]
        assert [end.reason for end in refused] == [Reason.QUEUE_FULL] * 4
        assert len(ends) - len(refused) == 5


def test_a_cleared_cache_is_empty():
    view = CacheView()
    view.apply([KvStored((b"a" * 16, b"b" * 16)), KvCleared(), KvStored((b"c" * 16,))])

    assert view.dump() == [(KvCleared(),), (KvStored((b"c" * 16,)),)]


def test_a_dump_has_everything_in_order_in_chunks():
    view = CacheView()
    names = [number.to_bytes(16, "big") for number in range(2 * CHUNK + 10)]
    view.apply([KvStored(tuple(names)), KvRemoved((names[5],))])

    first, *chunks = view.dump()

    assert first == (KvCleared(),)
    assert [len(event.hashes) for (event,) in chunks] == [CHUNK, CHUNK, 9]
    assert [name for (event,) in chunks for name in event.hashes] == names[:5] + names[6:]
