"""Benchmark of Fleet's gRPC frontend: CPU time of the router per token, with 64 streams over one channel.

There is no compared system, because the other routers have no gRPC frontend. The workers are real processes with the simulated
engine, and share their cores with the client. Both need much more CPU time than the mock workers and the client of the HTTP scenarios.
So they limit the rate of requests, and only the CPU time says something about the router.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import uvloop
from msgspec import Struct

from fleet.client.requests import build_message
from fleet.net.grpc.options import CHANNEL_OPTIONS
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import environment
from loadtests.router.figures import BenchmarkRow, MeasuredRound, missing, row
from loadtests.router.systems.processes import Cores, cpu_seconds, resident_bytes, running_on, started
from loadtests.router.systems.targets import BenchmarkSetting, RouterTarget

NAME = "grpc-stream"
METHOD = "/fleet.v1.Inference/Generate"
STREAMS = 64
TOKENS = 256
QUICK_TOKENS = 32
PROMPT_TOKENS = 128
START_SECONDS = 90.0
ROUND_SECONDS = 120.0

TOPOLOGY = """
[cluster]
engine = "simulated"

[router]
heartbeat_timeout_seconds = 30.0  # the cores are busy

[[pools]]
role = "both"
replicas = 2
max_running = 64

[pools.simulated]
eos_probability = 0.0
latency = { prefill_base_ms = 1.0, prefill_ms_per_token = 0.0, step_base_ms = 5.0, step_ms_per_sequence = 0.0 }
"""


class StreamWindow(Struct, frozen=True, kw_only=True):
    seconds: float
    router_cpu_seconds: float
    client_cpu_seconds: float
    ttft_seconds: float


def contest(
    contestants: Sequence[RouterTarget], rounds: int, setting: BenchmarkSetting, seed: int, *, short: bool
) -> list[BenchmarkRow]:
    """Return a row for Fleet if it is among the targets, otherwise an empty list."""
    tokens = QUICK_TOKENS if short else TOKENS
    return [_row(each, rounds, setting, seed, tokens) for each in contestants if each.name == "fleet"]


def _row(target: RouterTarget, rounds: int, setting: BenchmarkSetting, seed: int, tokens: int) -> BenchmarkRow:
    chance = random.Random(seed)
    figures = []
    try:
        with running_on(setting.cores.others), cluster(setting.folder, setting.cores) as (address, router):
            for number in range(rounds + 1):
                prompts = [[chance.randrange(64, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]
                window = uvloop.run(_round(address, prompts, tokens, router))
                print(f"{NAME}: round {number} of {rounds}", file=sys.stderr)
                if number:
                    figures.append(_figures(window, tokens, router))
    except SystemUnavailable as reason:
        return missing(NAME, target.name, str(reason), target.version)
    return row(NAME, target.name, figures, None, target.version)


@contextmanager
def cluster(folder: Path, cores: Cores, topology: str = TOPOLOGY) -> Iterator[tuple[str, int]]:
    """Run `fleet up` with the router on its own core; yield its gRPC address and the router's process id.

    Raises:
        SystemUnavailable: The cluster ended or was not ready in time; the message contains the last lines of its log.
    """
    file, ready = folder / "topology.toml", folder / "ready.json"
    file.write_text(topology)
    command = [sys.executable, "-m", "fleet.cli.main", "up", "--config", str(file)]
    command += ["--http-port", "0", "--grpc-port", "0", "--ready-file", str(ready), "--log-dir", str(folder)]
    with started("fleet-up", command, folder, cores.others, environment()) as running:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if not running.alive or time.monotonic() > deadline:
                raise SystemUnavailable(f"fleet up was not ready within {START_SECONDS:.0f} s: {running.last_words()}")
            time.sleep(0.1)
        known = json.loads(ready.read_text())
        router = psutil.Process(known["pids"]["router"])
        for thread in router.threads():
            os.sched_setaffinity(thread.id, cores.router)
        yield known["grpc"], router.pid


async def _round(address: str, prompts: Sequence[Sequence[int]], tokens: int, router: int) -> StreamWindow:
    """Send all prompts at once and count the messages without parsing them."""
    latencies: list[float] = []
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        async with asyncio.timeout(START_SECONDS):
            await channel.channel_ready()

        async def stream(message: bytes) -> None:
            sent = time.perf_counter()
            begun = False
            async for _ in generate(message):
                if not begun:
                    begun = True
                    latencies.append(time.perf_counter() - sent)

        messages = [
            build_message(prompt, {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}).SerializeToString()
            for prompt in prompts
        ]
        cpu, own, began = cpu_seconds(router), time.process_time(), time.perf_counter()
        try:
            async with asyncio.timeout(ROUND_SECONDS), asyncio.TaskGroup() as tasks:
                for message in messages:
                    tasks.create_task(stream(message))
        except* (grpc.aio.AioRpcError, TimeoutError) as failures:
            raise SystemUnavailable(f"a stream failed: {failures.exceptions[0]!r}") from failures
        return StreamWindow(
            seconds=time.perf_counter() - began,
            router_cpu_seconds=cpu_seconds(router) - cpu,
            client_cpu_seconds=time.process_time() - own,
            ttft_seconds=statistics.median(latencies),
        )


def _figures(window: StreamWindow, tokens: int, router: int) -> MeasuredRound:
    return MeasuredRound(
        requests=STREAMS,
        failures=0,
        tokens=STREAMS * tokens,
        seconds=window.seconds,
        router_cpu_seconds=window.router_cpu_seconds,
        client_cpu_seconds=window.client_cpu_seconds,
        worker_cpu_seconds=None,
        ttft_seconds=window.ttft_seconds,
        resident_bytes=resident_bytes(router),
    )
