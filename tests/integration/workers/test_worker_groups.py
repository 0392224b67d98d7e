"""Tests of the processes of one engine over several nodes: their rendezvous and their end."""

import asyncio
import errno
import json
import signal
import socket
import ssl
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import Finish
from fleet.core.system_clock import SystemClock
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsTls
from tests.support.builders import token_bytes
from tests.support.certificates import Authority
from tests.support.servers.processes import a_free_port
from tests.support.waiting import turns, until_answered
from tests.support.workers.engine_driver import an_attempt
from tests.support.workers.worker_processes import WorkerProcess, a_router_stream
from workers.connections import ranks as worker_groups
from workers.connections.ranks import joined_group, leading_group
from workers.ports import EngineDied
from workers.settings import GroupSettings, SimulatedSettings, WorkerSettings

pytestmark = pytest.mark.integration

SECONDS = 30
PROMPT = token_bytes(range(5, 105))


@pytest.fixture
def group():
    def of_rank(rank=0, **fields):
        told = {"nodes": 2, "rank": rank, "leader": f"127.0.0.1:{port}", "join_timeout_ms": 20_000, "silence_ms": 1000}
        return GroupSettings(**told | fields)

    port = a_free_port()
    return of_rank


@asynccontextmanager
async def a_leader(group, **fields):
    """Start a listening leader; yield a future of the group's end, which is set after the group has formed."""
    ready = asyncio.get_running_loop().create_future()

    async def lead():
        async with leading_group(group(0, **fields), "same", SystemClock()) as lead:
            ready.set_result(lead)
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(lead())
        await turns()  # it listens at once
        async with asyncio.timeout(SECONDS):
            yield ready
        running.cancel()


async def a_raw_connection(group, words):
    """Open a connection to the leader and send this."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(group().leader.rpartition(":")[2]))
    writer.write(words)
    return reader, writer


def end_reason(group):
    """Return the only reason for which a group ended."""
    found = group.subgroup(EngineDied)
    while isinstance(found, BaseExceptionGroup):
        (found,) = found.exceptions
    return str(found)


async def follow(group, **fields):
    async with joined_group(group(1, **fields), "same", SystemClock()):
        await asyncio.Event().wait()


async def test_all_ranks_learn_the_rendezvous_the_start_and_the_end(group):
    async with (
        a_leader(group, engine_ports=(6001, 6002)) as ready,
        joined_group(group(1), "same", SystemClock()) as follow,
    ):
        lead = await ready
        assert lead.group.engine_ports == follow.group.engine_ports == (6001, 6002)
        assert follow.group.leader == lead.group.leader
        told = asyncio.Event()
        follow.when_serving(told.set)
        assert not follow.serving
        lead.serving()
        await told.wait()
        assert not follow.over.is_set()
        lead.end()
        await follow.over.wait()


async def test_ports_of_the_engine_are_reserved_until_it_serves(group):
    def bind(port, *, again):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
            other.bind(("127.0.0.1", port))

    async with a_leader(group) as ready, joined_group(group(1), "same", SystemClock()) as follow:
        lead = await ready
        assert follow.group.engine_ports == lead.group.engine_ports
        for port in lead.group.engine_ports:
            with pytest.raises(OSError, match="in use"):
                bind(port, again=False)
            bind(port, again=True)  # as the sockets of engines do
        lead.serving()
        for port in lead.group.engine_ports:
            bind(port, again=False)


async def test_leader_starts_when_its_own_ranks_are_present(group):
    async with a_leader(group) as ready:
        reader, writer = await a_raw_connection(group, b'{"type":"join","rank":1,"nodes":2,"alike":"other"}\n')
        assert "other settings than its leader" in await rejection_reason(reader)
        writer.close()
        assert not ready.done()
        async with joined_group(group(1), "same", SystemClock()):
            await ready
            reader, writer = await a_raw_connection(group, b'{"type":"join","rank":1,"nodes":2,"alike":"same"}\n')
            assert "the group has formed" in await rejection_reason(reader)
            writer.close()


async def rejection_reason(reader):
    """Return the leader's reason for a rejection."""
    while "why" not in (said := json.loads(await reader.readline())):
        pass
    return said["why"]


async def test_rank_of_another_group_does_not_retry(group):
    async with a_leader(group):
        with pytest.raises(ConfigurationRefused, match=r"^group: rank 1 has other settings than its leader"):
            async with joined_group(group(1), "other", SystemClock()):
                pass


async def test_late_group_names_its_missing_ranks(group):
    with pytest.raises(BaseExceptionGroup) as ended:
        async with a_leader(group, join_timeout_ms=200) as ready:
            await ready
    assert end_reason(ended.value) == "of its group of 2 nodes, rank 1 did not come within 0.2 s"

    with pytest.raises(EngineDied, match=r"^its group did not form within 0.3 s: .*Connect"):
        await follow(group, join_timeout_ms=300)


@pytest.mark.parametrize(
    "words",
    [
        b"\n",
        b'{"type":"begin"}\n',
        b"x" * 9000,
        b'{"type":"alive"}\n',
        b'{"type":"join","rank":1,"nodes":2,"alike":"\xff"}\n',
        b'{"type":"join","more":' + b"[" * 4000 + b"\n",
    ],
    ids=range(6),
)
async def test_rank_with_another_protocol_is_rejected_harmlessly(group, words):
    async with a_leader(group) as ready:
        reader, writer = await a_raw_connection(group, words)
        with suppress(ConnectionError):
            assert b'"begin"' not in await reader.read()
        writer.close()
        assert not ready.done()
        async with joined_group(group(1), "same", SystemClock()):
            await ready


