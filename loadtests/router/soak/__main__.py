"""Supervisor of the soak test: starts all processes, measures the capacity, and reports the findings.

The docstring of the package has the rules.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from fleet.client import AsyncClient
from fleet.config import default_cache_dir
from fleet.core.requests import TOKEN_BYTES
from fleet.frontend.text.codec import load_codec
from fleet.local.tiny_model import build_tiny_model
from fleet.router.settings.router import RouterSettings
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import StoreNode
from loadtests.router.soak import trend
from loadtests.router.soak.churn import BLOCK_TOKENS, MODEL, SIMULATED, ChurningWorkers
from loadtests.router.soak.clients import SoakClients, TextOf
from loadtests.router.soak.processes import SoakProcess
from loadtests.router.soak.requests import SoakRequest, soak_requests
from workers.engines.simulated.answer_oracle import AnswerOracle
from workers.engines.simulated.model import SimulatedModel

LOAD = 0.7
HARM_EVERY_SECONDS = 8.0
STORE_BYTES = 64 << 20
RAMP = (16, 32, 64)  # numbers of closed clients in the steps by which the capacity is measured
RAMP_SECONDS = 10.0  # maximum duration of a step
LEAST_RAMP_SECONDS = 2.5  # minimum duration of a step: twice the duration of an answer
RAMP_SHARE = 1 / 20  # duration of a step, as a share of the run
WARM_SHARE = 0.3  # share of a step, at its beginning, that is not measured
MOST_IN_FLIGHT = 2000
END_SECONDS = 240.0  # time limit for running requests to end
REST_SECONDS = 20.0  # time limit for the router to close the connections of clients that have left
SAMPLES = 900
LEAST_PAUSE_SECONDS = 0.5  # minimum seconds between two samples
SHOWN = 20  # maximum number of broken promises that are shown

log = logging.getLogger("soak")


@dataclass
class SoakFindings:
    """Measurements of the router in one run, and complaints about it."""

    capacity_rps: float = 0.0
    load: float = 0.0
    files_before: int = 0
    files_after: int = 0
    tasks_before: int = 0
    tasks_after: int = 0
    samples: list[trend.TrendSample] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Soak:
    """Runs the soak test once: starts the processes, sends the requests, and collects the findings."""

    def __init__(self, folder: Path, seconds: float, load: float, harm_every: float, seed: int):
        self.findings = SoakFindings()
        self._seconds = seconds
        self._load = load
        self._harm_every = harm_every
        self._chance = random.Random(seed)
        self._folder = folder
        oracle = AnswerOracle(
            SimulatedModel(
                seed=SIMULATED.seed,
                vocab_size=SIMULATED.vocab_size,
                eos_token_ids=SIMULATED.eos_token_ids,
                eos_probability=SIMULATED.eos_probability,
                block_bytes=BLOCK_TOKENS * SIMULATED.bytes_per_token,
            ),
            BLOCK_TOKENS,
        )
        self._requests_to_send = soak_requests(random.Random(self._chance.getrandbits(32)), oracle)
        self._node = StoreNode(folder, capacity_bytes=STORE_BYTES)
        self._http = ""
        self.clients: SoakClients
        self.crowd: ChurningWorkers

    async def run(self) -> None:
        """Run the test until all processes have ended.

        Raises:
            SystemUnavailable: A process did not start.
        """
        model_dir = build_tiny_model(default_cache_dir(), tokenizer_only=True)
        self._node.start()
        async with AsyncExitStack() as stack:
            stack.callback(self._node.stop)
            settings = RouterSettings(
                http_listen="127.0.0.1:0",
                grpc_listen="127.0.0.1:0",
                models={MODEL: str(model_dir)},
                store=self._node.address,
            )
            router = SoakProcess("router", "router", self._folder, settings)
            stack.push_async_callback(_ended, router)
            endpoints = await router.start()
            self._http = endpoints["http"]
            self.crowd = ChurningWorkers(
                self._folder, endpoints["control"], self._node.address, random.Random(self._chance.getrandbits(32))
            )
            stack.push_async_callback(self.crowd.abandon)
            await self.crowd.gather()
            self.clients = SoakClients(endpoints["http"], endpoints["grpc"], MODEL, _text_of(model_dir))
            stack.push_async_callback(self.clients.close)
            await self._soak(router, endpoints["grpc"])
            await self.crowd.end()
            self.findings.complaints += self.crowd.complaints
            self.findings.complaints += [
                f"in the log of {name}: {text}" for name, text in (("the router", router.log()),) if "Traceback" in text
            ]

    async def _soak(self, router: SoakProcess, grpc: str) -> None:
        """Send the requests to a running router, and check it (rules 3 to 5 of the package)."""
        findings = self.findings
        async with AsyncClient(grpc) as operator:
            await self._until_served(operator)
            process = psutil.Process(router.pid)
            findings.files_before, findings.tasks_before = process.num_fds(), await self._tasks()
            findings.capacity_rps = await self._capacity()
            log.info("capacity: %.1f requests a second", findings.capacity_rps)
            began = time.monotonic()
            until = began + self._seconds

            def time_left() -> float:
                return until - time.monotonic()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sample(process, began, until))
                tasks.create_task(self.crowd.harm(self._harm_every, time_left))
                arrived = await self._arrivals(until)
            findings.load = arrived / self._seconds / findings.capacity_rps
            findings.complaints += self.crowd.unexpected_deaths()
            await self.clients.close()
            findings.complaints += await self._left_behind(operator)
        await self._come_to_rest(process)

    async def _until_served(self, operator: AsyncClient) -> None:
        async with asyncio.timeout(END_SECONDS):
            while True:
                if sum(len(pool.workers) for pool in (await operator.status()).pools) == len(self.crowd):
                    return
                await asyncio.sleep(0.1)

    async def _capacity(self) -> float:
        """Return the capacity: the requests per second of the best step of `RAMP`."""
        seconds = min(RAMP_SECONDS, max(LEAST_RAMP_SECONDS, self._seconds * RAMP_SHARE))
        tally, best = self.clients.tally, 0.0
        for clients in RAMP:
            until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as tasks:
                for _ in range(clients):
                    tasks.create_task(self._again_and_again(until))
                await asyncio.sleep(seconds * WARM_SHARE)
                tokens, ended, began = tally.tokens, tally.completed, time.monotonic()
                await asyncio.sleep(max(0.0, until - began))
                rate = (tally.tokens - tokens, tally.completed - ended)
                log.info("%d clients: %d requests, %d tokens", clients, rate[1], rate[0])
                best = max(best, rate[1] / (time.monotonic() - began))
        if best == 0:
            raise SystemUnavailable("nothing was answered before the soak began")
        return best

    async def _again_and_again(self, until: float) -> None:
        while time.monotonic() < until:
            await self.clients.ask(next(self._requests_to_send))

    async def _arrivals(self, until: float) -> int:
        """Send requests at random times until the instant `until`, wait for all answers, and return the number of requests.

        If `MOST_IN_FLIGHT` requests are not answered, send no more, and note a complaint.
        """
        rate = self._load * self.findings.capacity_rps
        under_way: set[asyncio.Task[None]] = set()
        arrived = 0
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while due < until:
                request: SoakRequest = next(self._requests_to_send)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                due += self._chance.expovariate(rate)
                if len(under_way) >= MOST_IN_FLIGHT:
                    self.findings.complaints.append(f"{MOST_IN_FLIGHT} requests are under way: nothing moves any more")
                    break
                task = tasks.create_task(self.clients.ask(request))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
                arrived += 1
        return arrived

    async def _sample(self, process: psutil.Process, began: float, until: float) -> None:
        pause = max(LEAST_PAUSE_SECONDS, self._seconds / SAMPLES)
        for number in itertools.count():
            now = time.monotonic()
            if now >= until:
                return
            self.findings.samples.append(trend.sample(process, now - began))
            if number % 60 == 0:
                self._tell(now - began)
            await asyncio.sleep(pause)

    def _tell(self, seconds: float) -> None:
        tally, last = self.clients.tally, self.findings.samples[-1]
        log.info(
            "%4.0f s: %d requests, %d lost, %d repeated, %d broken, %s, %.0f MB, %d files",
            seconds, tally.requests, tally.lost, tally.repeated, len(tally.broken), dict(tally.errors),
            last.rss_bytes / trend.MEBIBYTE, last.files,
        )  # fmt: skip

    async def _left_behind(self, operator: AsyncClient) -> list[str]:
        """Wait until the router has no request and no reservation left, and return an empty list; after `END_SECONDS`, what is left."""
        deadline = time.monotonic() + END_SECONDS
        while True:
            status = await operator.status()
            left = [f"{status.router.active} requests are active"] if status.router.active else []
            left += [
                f"{worker.worker_id}: {worker.booked_requests} booked, {worker.running} running"
                for pool in status.pools
                for worker in pool.workers
                if worker.booked_requests or worker.running
            ]
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.1)

    async def _come_to_rest(self, process: psutil.Process) -> None:
        """Wait until the router has as few open files and tasks as before its first client; otherwise note what is left."""
        findings = self.findings
        deadline = time.monotonic() + REST_SECONDS
        while True:
            findings.files_after, findings.tasks_after = process.num_fds(), await self._tasks()
            more_files = findings.files_after - findings.files_before
            more_tasks = findings.tasks_after - findings.tasks_before
            if (more_files <= 0 and more_tasks <= 0) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        if more_files > trend.MORE_FILES:
            findings.complaints.append(f"the router has {more_files} open files more than before")
        if more_tasks > trend.MORE_TASKS:
            findings.complaints.append(f"the router has {more_tasks} tasks more than before")

    async def _tasks(self) -> int:
        """Return the number of tasks in the router's event loop, from its metrics."""
        text = await asyncio.to_thread(_get, self._http, "/metrics")
        for line in text.splitlines():
            if line.startswith("fleet_tasks "):
                return int(float(line.split()[1]))
        raise SystemUnavailable(f"the router's metrics have no fleet_tasks: {text[:200]}")

    def result(self) -> dict[str, Any]:
        """Return the findings as `--json` prints them."""
        findings, tally, crowd = self.findings, self.clients.tally, self.crowd
        slope = trend.slope_mb_per_hour(findings.samples)
        if complaint := trend.grows(findings.samples, slope):
            findings.complaints.append(complaint)
        first_tokens = sorted(tally.first_token_seconds)
        return {
            "seconds": self._seconds,
            "requests": tally.requests,
            "completed": tally.completed,
            "tokens": tally.tokens,
            "lost": tally.lost,
            "repeated": tally.repeated,
            "errors": dict(tally.errors),
            "left": tally.left,
            "broken": len(tally.broken) + len(findings.complaints),
            "joins": crowd.joins,
            "leaves": crowd.leaves,
            "deaths": crowd.deaths,
            "hangs": crowd.hangs,
            "capacity_rps": round(findings.capacity_rps, 2),
            "load": round(findings.load, 3),
            "ttft_seconds_p50": round(first_tokens[len(first_tokens) // 2], 4),
            "ttft_seconds_p99": round(first_tokens[len(first_tokens) * 99 // 100], 4),
            "rss_mb_start": round(findings.samples[0].rss_bytes / trend.MEBIBYTE, 1),
            "rss_mb_end": round(findings.samples[-1].rss_bytes / trend.MEBIBYTE, 1),
            "rss_slope_mb_per_hour": round(slope, 2),
            "fds_start": findings.files_before,
            "fds_end": findings.files_after,
            "tasks_start": findings.tasks_before,
            "tasks_end": findings.tasks_after,
            "threads_most": max(each.threads for each in findings.samples),
        }


def _get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _text_of(model_dir: Path) -> TextOf:
    codec = load_codec(model_dir)

    def text_of(prompt: Sequence[int], tokens: Sequence[int]) -> str:
        decoder = codec.decoder(b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in prompt))
        return "".join(map(decoder.add, tokens)) + decoder.flush()

    return text_of


async def _ended(router: SoakProcess) -> None:
    router.ask_to_end()
    if await router.ended(END_SECONDS) is None:
        router.kill()


def _complaints(soak: Soak) -> Iterator[str]:
    yield from soak.clients.tally.broken
    yield from soak.findings.complaints


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="at the load; start, ramp and end come on top")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--seed", type=int, help="of a run to repeat; a random one by default")
    parser.add_argument("--load", type=float, default=LOAD, metavar="SHARE", help="of the capacity")
    parser.add_argument(
        "--harm-every", type=float, default=HARM_EVERY_SECONDS, metavar="SECONDS", help="on average, and what it takes"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where settings and logs stay; a short path")
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as name:
        folder = Path(name) if arguments.keep is None else arguments.keep.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder, arguments.seconds, arguments.load, arguments.harm_every, seed)
        uvloop.run(soak.run())
    result = soak.result() | {"seed": seed}
    complaints = list(_complaints(soak))
    for each in complaints[:SHOWN]:
        print(f"broken: {each}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(result))
    else:
        print(", ".join(f"{value} {key.replace('_', ' ')}" for key, value in result.items()))
    return 1 if complaints or soak.clients.tally.lost or soak.clients.tally.repeated else 0


if __name__ == "__main__":
    sys.exit(main())
