"""Tests of handoffs between two real vLLM workers of which one is killed: seven points for each side of a direct handoff.

No point depends on time. The router of this process sends the attempts, so it can kill a worker before an attempt leaves.
Where the engine has to stand still at a point, its scheduler is stopped (SIGSTOP) first.
"""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from fleet.backends.workers.streams import Hear, WorkerStreams
from fleet.core.ids import WorkerId
from fleet.core.requests import Finish, Sampling, Source
from fleet.core.roles import KvPath, Phase, Placement
from fleet.core.system_clock import SystemClock
from fleet.core.work import Start
from fleet.local.tiny_model import build_tiny_model
from fleet.router.machine import RouterMachine
from fleet.router.messages import Complete, LoadReported, WorkerDraining, WorkerEvent, WorkerStepped
from fleet.router.server import RouterServer
from fleet.router.settings.router import RouterSettings
from tests.support.builders import an_arrival
from tests.support.fleet_processes import alive, command_of
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import until
from tests.support.workers import worker_processes
from tests.support.workers.engine_driver import fresh_prompt
from tests.support.workers.vllm_engines import START_SECONDS, vllm_worker
from tests.support.workers.worker_cluster import sources
from tests.support.workers.worker_processes import WorkerProcess
from workers.engines.vllm.launch import NIXL_LEASE_SECONDS, direct_available

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.long,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
    pytest.mark.skipif(direct_available() is not None, reason=direct_available() or ""),
]

BLOCK_TOKENS, BLOCK_BYTES = 32, 128 << 10
CACHE_BLOCKS = 130  # 128 for the longest request of 4,096 tokens, one of vLLM, and one more
PROMPT_TOKENS, ANSWER = 3000, 200
PROBE_TOKENS = 4000  # 126 blocks with its answer: it runs only while no handoff holds any block
ANSWER_SECONDS = 3 * NIXL_LEASE_SECONDS  # a probe waits for a lease; NIXL stalls for seconds on busy cores
LENDER, BORROWER = WorkerId("lender"), WorkerId("borrower")


class Victim(WorkerProcess):
    """A worker process with the processes of its engine."""

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def core(self) -> psutil.Process:
        """Return the process with vLLM's scheduler, its model and its KV cache."""
        (core,) = [each for each in self.family() if "EngineCore" in "".join(command_of(each)[:1])]
        return core

    def kill_all(self) -> None:
        """Kill worker and engine together, as the end of a host does."""
        family = self.family()
        for process in family:
            process.send_signal(signal.SIGKILL)
        psutil.wait_procs(family[1:], timeout=30)
        assert alive(process.pid for process in family) == []

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.kill_all()  # a stopped engine does not notice the end of its worker
        await super().close()


class TappedStreams(WorkerStreams):
    """The router's streams to its workers. A test acts before an attempt is sent, and before an event is handled."""

    before_start: Callable[[WorkerId, Start], None] | None = None
    before_event: Callable[[WorkerEvent], None] | None = None

    def start(self, worker_id: WorkerId, start: Start) -> None:
        if self.before_start is not None:
            self.before_start(worker_id, start)
        super().start(worker_id, start)

    async def run(self, hear: Hear) -> None:
        def tap(event: WorkerEvent) -> None:
            if self.before_event is not None:
                self.before_event(event)
            hear(event)

        await super().run(tap)


class HandoffPair:
    """A router with two vLLM workers, either of which can prefill and decode. `LENDER` gets the prompts."""

    def __init__(self, lender: Victim, borrower: Victim, tasks: asyncio.TaskGroup) -> None:
        self.lender, self.borrower = lender, borrower
        settings = RouterSettings(max_reconnect_seconds=0.2, max_queue_seconds=ANSWER_SECONDS)
        self.streams = TappedStreams(settings, addresses=[lender.address, borrower.address])
        self.machine = RouterMachine(settings, random.Random(0))
        self.server = RouterServer(self.machine, self.streams, SystemClock())
        self.tasks = tasks
        self._requests = 0

    async def ask(self, prompt: bytes, max_tokens: int = ANSWER, **fields) -> tuple[list[int], Complete]:
        self._requests += 1
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        arrived = an_arrival(request_id=f"r{self._requests}", tokens=prompt, sampling=sampling, **fields)
        tokens: list[int] = []
        async with asyncio.timeout(ANSWER_SECONDS), self.server.submit(arrived) as events:
            async for event in events:
                if isinstance(event, Complete):
                    return tokens, event
                tokens.extend(event.token_ids)
        raise AssertionError("no end")

    async def hand_over(self, prompt: bytes) -> tuple[list[int], Complete]:
        """Prefill on the lender and decode on the borrower."""
        return await self.ask(prompt, placement=Placement.DISAGGREGATED, kv_path=KvPath.DIRECT, pin=BORROWER)

    async def alone(self, prompt: bytes, worker: WorkerId, max_tokens: int = ANSWER) -> list[int]:
        """Return the answer of one undisturbed worker. The salt keeps its blocks apart from those of the handoff."""
        tokens, complete = await self.ask(
            prompt, max_tokens, placement=Placement.AGGREGATED, pin=worker, salt=b"s" * 32
        )
        assert complete.finish is Finish.LENGTH
        return tokens

    async def holds_nothing(self, worker: WorkerId) -> None:
        """Wait until a prompt that needs all blocks of the worker's cache has run there."""
        assert len(await self.alone(fresh_prompt(PROBE_TOKENS), worker, 2)) == 2

    async def joined(self) -> None:
        await until(lambda: sum(len(pool.workers) for pool in self.server.status().pools) == 2)

    def idle(self) -> bool:
        """Return whether no request runs or is booked anywhere."""
        return all(
            worker.running == worker.waiting == worker.kv_blocks_used == worker.booked_requests == 0
            for pool in self.server.status().pools
            for worker in pool.workers
        )


