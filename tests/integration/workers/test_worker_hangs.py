"""Tests of workers whose engine hangs or only looks hung: own processes with the simulated engine, whose fault is a file."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fleet.cli.console.exits import HUNG
from fleet.client import Client
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import Finish
from fleet.core.work import Step, WorkerDescription
from fleet.hardware.latency.linear import EngineLatency
from kvstore.security.credentials import Credentials
from tests.support.fleet_processes import fleet_up
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import eventually, pace, pace_thread, stays
from tests.support.workers.engine_driver import an_attempt, fresh_prompt, greedy
from tests.support.workers.worker_processes import WorkerProcess, a_router_stream, a_worker_process
from workers.settings import SimulatedSettings, WorkerSettings
from workers.watchdog import WatchdogSettings

pytestmark = pytest.mark.integration

STATES = health_pb2.HealthCheckResponse
LONG = 100_000  # tokens


@pytest.fixture
def folder():
    with a_short_folder() as folder:
        yield folder


def settings(folder: Path, *, watchdog: WatchdogSettings, **simulated) -> WorkerSettings:
    return WorkerSettings(
        worker_id=WorkerId("w1"),
        engine="simulated",
        control_listen="127.0.0.1:0",
        control_credentials=Credentials(insecure=True),
        model=ModelName("tiny"),
        load_interval_ms=20,
        heartbeat_ms=100,
        max_model_len=131_072,
        watchdog=watchdog,
        simulated=SimulatedSettings(hang_file=str(folder / "hang"), **simulated),
    )


def watched(channel: grpc.aio.Channel, service: str):
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service), timeout=60)


def hang(folder: Path) -> None:
    (folder / "hang").touch()


IMPATIENT = WatchdogSettings(floor_seconds=0.5, ceiling_seconds=2.0)


async def test_a_hung_worker_leaves_service_and_ends_by_itself(folder):
    log = folder / "log"
    worker = WorkerProcess(folder, settings(folder, watchdog=IMPATIENT), log)
    try:
        await worker.start()
        async with a_router_stream(worker.address) as stream, grpc.aio.insecure_channel(worker.control) as channel:
            ready, live = watched(channel, ""), watched(channel, "liveness")
            while (await ready.read()).status != STATES.SERVING:
                pass
            assert (await live.read()).status == STATES.SERVING
            await stream.say(an_attempt(fresh_prompt(10), 5000))
            await stream.next(Step)

            hang(folder)

            assert await stream.ended() == "its engine hangs"
            assert (await ready.read()).status == STATES.NOT_SERVING
            assert await worker.ended() == HUNG
            with suppress(grpc.aio.AioRpcError):
                assert await live.read() is grpc.aio.EOF, "the worker was killed before it ended itself"
    finally:
        await worker.close()
    assert (
        log.read_text()
        .splitlines()[-1]
        .startswith("fleet: EngineHung: simulated 1: it holds work and made no step for")
    )


async def test_a_watchdog_that_is_off_ends_no_worker(folder):
    told = settings(folder, watchdog=msgspec.structs.replace(IMPATIENT, enabled=False))
    async with a_worker_process(folder, told) as worker, a_router_stream(worker.address) as stream:
        start = an_attempt(fresh_prompt(10), 200)
        await stream.say(start)
        await stream.next(Step)
        hang(folder)
        assert worker.process is not None
        await stays(
            lambda: worker.process.returncode is None,
            2 * IMPATIENT.ceiling_seconds,
            "the engine hangs for two ceilings",
        )

        (folder / "hang").unlink()

        _, end = await stream.end_of(start.request_id)
        assert end.finish is Finish.LENGTH


async def test_a_prompt_of_100_000_tokens_is_no_hang(folder):
    """Prefill for several ceilings without a token, with a step every 0.1 s."""
    latency = EngineLatency(prefill_ms_per_token=0.05)
    told = settings(folder, watchdog=WatchdogSettings(floor_seconds=0.5, ceiling_seconds=1.0), latency=latency)
    async with a_worker_process(folder, told) as worker, a_router_stream(worker.address) as stream:
        await stream.next(WorkerDescription)  # a worker takes long messages only after it has answered the router
        began = time.monotonic()

        tokens, end = await stream.do(an_attempt(fresh_prompt(LONG), 3))

        assert time.monotonic() - began > 4 * told.watchdog.ceiling_seconds
        assert (len(tokens), end.finish) == (3, Finish.LENGTH)


async def test_a_worker_that_was_stopped_and_goes_on_is_no_hang(folder):
    """Use steps so long that the watchdog looks at the engine before the next one ends."""
    told = settings(folder, watchdog=IMPATIENT, latency=EngineLatency(step_base_ms=200))
    async with a_worker_process(folder, told) as worker, a_router_stream(worker.address) as stream:
        start = an_attempt(fresh_prompt(10), 10)
        await stream.say(start)
        for _ in range(3):
            await stream.next(Step)
        await pace(0.1, "to the middle of a step that the watchdog has seen")

        worker.freeze()
        await pace(2 * IMPATIENT.ceiling_seconds, "the worker is stopped for two ceilings")
        worker.thaw()

        _, end = await stream.end_of(start.request_id)
        assert end.finish is Finish.LENGTH


async def test_engine_held_by_a_debugger_is_no_hang(folder):
    async with (
        a_worker_process(folder, settings(folder, watchdog=IMPATIENT)) as worker,
        a_router_stream(worker.address) as stream,
    ):
        await stream.say(an_attempt(fresh_prompt(10), 5000))
        await stream.next(Step)
        assert worker.process is not None
        with a_tracer(worker.process.pid):
            hang(folder)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2 * IMPATIENT.ceiling_seconds):
                    await stream.ended()

        assert await stream.ended() == "its engine hangs"
        assert await worker.ended() == HUNG, "the debugger has left it"


async def test_a_core_shared_with_four_busy_loops_is_no_hang(folder):
    """Give the worker so small a share of the core that it often does not run for longer than the watchdog's patience."""
    core = {min(os.sched_getaffinity(0))}
    told = settings(folder, watchdog=WatchdogSettings(floor_seconds=0.05, ceiling_seconds=0.05))
    async with a_worker_process(folder, told) as worker, a_router_stream(worker.address) as stream:
        assert worker.process is not None
        os.sched_setaffinity(worker.process.pid, core)
        os.setpriority(os.PRIO_PROCESS, worker.process.pid, 10)
        with busy_loops(4, core):
            tokens, end = await stream.do(an_attempt(fresh_prompt(300), sampling=greedy(100)))

        assert (len(tokens), end.finish) == (100, Finish.LENGTH)