async def test_silent_connections_lock_no_rank_out(group, monkeypatch):
    monkeypatch.setattr(worker_groups, "MAX_SILENT_CONNECTIONS", 2)
    async with a_leader(group, silence_ms=60_000) as ready, AsyncExitStack() as held:
        silent = [await a_raw_connection(group, b"") for _ in range(3)]
        for _, writer in silent:
            held.callback(writer.close)
        async with asyncio.timeout(60), joined_group(group(1), "same", SystemClock()):
            await ready
            assert await silent[0][0].read() == b"", "the longest silent connection is cut"


async def test_leader_without_descriptors_accepts_a_little_later(group, monkeypatch):
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [errno.EMFILE, errno.ENFILE]

    async def without_files(listening):
        if failures:
            raise OSError(failures.pop(), "injected")
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", without_files)
    monkeypatch.setattr(worker_groups, "MOST_PAUSE_SECONDS", 0.01)
    async with a_leader(group) as ready, joined_group(group(1), "same", SystemClock()):
        await ready
    assert not failures


async def test_silent_leader_is_given_up(group):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(EngineDied, match=r"the leader has said nothing for 0.2 s"):
            await follow(group, leader=f"127.0.0.1:{port}", silence_ms=200, join_timeout_ms=3000)


async def test_silent_rank_ends_the_leader(group):
    with pytest.raises(BaseExceptionGroup) as ended:  # noqa: PT012 - it ends while a rank is connected
        async with a_leader(group, silence_ms=300):
            reader, writer = await a_raw_connection(group, b'{"type":"join","rank":1,"nodes":2,"alike":"same"}\n')
            with closing(writer):
                await reader.read()  # without an answer
    assert end_reason(ended.value) == "rank 1 of its group has said nothing for 0.3 s"


@pytest.fixture
async def started(group, tmp_path):
    async with AsyncExitStack() as held:

        async def start(rank, **fields):
            settings = WorkerSettings(
                worker_id=f"rank-{rank}",
                engine="simulated",
                model="tiny",
                control_listen="127.0.0.1:0",
                control_credentials=Credentials(insecure=True),
                heartbeat_ms=100,
                group=group(rank, silence_ms=10_000),  # a busy machine silences processes for seconds
                simulated=SimulatedSettings(speedup=20),
                **fields,
            )
            worker = WorkerProcess(tmp_path, settings, log=tmp_path / f"rank-{rank}.log")
            await worker.spawn()
            held.push_async_callback(worker.close)
            return worker

        yield start


async def serves(address):
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        return answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_ranks_become_ready_and_drain_with_the_first(started):
    leader, rank = await started(0), await started(1)
    for each in (leader, rank):
        await each.ready()
        assert await serves(each.control)
    assert list(rank.endpoints) == ["grpc"], "the address takes no requests"

    async with a_router_stream(leader.address) as stream:
        asked = an_attempt(PROMPT, 200)
        await stream.say(asked)
        await stream.until(lambda message: stream.tokens_of(asked.request_id) or None)

        rank.terminate()

        tokens, end = await stream.end_of(asked.request_id)
        assert (len(tokens), end.finish) == (200, Finish.LENGTH)

    assert [await leader.ended(), await rank.ended()] == [0, 0]


async def test_each_rank_answers_at_its_port_for_metrics(started, tmp_path):
    authority = Authority(tmp_path, "authority")
    tls = MetricsTls(**authority.issue("pods"))
    ranks = [await started(rank, metrics_listen="127.0.0.1:0", metrics_tls=tls) for rank in (0, 1)]
    trusted = ssl.create_default_context(cafile=authority.file)
    pages = []
    for each in ranks:
        await each.ready()
        async with httpx.AsyncClient(verify=trusted, timeout=60) as client:
            answer = await client.get(f"https://{each.endpoints['metrics']}/metrics")
        assert answer.status_code == 200
        pages.append(answer.text)
    assert all("fleet_tls_certificate_end_timestamp_seconds{" in page for page in pages)
    assert ["fleet_worker_phase" in page for page in pages] == [True, False]


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_stopped_while_the_group_forms_ends_at_once(started, rank):
    alone = await started(rank)
    await until_answered(lambda: listens_to_signals(alone), SECONDS)

    alone.terminate()

    assert await alone.ended() == 0


async def listens_to_signals(process):
    status = await asyncio.to_thread(Path(f"/proc/{process.process.pid}/status").read_text)
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize(
    ("victim", "number", "said"),
    [
        (1, signal.SIGKILL, "EngineDied: rank 1 of its group has ended"),
        (1, signal.SIGSTOP, "EngineDied: rank 1 of its group has said nothing for 10 s"),
        (0, signal.SIGKILL, "EngineDied: the leader of its group has ended"),
    ],
)
async def test_lost_rank_ends_the_others(started, victim, number, said):
    processes = [await started(0), await started(1)]
    for each in processes:
        await each.ready()

    processes[victim].process.send_signal(number)

    assert await processes[1 - victim].ended() == 1
    assert said in processes[1 - victim].log.read_text()