class Strike:
    """One kill of one side. Points call it when they are reached."""

    def __init__(self, pair: HandoffPair, victim: Victim) -> None:
        self.pair, self.victim = pair, victim
        self.done = False
        self._stopped: list[psutil.Process] = []

    def stop_engine(self, worker: Victim) -> None:
        """Stop an engine until the kill."""
        core = worker.core()
        core.send_signal(signal.SIGSTOP)
        self._stopped.append(core)

    def __call__(self) -> None:
        if self.done:
            return
        self.done = True
        self.pair.streams.before_start = self.pair.streams.before_event = None
        self.victim.kill_all()
        for core in self._stopped:
            if alive([core.pid]):
                core.send_signal(signal.SIGCONT)


Point = Callable[[HandoffPair, Strike], None]
"""Function that arranges for the strike to happen at one point of the next handoff."""


def before_offer(pair: HandoffPair, strike: Strike) -> None:
    def stop_lender(_: WorkerId, start: Start) -> None:
        if start.phase is Phase.PREFILL:
            strike.stop_engine(pair.lender)

    def strike_when_it_has_the_prompt(event: WorkerEvent) -> None:
        if isinstance(event, LoadReported) and event.worker_id == LENDER and event.load.running:
            strike()

    pair.streams.before_start, pair.streams.before_event = stop_lender, strike_when_it_has_the_prompt


def offered(pair: HandoffPair, strike: Strike) -> None:
    def strike_before_decode(_: WorkerId, start: Start) -> None:
        if start.phase is Phase.DECODE:
            strike()

    pair.streams.before_start = strike_before_decode


def connecting(pair: HandoffPair, strike: Strike) -> None:
    """Stop the lender, so that the borrower, which has not met it before, waits for the answer to its handshake."""
    at_decode_with_stopped_lender(pair, strike, lambda start: is_connected(pair, remote_port(start)))


def pulling(pair: HandoffPair, strike: Strike) -> None:
    """Stop the lender, so that the borrower, which has met it before, waits for the blocks that it reads."""
    at_decode_with_stopped_lender(pair, strike, lambda _: has_unread_bytes(pair))


def at_decode_with_stopped_lender(pair: HandoffPair, strike: Strike, reached: Callable[[Start], bool]) -> None:
    async def strike_when_reached(start: Start) -> None:
        await until(lambda: reached(start))
        strike()

    def stop_lender(_: WorkerId, start: Start) -> None:
        if start.phase is Phase.DECODE:
            strike.stop_engine(pair.lender)
            pair.tasks.create_task(strike_when_reached(start))

    pair.streams.before_start = stop_lender


def remote_port(start: Start) -> int:
    """Return the port at which the lender of a handoff answers handshakes."""
    assert start.handoff is not None
    port: int = json.loads(start.handoff.params)["remote_port"]
    return port


def is_connected(pair: HandoffPair, port: int) -> bool:
    connections = pair.borrower.core().net_connections("tcp")
    return any(each.raddr and each.raddr.port == port for each in connections)


def has_unread_bytes(pair: HandoffPair) -> bool:
    """Return whether the lender's engine has not read what the borrower's engine has sent to it."""
    from_borrower = {each.laddr.port for each in pair.borrower.core().net_connections("tcp") if each.raddr}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues, *_ = line.split()
        unread = int(queues.partition(":")[2], 16)
        ends = [int(end.partition(":")[2], 16) in from_borrower for end in (local, remote)]
        if unread and ends == [False, True]:
            return True
    return False


