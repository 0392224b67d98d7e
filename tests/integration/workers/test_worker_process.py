"""Tests of a worker process with its streams, control port and registry."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fleet.backends.workers.streams import WorkerStreams
from fleet.core.clock import SECOND
from fleet.core.errors import Reason
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.requests import Finish, Source
from fleet.core.roles import KvPath, Phase, Role
from fleet.core.system_clock import SystemClock
from fleet.core.work import Cancel, Draining, LoadReport, Rejected, RouterHello, Step, WorkerDescription
from fleet.membership.messages import MemberJoined, MemberLeft, MemberUnreachable
from fleet.membership.ports import NameHeld, RegistryUnreachable, WorkerSuperseded
from fleet.membership.registry import GrpcRegistries, GrpcRegistry, GrpcRegistryClient
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from fleet.net.grpc.options import SERVER_OPTIONS
from fleet.router.messages import WorkerJoined, WorkerLeft
from fleet.router.settings.router import RouterSettings
from fleet.v1 import worker_pb2 as pb
from fleet.v1 import worker_pb2_grpc as pb_grpc
from fleet.wire.worker import encode_router_message
from kvstore.net.frames import HEAD
from kvstore.security.credentials import Credentials
from tests.support.backends.stream_workers import EventInbox
from tests.support.builders import token_bytes
from tests.support.kvstore.builders import a_short_folder
from tests.support.servers.processes import a_free_port
from tests.support.stopwatch import at_most
from tests.support.waiting import stays, until
from tests.support.workers.engine_driver import an_attempt, blocks_from, fresh_prompt, greedy
from tests.support.workers.worker_processes import (
    StreamEnded,
    a_raw_message,
    a_router_stream,
    a_silent_stream,
    a_worker_process,
)
from workers.connections import router_streams
from workers.connections.router_streams import serve_routers
from workers.engines.simulated.launch import open_engine
from workers.ports import EngineDied, EngineHung
from workers.server import WorkerServer
from workers.settings import SimulatedSettings, WorkerSettings
from workers.watchdog import WatchdogSettings

pytestmark = pytest.mark.integration


TICK_SECONDS = 0.02  # seconds between two checks of a worker for unfinished work
LEASE_SECONDS = 30  # lease of handed-off blocks


def settings(worker_id: str = "w1", *, speedup: float = 20, kv_blocks: int = 1024, **fields) -> WorkerSettings:
    return WorkerSettings(
        **{
            "worker_id": WorkerId(worker_id),
            "engine": "simulated",
            "control_listen": "127.0.0.1:0",
            "control_credentials": Credentials(insecure=True),
            "model": ModelName("tiny"),
            "kv_paths": (KvPath.DIRECT,),
            "load_interval_ms": 20,
            "heartbeat_ms": 100,
            "simulated": SimulatedSettings(speedup=speedup, kv_blocks=kv_blocks),
            **fields,
        }
    )


@pytest.fixture(scope="module")
def folder():
    with a_short_folder() as folder:
        yield folder


class RecordingRegistry:
    """A registry that can stop and return at the same address."""

    def __init__(self, lease_ms: int) -> None:
        self.server = RegistryServer(MembershipSettings(lease_ms=lease_ms, tick_ms=20), SystemClock())
        self.port = a_free_port()
        self._grpc = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def open(self) -> None:
        self._grpc = grpc.aio.server(options=SERVER_OPTIONS)
        GrpcRegistry(self.server).add(self._grpc)
        assert self._grpc.add_insecure_port(self.address)
        await self._grpc.start()

    async def close(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(grace=0)
            self._grpc = None  # its destructor needs a running loop


@asynccontextmanager
async def a_registry(lease_ms=30_000):
    registry = RecordingRegistry(lease_ms)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await registry.open()
        expiring = tasks.create_task(registry.server.run())
        try:
            yield registry
        finally:
            expiring.cancel()
            await registry.close()


async def next_change(changes):
    async with asyncio.timeout(60):
        return await anext(changes)


async def test_a_request_streams_and_the_worker_describes_itself(folder):
    async with a_worker_process(folder, settings()) as worker:
        async with a_router_stream(worker.address) as stream:
            description = await stream.next(WorkerDescription)
            assert (description.worker_id, description.role, description.engine) == ("w1", Role.BOTH, "simulated 1")

            tokens, end = await stream.do(an_attempt(fresh_prompt(500), 20))

            assert len(tokens) == 20
            assert end.finish is Finish.LENGTH
            assert end.kv.prompt_blocks == 16
        async with grpc.aio.insecure_channel(worker.control) as channel:
            described = await pb_grpc.WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=60)
            assert described.incarnation == description.incarnation


async def test_blocks_move_between_processes(folder):
    roles = {role: settings(role.value, role=role) for role in (Role.PREFILL, Role.DECODE)}
    async with (
        a_worker_process(folder, roles[Role.PREFILL]) as prefill,
        a_worker_process(folder, roles[Role.DECODE]) as decode,
        a_router_stream(prefill.address) as to_prefill,
        a_router_stream(decode.address) as to_decode,
    ):
        prompt = fresh_prompt(300)
        first, prefilled = await to_prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.DIRECT))
        after = an_attempt(prompt + token_bytes(first), 9, phase=Phase.DECODE, handoff=prefilled.handoff)
        rest, end = await to_decode.do(after)

        assert prefilled.handoff.prefill_worker == "prefill"
        assert blocks_from(end.kv, Source.DIRECT) == 9
        assert end.kv.origins[0].origin == "prefill"
        aggregated, _ = await to_decode.do(an_attempt(prompt, 10, salt=b"x" * 32))  # not from its own cache
        assert first + rest == aggregated


async def test_stopping_prefill_worker_waits_until_handoffs_are_read(folder):
    roles = {role: settings(role.value, role=role) for role in (Role.PREFILL, Role.DECODE)}
    async with (
        a_worker_process(folder, roles[Role.PREFILL]) as prefill,
        a_worker_process(folder, roles[Role.DECODE]) as decode,
        a_router_stream(prefill.address) as to_prefill,
        a_router_stream(decode.address) as to_decode,
    ):
        prompts = [fresh_prompt(300), fresh_prompt(300)]
        handed = [
            await to_prefill.do(an_attempt(prompt, phase=Phase.PREFILL, kv_path=KvPath.DIRECT)) for prompt in prompts
        ]

        prefill.terminate()
        await to_prefill.next(Draining)

        for prompt, (first, end) in zip(prompts, handed, strict=True):
            await stays(
                lambda: prefill.process.returncode is None, 3 * TICK_SECONDS, "a worker that does not wait would end"
            )
            after = an_attempt(prompt + token_bytes(first), 9, phase=Phase.DECODE, handoff=end.handoff)
            _, answer = await to_decode.do(after)
            assert blocks_from(answer.kv, Source.DIRECT) == 9
        async with asyncio.timeout(LEASE_SECONDS / 2):
            assert await prefill.ended() == 0


async def test_cancelling_stops_the_engine_and_frees_its_blocks(folder):
    async with a_worker_process(folder, settings(speedup=1)) as worker, a_router_stream(worker.address) as stream:
        start = an_attempt(fresh_prompt(100), 3000)
        await stream.say(start)
        await stream.next(Step)

        await stream.say(Cancel(request_id=start.request_id))

        _, end = await stream.end_of(start.request_id)
        assert end.finish is Finish.CANCELLED
        await stream.until(lambda message: message == LoadReport(running=0, waiting=0, kv_blocks_used=0) or None)


async def test_lost_router_frees_its_attempts(folder):
    async with (
        a_worker_process(folder, settings(speedup=1)) as worker,
        a_router_stream(worker.address, "watching") as watching,
    ):
        async with a_router_stream(worker.address, "disappearing") as stream:
            for _ in range(20):
                await stream.say(an_attempt(fresh_prompt(100), 3000))
            await stream.next(Step)
            await watching.until(
                lambda message: message if isinstance(message, LoadReport) and message.running else None
            )

        await watching.until(lambda message: message == LoadReport(running=0, waiting=0, kv_blocks_used=0) or None)


async def test_a_malformed_start_is_rejected_and_the_stream_goes_on(folder):
    async with a_worker_process(folder, settings()) as worker, a_router_stream(worker.address) as stream:
        stream.write(a_raw_message(start=pb.Start(request_id="bad", phase=7)))
        rejected = await stream.next(Rejected)
        assert (rejected.request_id, rejected.reason, rejected.field) == ("bad", Reason.INVALID_ARGUMENT, "start.phase")

        stream.write(a_raw_message())  # from a newer router
        _, end = await stream.do(an_attempt(fresh_prompt(10), 3))
        assert end.finish is Finish.LENGTH


@pytest.mark.parametrize(
    "first",
    [
        a_raw_message(cancel=pb.Cancel(request_id="r")),
        a_raw_message(hello=pb.Hello()),
        encode_router_message(an_attempt(b"1234")),
        a_raw_message(),
    ],
    ids=["cancel", "nameless", "start", "unknown"],
)
async def test_stream_without_hello_is_rejected(folder, first):
    async with a_worker_process(folder, settings()) as worker, a_silent_stream(worker.address) as stream:
        stream.write(first)

        assert "hello" in await stream.ended()


async def test_hello_may_be_sent_only_once(folder):
    async with a_worker_process(folder, settings()) as worker, a_router_stream(worker.address) as stream:
        await stream.say(RouterHello(router_id="again"))

        assert "already" in await stream.ended()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", HEAD.pack(4) + b"\xff\xff\xff\xff", HEAD.pack(9) + b"half"], ids=str
)
async def test_garbage_ends_only_its_stream(folder, said):
    async with a_worker_process(folder, settings()) as worker, a_router_stream(worker.address) as sound:
        async with a_router_stream(worker.address, "garbage") as stream:
            await stream.say(an_attempt(fresh_prompt(10), 3000))
            await stream.next(Step)
            stream.connection.transport.write(said)
            stream.connection.transport.write_eof()
            await stream.ended()

        await sound.until(lambda message: message == LoadReport(running=0, waiting=0, kv_blocks_used=0) or None)
        _, end = await sound.do(an_attempt(fresh_prompt(10), 3))
        assert end.finish is Finish.LENGTH


async def test_silent_router_is_cut(monkeypatch):
    monkeypatch.setattr(router_streams, "HELLO_SECONDS", 0.05)
    told = settings()
    async with open_engine(told) as engine:
        server = WorkerServer(told, engine, SystemClock(), Incarnation("one"))
        async with serve_routers(server, "127.0.0.1:0") as address, a_silent_stream(address) as stream:
            assert "hello" in await stream.ended()


async def test_router_that_does_not_read_is_cut_and_worker_is_well(folder):
    listen = f"unix:{folder}/sleeps"  # with small buffers
    told = settings(speedup=1000, stream_buffer=32, max_running=64, kv_blocks=8192, listen=listen)
    async with a_worker_process(folder, told) as worker, a_router_stream(worker.address, "sleeps") as sleeps:
        sleeps.connection.pause_reading()
        for _ in range(64):
            await sleeps.say(an_attempt(fresh_prompt(10), 4000))
        async with a_router_stream(worker.address, "reads") as reads:
            await reads.until(lambda message: message if isinstance(message, LoadReport) and message.running else None)
            await reads.until(lambda message: message == LoadReport(running=0, waiting=0, kv_blocks_used=0) or None)
            _, end = await reads.do(an_attempt(fresh_prompt(10), 3))
            assert end.finish is Finish.LENGTH

        sleeps.connection.resume_reading()
        await sleeps.ended()


async def test_router_that_reads_late_gets_everything(folder):
    listen = f"unix:{folder}/late"  # with small buffers
    told = settings(speedup=1000, stream_buffer=100_000, max_running=64, kv_blocks=8192, listen=listen)
    async with a_worker_process(folder, told) as worker, a_router_stream(worker.address, "late") as late:
        late.connection.pause_reading()
        starts = [an_attempt(fresh_prompt(10), 1000) for _ in range(64)]
        for start in starts:
            await late.say(start)
        async with a_router_stream(worker.address, "reads") as reads:
            await reads.until(lambda message: message if isinstance(message, LoadReport) and message.running else None)
            await reads.until(lambda message: message == LoadReport(running=0, waiting=0, kv_blocks_used=0) or None)

        late.connection.resume_reading()

        ended: set[str] = set()
        while len(ended) < len(starts):
            for one in (await late.next(Step)).progress:
                if one.finish is not None:
                    ended.add(one.request_id)
        assert all(len(late.tokens_of(start.request_id)) == 1000 for start in starts)


async def test_cut_ends_a_stream_that_the_router_does_not_read(folder, caplog):
    caplog.set_level("INFO", "workers.server")
    told = settings(speedup=5, stream_buffer=64, max_running=64, kv_blocks=8192)
    async with open_engine(told) as engine:
        server = WorkerServer(told, engine, SystemClock(), Incarnation("one"))
        async with asyncio.TaskGroup() as tasks, serve_routers(server, f"unix:{folder}/cut") as address:
            running = tasks.create_task(server.run())
            async with a_router_stream(address, "sleeps") as sleeps:
                sleeps.connection.pause_reading()
                for _ in range(64):  # large steps, so that unsent output also waits in the connection
                    await sleeps.say(an_attempt(fresh_prompt(10), sampling=greedy(4000, logprobs=20)))
                await until(lambda: "router disconnected" in caplog.messages)
            running.cancel()


async def test_health_follows_the_worker_and_services_are_listed(folder):
    async with (
        a_worker_process(folder, settings(speedup=1)) as worker,
        a_router_stream(worker.address) as stream,
        grpc.aio.insecure_channel(worker.control) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        async def status(service: str = "fleet.v1.Worker"):
            return (await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)).status

        assert await status() == await status("") == health_pb2.HealthCheckResponse.SERVING
        assert await status("liveness") == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await status("fleet.v1.Nothing")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        services = {one.name async for answer in listing for one in answer.list_services_response.service}
        assert {"fleet.v1.Worker", "grpc.health.v1.Health"} <= services

        await stream.say(an_attempt(fresh_prompt(10), 400))
        await stream.next(Step)
        worker.terminate()
        await stream.next(Draining)
        assert await status() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status("liveness") == health_pb2.HealthCheckResponse.SERVING, "a draining worker is healthy"


async def test_a_worker_is_ready_when_it_is_registered(folder):
    async with a_registry() as registry:
        await registry.close()
        async with (
            a_worker_process(folder, settings(registry=registry.address)) as worker,
            grpc.aio.insecure_channel(worker.control) as channel,
        ):
            states = health_pb2.HealthCheckResponse
            told = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert (await told.read()).status == states.NOT_SERVING
            await registry.open()
            assert (await told.read()).status == states.SERVING
            assert registry.server.members
            told.cancel()


async def test_sigterm_deregisters_finishes_requests_and_exits_0(folder):
    async with a_registry() as registry:
        told = settings(registry=registry.address, speedup=1)
        changes = registry.server.membership()
        async with a_worker_process(folder, told) as worker, a_router_stream(worker.address) as stream:
            joined = await next_change(changes)
            assert (joined.worker_id, joined.address) == ("w1", worker.address)
            running = an_attempt(fresh_prompt(10), 400)
            await stream.say(running)
            await stream.next(Step)

            worker.terminate()
            await stream.next(Draining)
            assert await next_change(changes) == MemberLeft(worker_id=WorkerId("w1"))
            _, refused = await stream.do(an_attempt(fresh_prompt(10)))
            assert refused.reason is Reason.DRAINING, "the worker still runs and is not registered"
            tokens, end = await stream.end_of(running.request_id)

            assert end.finish is Finish.LENGTH
            assert len(tokens) == 400
            assert await worker.ended() == 0


async def test_a_drain_by_rpc_answers_when_done_and_ends_the_process(folder):
    async with (
        a_registry() as registry,
        a_worker_process(folder, settings(speedup=1, registry=registry.address)) as worker,
        a_router_stream(worker.address) as stream,
        grpc.aio.insecure_channel(worker.control) as channel,
    ):
        changes = registry.server.membership()
        await next_change(changes)
        start = an_attempt(fresh_prompt(10), 3000)
        await stream.say(start)
        await stream.next(Step)

        answer = await pb_grpc.WorkerStub(channel).Drain(pb.DrainRequest(deadline_ms=100), timeout=60)

        assert answer.cancelled == 1
        _, end = await stream.end_of(start.request_id)
        assert end.reason is Reason.DRAINING
        assert await stream.ended() == "", "the streams are equal"
        assert await next_change(changes) == MemberLeft(worker_id=WorkerId("w1"))
        assert await worker.ended() == 0


async def test_a_frozen_worker_is_lost_to_its_router_and_found_again(folder):
    heard = EventInbox()
    impatient = RouterSettings(heartbeat_timeout_seconds=0.5, connect_timeout_seconds=0.5, max_reconnect_seconds=0.1)

    async def until(kind: type) -> None:
        while not isinstance(await heard.take(), kind):
            pass

    async with a_worker_process(folder, settings()) as worker, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(WorkerStreams(impatient, addresses=[worker.address]).run(heard))
        await until(WorkerJoined)
        worker.freeze()
        try:
            with at_most(20):
                await until(WorkerLeft)
        finally:
            worker.thaw()
        await until(WorkerJoined)
        running.cancel()


async def test_worker_with_a_hung_engine_takes_no_stream(folder):
    """Reject a router that dials again before the process has ended; it must not take the worker for a restarted one."""
    told = settings(watchdog=WatchdogSettings(floor_seconds=0.1, ceiling_seconds=0.2))
    fault = folder / "hang"
    simulated = msgspec.structs.replace(told.simulated, hang_file=str(fault))
    told = msgspec.structs.replace(told, simulated=simulated)
    async with open_engine(told) as engine:
        worker = WorkerServer(told, engine, SystemClock(), Incarnation("one"))
        async with serve_routers(worker, "127.0.0.1:0") as address, asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(ended_by(worker))
            async with a_router_stream(address) as stream:
                await stream.say(an_attempt(fresh_prompt(10), 3000))
                await stream.next(Step)
                fault.touch()
                assert await stream.ended() == "its engine hangs"
            assert isinstance(await serving, EngineHung)

            async with a_router_stream(address) as again:
                assert await again.ended() == router_streams.HUNG

            assert again.heard == []


async def ended_by(worker: WorkerServer) -> EngineDied | None:
    try:
        await worker.run()
    except EngineDied as died:
        return died
    return None


async def test_a_killed_worker_comes_back_as_another_incarnation(folder):
    async with a_registry() as registry:
        changes = registry.server.membership()
        told = settings(registry=registry.address)
        async with a_worker_process(folder, told) as worker, a_router_stream(worker.address) as stream:
            first = await next_change(changes)
            await stream.say(an_attempt(fresh_prompt(10), 3000))
            await stream.next(Step)
            worker.kill()
            with pytest.raises(StreamEnded):
                await stream.end_of("never")
            assert await worker.ended() == -9
            registry.server.hear(MemberUnreachable(worker_id=WorkerId("w1"), incarnation=first.incarnation))

            await worker.start()

            assert await next_change(changes) == MemberLeft(worker_id=WorkerId("w1"))
            second = await next_change(changes)
            assert isinstance(second, MemberJoined)
            assert second.incarnation != first.incarnation
            async with a_router_stream(worker.address) as again:
                assert (await again.next(WorkerDescription)).incarnation == second.incarnation
                assert (await again.do(an_attempt(fresh_prompt(10), 3)))[1].finish is Finish.LENGTH


async def test_serving_continues_without_the_registry(folder):
    async with a_registry(lease_ms=3000) as registry:
        changes = registry.server.membership()
        told = settings(registry=registry.address)
        async with a_worker_process(folder, told) as worker, a_router_stream(worker.address) as stream:
            await next_change(changes)
            await registry.close()
            assert isinstance(await next_change(changes), MemberLeft), "its lease ends"
            _, end = await stream.do(an_attempt(fresh_prompt(10), 3))
            assert end.finish is Finish.LENGTH

            await registry.open()

            assert isinstance(await next_change(changes), MemberJoined)


async def test_older_process_of_the_same_name_learns_it():
    async with a_registry() as registry, GrpcRegistryClient(registry.address) as client:
        older, newer = Incarnation("older"), Incarnation("newer")
        assert await client.register(WorkerId("w"), older, "127.0.0.1:1") == 30 * SECOND
        with pytest.raises(NameHeld, match=r"held by the process at 127\.0\.0\.1:1, whose lease ends in 30\.0 s"):
            await client.register(WorkerId("w"), newer, "127.0.0.1:2")
        registry.server.hear(MemberUnreachable(worker_id=WorkerId("w"), incarnation=older))
        await client.register(WorkerId("w"), newer, "127.0.0.1:2")

        with pytest.raises(WorkerSuperseded, match="an id of its own"):
            await client.register(WorkerId("w"), older, "127.0.0.1:1")
        with pytest.raises(RegistryUnreachable, match="address: is empty"):
            await client.register(WorkerId("w"), newer, "")
        await client.deregister(WorkerId("w"), older)
        assert registry.server.members[WorkerId("w")].incarnation == newer
        await client.deregister(WorkerId("w"), newer)
        assert not registry.server.members


async def test_name_of_several_routers_means_all_of_them():
    addresses: list[str] = []

    async def look_up(host: str, port: int) -> list[str]:
        if not addresses:
            raise OSError("no answer")
        return addresses

    worker, one = WorkerId("w"), Incarnation("one")
    async with (
        a_registry() as first,
        a_registry() as second,
        GrpcRegistries("routers:50052", look_up=look_up) as client,
    ):

        def members() -> list[bool]:
            return [bool(each.server.members) for each in (first, second)]

        with pytest.raises(RegistryUnreachable, match="routers:50052: no answer"):
            await client.register(worker, one, "127.0.0.1:1")
        addresses[:] = [first.address]
        assert await client.register(worker, one, "127.0.0.1:1") == 30 * SECOND
        assert members() == [True, False]
        addresses.append(second.address)  # another router has started
        await client.register(worker, one, "127.0.0.1:1")
        assert members() == [True, True]

        await first.close()
        addresses.clear()
        await client.register(worker, one, "127.0.0.1:1")  # the other process takes the name, under its former address
        await client.deregister(worker, one)
        assert members()[1] is False
        await second.close()
        with pytest.raises(RegistryUnreachable, match="UNAVAILABLE"):
            await client.register(worker, one, "127.0.0.1:1")


@pytest.mark.parametrize("method", ["Register", "Deregister"])
async def test_registry_rejects_garbage_without_logging(method, caplog):
    async with a_registry() as registry, grpc.aio.insecure_channel(registry.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/fleet.v1.Registry/{method}")(b"\xff\xff\xff\xff", timeout=60)

        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caplog.records == []


async def test_garbage_is_rejected_at_the_worker_control_port(folder):
    async with (
        a_worker_process(folder, settings()) as worker,
        grpc.aio.insecure_channel(worker.control) as channel,
    ):
        for method in ("Describe", "Drain"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/fleet.v1.Worker/{method}")(b"\xff\xff\xff\xff", timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_slow_membership_observer_gets_the_final_state():
    async with a_registry() as registry, GrpcRegistryClient(registry.address) as client:
        changes = registry.server.membership()
        await client.register(WorkerId("a"), Incarnation("1"), "x:1")
        assert await next_change(changes) == MemberJoined(
            worker_id=WorkerId("a"), incarnation=Incarnation("1"), address="x:1"
        )
        for number in range(2, 50):
            registry.server.hear(MemberUnreachable(worker_id=WorkerId("a"), incarnation=Incarnation(str(number - 1))))
            await client.register(WorkerId("a"), Incarnation(str(number)), "x:1")

        assert await next_change(changes) == MemberLeft(worker_id=WorkerId("a"))
        assert (await next_change(changes)).incarnation == "49"
        await client.register(WorkerId("b"), Incarnation("1"), "x:2")
        assert (await next_change(changes)).worker_id == "b", "nothing else changed before"


async def test_address_in_use_is_rejected_in_one_line(folder):
    async with a_worker_process(folder, settings()) as worker:
        with pytest.raises(AssertionError, match="ended before it was ready"):
            async with a_worker_process(folder, settings("w2", listen=worker.address)):
                pass
