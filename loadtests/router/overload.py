"""Overload test: sends a router three times the requests that its two workers can serve, and measures answers in time and refusals.

    python -m loadtests.router.overload [--seconds 600] [--factor 3] [--goal-seconds 2] [--seed N] [--json FILE]

Rules:

1. A router and two workers with the simulated engine are real processes (`fleet up`). `max_queue_seconds` is the goal for first tokens. Each
   request has a new prompt, and is sent over HTTP with `stream` at a random instant (Poisson arrivals), whether or not earlier requests
   have been answered.
2. Goodput is the number of answers a second that ended well and whose first token came within the goal. Its peak is the highest goodput
at the rates of `SHARES`, each of which lasts for `STEP_SECONDS`.
3. The capacity is the number of answers a second that `CLOSED_CLIENTS` clients get. Each of these clients sends its next request as
   soon as its answer has ended.
4. A refusal is HTTP 429 or 503. Its time counts from sending the request until its status has arrived, so it includes delays of a busy
   client.
5. The router's memory is sampled during the overload; `loadtests.router.soak.trend` says whether it grows. The router knows each block of
   the KV store, so its memory grows until the store is full. The store is so small that this happens before the overload.

The exit status is 0 if the goodput is at least `LEAST_SHARE` of its peak, 99 % of the refusals came within `REFUSAL_SECONDS` and all of
them with a `retry-after`, memory did not grow, and no request failed in another way.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import environment
from loadtests.router.soak import trend
from loadtests.router.systems.processes import started

TOPOLOGY = """
[cluster]
engine = "simulated"

[router]
max_queue_seconds = {goal}

[store]
capacity_mib = 16

[[pools]]
role = "both"
replicas = 2
max_running = 8

[pools.simulated]
eos_probability = 0.0
latency = {{ prefill_base_ms = 1.0, prefill_ms_per_token = 0.02, step_base_ms = 50.0, step_ms_per_sequence = 0.0 }}
"""
START_SECONDS = 90.0
PROMPT_TOKENS, ANSWER_TOKENS = 256, 32
CLOSED_CLIENTS = 24
STEP_SECONDS = 30.0
SHARES = (0.6, 0.8, 0.9, 1.0, 1.2)
"""Rates at which the peak of the goodput is looked for, as shares of the capacity."""

LEAST_SHARE = 0.9
REFUSAL_SECONDS = 0.05
REFUSED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
ANSWER_SECONDS = 60.0
SAMPLES = 120
LAST_EVENT = b"data: [DONE]"
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass
class LoadedStep:
    """Results of the requests that were sent at one rate."""

    rate: float  # requests per second; 0: closed clients, which have no fixed rate
    seconds: float = 0.0
    sent: int = 0
    in_time: int = 0
    late: int = 0
    refusal_seconds: list[float] = field(default_factory=list)
    without_hint: int = 0  # number of refusals without the header `retry-after`
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        return self.in_time / self.seconds

    def refusal_ms(self, share: float) -> float | None:
        """Return this quantile of the times of refusals; None if nothing was refused."""
        ordered = sorted(self.refusal_seconds)
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None

    def summary(self) -> dict[str, Any]:
        return {
            "rate": round(self.rate, 1),
            "sent": self.sent,
            "goodput": round(self.goodput, 2),
            "late": self.late,
            "refused": len(self.refusal_seconds),
            "refusal_ms_p50": self.refusal_ms(0.5),
            "refusal_ms_p99": self.refusal_ms(0.99),
            "refusal_ms_max": self.refusal_ms(1.0),
            "refused_without_hint": self.without_hint,
            "failed": dict(self.failed),
        }


class AnswerConnection:
    """One keep-alive connection, which sends one request at a time and notes the instant of its first token."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer

    @classmethod
    async def opened(cls, host: str, port: int) -> "AnswerConnection":
        return cls(*await asyncio.open_connection(host, port))

    async def ask(self, request: bytes, step: LoadedStep, goal_seconds: float) -> bool:
        """Send a request, read its whole answer, and note the result. Return False if the connection was closed before any answer.

        Raises:
            OSError: The connection broke in the middle of the answer.
            EOFError: The connection ended in the middle of the answer.
        """
        began = time.perf_counter()
        self._writer.write(request)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except ConnectionResetError:
            return False
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return False
        status = int(head.split(b" ", 2)[1])
        if (length := CONTENT_LENGTH.search(head)) is not None:
            head_seconds = time.perf_counter() - began
            body = await self._reader.readexactly(int(length[1]))
            if status in REFUSED:
                step.refusal_seconds.append(head_seconds)
                step.without_hint += b"\r\nretry-after:" not in head.lower()
            else:
                step.failed[f"HTTP {status}: {body[:80]!r}"] += 1
            return True
        first, last = 0.0, b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            chunk = await self._reader.readexactly(size + 2)
            first = first or time.perf_counter() - began
            last = chunk.strip()
        await self._reader.readexactly(2)
        if status != HTTPStatus.OK or not last.endswith(LAST_EVENT):
            step.failed[f"HTTP {status}, ended with {last[-80:]!r}"] += 1
        elif first <= goal_seconds:
            step.in_time += 1
        else:
            step.late += 1
        return True

    def close(self) -> None:
        self._writer.close()