async def test_an_idle_worker_is_no_hang(folder):
    told = settings(folder, watchdog=WatchdogSettings(floor_seconds=0.1, ceiling_seconds=0.1))
    hang(folder)
    async with a_worker_process(folder, told) as worker:
        assert worker.process is not None
        await stays(lambda: worker.process.returncode is None, 1, "ten ceilings pass")


PROMPTS = [list(range(100 + each, 180 + each)) for each in range(4)]
ASK = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True, "timeout_seconds": 120.0}
TOPOLOGY = """
cluster.kv_paths = []
router.heartbeat_timeout_seconds = 1.5

[[pools]]
role = "both"
simulated.hang_file = "{folder}/hang"
simulated.latency.step_base_ms = {step_ms}
watchdog.floor_seconds = 1.0
watchdog.step_factor = 2.0

[[pools]]
role = "both"
simulated.latency.step_base_ms = {step_ms}
watchdog.floor_seconds = 1.0
watchdog.step_factor = 2.0
"""


@contextmanager
def a_cluster(folder: Path, step_ms: int = 5):
    topology = folder / "fleet.toml"
    topology.write_text(TOPOLOGY.format(folder=folder, step_ms=step_ms))
    with fleet_up(folder, "--config", str(topology)) as up, Client(up.grpc) as client:
        yield up, client


def serving(client: Client) -> set[str]:
    workers = [worker for pool in client.status().pools for worker in pool.workers]
    return {worker.worker_id for worker in workers if worker.state == "serving"}


def workers_of(result) -> list[str]:
    return [phase.worker_id for phase in result.kv]


class Streams:
    """One stream per prompt, whose first tokens have arrived."""

    def __init__(self, client: Client, prompts: list[list[int]] = PROMPTS, **more: object) -> None:
        self._streams = [client.generate(prompt, **ASK | more) for prompt in prompts]
        self._tokens = [list(next(stream).token_ids) for stream in self._streams]

    def finish(self) -> list[tuple[int, ...]]:
        """Read all streams to their ends and return their tokens."""
        for stream, tokens in zip(self._streams, self._tokens, strict=True):
            tokens.extend(token for delta in stream for token in delta.token_ids)
        return [tuple(tokens) for tokens in self._tokens]