def pulled(pair: HandoffPair, strike: Strike) -> None:
    """Strike when the borrower has used the blocks. The lender may or may not have heard yet that they are read."""
    pair.streams.before_event = at_first_token_of_borrower(strike)


def released(pair: HandoffPair, strike: Strike) -> None:
    async def strike_when_released() -> None:
        await pair.holds_nothing(LENDER)
        strike()

    def wait_for_release() -> None:
        pair.streams.before_event = None
        strike.stop_engine(pair.borrower)
        pair.tasks.create_task(strike_when_released())

    pair.streams.before_event = at_first_token_of_borrower(wait_for_release)


def draining(pair: HandoffPair, strike: Strike) -> None:
    def strike_while_it_drains(event: WorkerEvent) -> None:
        if isinstance(event, WorkerDraining):
            strike()

    def drain() -> None:
        pair.streams.before_event = strike_while_it_drains
        strike.stop_engine(strike.victim)
        strike.victim.terminate()

    pair.streams.before_event = at_first_token_of_borrower(drain)


def at_first_token_of_borrower(act: Callable[[], None]) -> Callable[[WorkerEvent], None]:
    def tap(event: WorkerEvent) -> None:
        if isinstance(event, WorkerStepped) and event.worker_id == BORROWER:
            act()

    return tap


POINTS: tuple[Point, ...] = (before_offer, offered, connecting, pulling, pulled, released, draining)
BLOCKS_ARRIVED = (pulled, released, draining)


@asynccontextmanager
async def a_pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HandoffPair]:
    monkeypatch.setattr(worker_processes, "SECONDS", START_SECONDS)
    async with AsyncExitStack() as held:
        folder = held.enter_context(a_short_folder())
        monkeypatch.setenv("TMPDIR", str(folder))
        model_dir = build_tiny_model(folder)
        workers = []
        for worker_id in (LENDER, BORROWER):
            settings = structs.replace(
                vllm_worker(model_dir, kv_paths=(KvPath.DIRECT,)),
                worker_id=worker_id,
                listen=f"unix:{folder}/{worker_id}.sock",
                load_interval_ms=20,
            )
            vllm = structs.replace(settings.vllm, kv_cache_gib=CACHE_BLOCKS * BLOCK_BYTES / (1 << 30))
            watchdog = structs.replace(settings.watchdog, floor_seconds=ANSWER_SECONDS)
            settings = structs.replace(settings, vllm=vllm, watchdog=watchdog)
            workers.append(Victim(folder, settings, folder / f"{worker_id}.log"))
            held.push_async_callback(workers[-1].close)
        await asyncio.gather(*(worker.start() for worker in workers))
        tasks = await held.enter_async_context(asyncio.TaskGroup())
        pair = HandoffPair(*workers, tasks)
        running = [
            tasks.create_task(pair.streams.run(pair.server.hear)),
            tasks.create_task(pair.server.run()),
        ]
        await pair.joined()
        yield pair
        for task in running:
            task.cancel()


@pytest.mark.parametrize("side", [LENDER, BORROWER])
async def test_killed_side_costs_no_token_and_holds_no_block(side, monkeypatch):
    async with a_pair(monkeypatch) as pair:
        victim, survivor = (pair.lender, BORROWER) if side == LENDER else (pair.borrower, LENDER)
        for point in POINTS:
            if point is pulling:
                await pair.hand_over(fresh_prompt(PROMPT_TOKENS))  # so that the read needs no handshake any more
            prompt = fresh_prompt(PROMPT_TOKENS)
            expected = await pair.alone(prompt, survivor)
            strike = Strike(pair, victim)
            point(pair, strike)

            tokens, complete = await pair.hand_over(prompt)

            assert strike.done, point.__name__
            assert tokens == expected, point.__name__
            assert complete.finish is Finish.LENGTH
            if side == LENDER:
                arrived = sources(complete, complete.kv[-1].phase).get(Source.DIRECT, (0, 0))[0]
                assert (arrived > 0) == (point in BLOCKS_ARRIVED), point.__name__
            await victim.ended()
            await asyncio.gather(pair.holds_nothing(survivor), victim.start())
            await pair.joined()
            await until(pair.idle)
            pair.machine.check()
        prompt = fresh_prompt(PROMPT_TOKENS)
        tokens, complete = await pair.hand_over(prompt)
        assert tokens == await pair.alone(prompt, survivor)
        assert sources(complete, Phase.DECODE)[Source.DIRECT][0] == -(-PROMPT_TOKENS // BLOCK_TOKENS)