class OverloadClient:
    """Sends requests to one router, and counts how they end."""

    def __init__(self, url: str, goal_seconds: float, chance: random.Random):
        where = urlsplit(url)
        assert where.hostname is not None
        assert where.port is not None
        self._host, self._port = where.hostname, where.port
        self._goal = goal_seconds
        self._chance = chance
        self._idle: list[AnswerConnection] = []

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def capacity(self) -> float:
        """Return the capacity in answers a second (rule 3)."""
        step, until = LoadedStep(rate=0.0), time.perf_counter() + STEP_SECONDS

        async def client() -> None:
            while time.perf_counter() < until:
                await self.ask(step)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLOSED_CLIENTS):
                tasks.create_task(client())
        return (step.in_time + step.late) / STEP_SECONDS

    async def send_at(self, rate: float, seconds: float) -> LoadedStep:
        """Send requests at a rate for some seconds, wait for all answers, and return their counts."""
        step, began = LoadedStep(rate=rate, seconds=seconds), time.perf_counter()
        due = began
        async with asyncio.TaskGroup() as tasks:
            while (due := due + self._chance.expovariate(rate)) < began + seconds:
                await asyncio.sleep(due - time.perf_counter())
                tasks.create_task(self.ask(step))
        return step

    async def ask(self, step: LoadedStep) -> None:
        """Send one request over an idle or a new connection, and note the result.

        A router closes connections that have been idle for long. If it does so while the request is on its way, the request is sent again.
        """
        step.sent += 1
        connection, request = None, self._request()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while self._idle:
                    connection = self._idle.pop()
                    if await connection.ask(request, step, self._goal):
                        self._idle.append(connection)
                        return
                    connection.close()
                connection = await AnswerConnection.opened(self._host, self._port)
                if not await connection.ask(request, step, self._goal):
                    raise EOFError
        except (OSError, EOFError, TimeoutError) as error:
            step.failed[type(error).__name__] += 1
            if connection is not None:
                connection.close()
        else:
            self._idle.append(connection)

    def _request(self) -> bytes:
        prompt = [self._chance.randrange(64, 4000) for _ in range(PROMPT_TOKENS)]
        fields = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body


@asynccontextmanager
async def sampled_memory(router: psutil.Process, seconds: float) -> AsyncIterator[list[trend.TrendSample]]:
    """Sample the router's memory as long as the context is open."""
    began = time.monotonic()
    samples = [trend.sample(router, 0.0)]

    async def take() -> None:
        while True:
            await asyncio.sleep(max(seconds / SAMPLES, 1.0))
            samples.append(trend.sample(router, time.monotonic() - began))

    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(take())
        yield samples
        taking.cancel()


def missed_goals(peak: float, overload: LoadedStep, memory: Sequence[trend.TrendSample]) -> list[str]:
    """Return a text for each goal in the module's docstring that the overload has missed."""
    missed = []
    if overload.goodput < LEAST_SHARE * peak:
        missed.append(f"goodput is below {LEAST_SHARE:.0%} of its peak")
    if not overload.refusal_seconds:
        missed.append("nothing was refused, so there was no overload")
    if (slow := overload.refusal_ms(0.99)) is not None and slow > 1000 * REFUSAL_SECONDS:
        missed.append(f"more than 1 % of the refusals took over {1000 * REFUSAL_SECONDS:.0f} ms")
    if overload.without_hint:
        missed.append("refusals had no retry-after")
    if overload.failed:
        missed.append("requests failed")
    if growth := trend.grows(memory, trend.slope_mb_per_hour(memory)):
        missed.append(growth)
    return missed


async def measure(http: str, router: psutil.Process, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all steps, and which of the goals were missed."""
    client = OverloadClient(http, arguments.goal_seconds, random.Random(arguments.seed))
    try:
        capacity = await client.capacity()
        note(f"capacity: {capacity:.1f} answers a second")
        steps = []
        for share in SHARES:
            steps.append(await client.send_at(share * capacity, STEP_SECONDS))
            note(json.dumps(steps[-1].summary()))
        async with sampled_memory(router, arguments.seconds) as samples:
            overload = await client.send_at(arguments.factor * capacity, arguments.seconds)
        note(json.dumps(overload.summary()))
    finally:
        client.close()
    peak = max(each.goodput for each in steps)
    return {
        "capacity": round(capacity, 1),
        "goodput_peak": round(peak, 2),
        "goodput_share": round(overload.goodput / peak, 3),
        "overload": overload.summary(),
        "steps": [each.summary() for each in steps],
        "router_mb_first": samples[0].rss_bytes >> 20,
        "router_mb_median": round(statistics.median(each.rss_bytes for each in samples)) >> 20,
        "router_mb_last": samples[-1].rss_bytes >> 20,
        "router_mb_per_hour": round(trend.slope_mb_per_hour(samples), 1),
        "missed": missed_goals(peak, overload, samples),
    }


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of the overload")
    parser.add_argument("--factor", type=float, default=3, help="rate of the overload, in capacities")
    parser.add_argument("--goal-seconds", type=float, default=2, help="for the first token")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-overload-") as name:
        folder = Path(name)
        topology, ready = folder / "topology.toml", folder / "ready.json"
        topology.write_text(TOPOLOGY.format(goal=arguments.goal_seconds))
        command = [sys.executable, "-m", "fleet.cli.main", "up", "--config", str(topology)]
        command += ["--http-port", "0", "--grpc-port", "0", "--ready-file", str(ready), "--log-dir", str(folder)]
        with started("fleet-up", command, folder, frozenset(os.sched_getaffinity(0)), environment()) as running:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if not running.alive or time.monotonic() > deadline:
                    raise SystemUnavailable(f"fleet up was not ready in time: {running.last_words()}")
                time.sleep(0.1)
            known = json.loads(ready.read_text())
            found = uvloop.run(measure(known["http"], psutil.Process(known["pids"]["router"]), arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