def answers_of_both_workers(client: Client) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and their answers; each worker has computed some of them, and so is chosen for them again."""
    prompts, answers, used = [], [], set()
    while len(prompts) < len(PROMPTS) or len(used) < 2:
        prompts.append([1000 + 100 * len(prompts) + token for token in range(80)])
        answer = client.complete(prompts[-1], **ASK)
        answers.append(answer.token_ids)
        used.update(workers_of(answer))
        assert len(prompts) < 20, "every prompt went to one worker"
    return prompts, answers


def test_streams_of_a_hung_worker_continue_exactly_elsewhere(folder):
    with a_cluster(folder) as (up, client):
        prompts, expected = answers_of_both_workers(client)
        streams = Streams(client, prompts)

        hang(folder)

        eventually(lambda: serving(client) == {"both.2-0"})
        for number in range(8):
            late = client.complete([number + 5, *PROMPTS[0]], **ASK | {"max_tokens": 2})
            assert workers_of(late) == ["both.2-0"]
        assert streams.finish() == [tuple(tokens) for tokens in expected]
        (folder / "hang").unlink()
        eventually(lambda: serving(client) == {"both.1-0", "both.2-0"})
        assert up.pid_of("both.1-0") != up.endpoints["pids"]["both.1-0"]
        assert up.pid_of("both.2-0") == up.endpoints["pids"]["both.2-0"]
        assert f"both.1-0 ended with status {HUNG}" in (folder / "up.log").read_text()


LOADING_SECONDS = 5
LOADING_TOPOLOGY = """
cluster.kv_paths = []
supervision.stopped_seconds = 1.0
supervision.worker_silence_seconds = 1.0

[[pools]]
role = "both"
replicas = 2
simulated.start_ms = {start_ms}
watchdog.floor_seconds = 0.1
watchdog.ceiling_seconds = 1.0
"""


def test_restarted_worker_may_load_longer_than_all_limits(folder):
    """Load the engine of a worker anew while the supervisor, the router and its watchdog could each take it for hung."""
    topology = folder / "fleet.toml"
    topology.write_text(LOADING_TOPOLOGY.format(start_ms=1000 * LOADING_SECONDS))
    with fleet_up(folder, "--config", str(topology)) as up, Client(up.grpc) as client:
        os.kill(up.pid_of("both-0"), signal.SIGKILL)
        eventually(lambda: serving(client) == {"both-1"})
        eventually(lambda: up.pid_of("both-0") != 0)
        loading, began = up.pid_of("both-0"), time.monotonic()

        eventually(lambda: serving(client) == {"both-0", "both-1"})

        assert time.monotonic() - began > LOADING_SECONDS - 1, "it loads for several limits"
        assert up.pid_of("both-0") == loading
        assert up.pid_of("both-1") == up.endpoints["pids"]["both-1"]
        assert "is killed" not in (folder / "up.log").read_text()
        client.complete(PROMPTS[0], **ASK)


def test_suspended_cluster_loses_nothing(folder):
    """Use steps so long that the watchdogs look at the engines before the next step ends."""
    few = {"max_tokens": 6}
    with a_cluster(folder, step_ms=500) as (up, client):
        expected = Streams(client, **few).finish()
        streams = Streams(client, **few)
        everybody = [up.process.pid, *up.pids()]
        pace_thread(0.2, "to the middle of a step that the watchdogs have seen")

        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        pace_thread(2.5, "longer than any timeout between its processes, and shorter than the client's")
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)

        assert streams.finish() == expected
        assert serving(client) == {"both.1-0", "both.2-0"}
        assert {name: up.pid_of(name) for name in ("both.1-0", "both.2-0")}.items() <= up.endpoints["pids"].items()


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
PTRACE_SEIZE = 0x4206
failed = libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, None) and ctypes.get_errno()
print(failed, flush=True)
sys.stdin.read()
"""


@contextmanager
def a_tracer(pid: int):
    """Attach a debugger to a process and let it run on."""
    tracer = subprocess.Popen([sys.executable, "-c", TRACER, str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert tracer.stdout is not None
        if failed := int(tracer.stdout.readline()):
            pytest.skip(f"processes of this machine cannot be traced: {os.strerror(failed)}")
        yield
    finally:
        tracer.communicate(timeout=60)


@contextmanager
def busy_loops(number: int, cores: set[int]):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        for loop in loops:
            os.sched_setaffinity(loop.pid, cores)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait(60)
