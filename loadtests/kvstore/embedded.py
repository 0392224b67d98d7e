"""Benchmark of the embedded store: how much the store node delays its host's event loop, and how much a busy host delays the node.

The host is the process that the node runs in; in production it is a worker.

python -m loadtests.kvstore.embedded [--rounds 5] [--seconds 3] [--json FILE]

The host's event loop does what a worker's does: it wakes every millisecond, and every tenth time it computes for 3 ms without yielding,
like the bookkeeping of a step. A client in another process looks up, reads and writes blocks as fast as it can. The node runs in its
own process, in a thread of the host, or on the host's event loop. The figures in ms are the delay of the host's wake-ups, without
the time of its own computing, and the duration of look-ups. They are medians of interleaved rounds.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from kvstore.client.store_client import StoreClient
from kvstore.service.embedded import open_embedded
from kvstore.service.server import open_node
from kvstore.service.settings import StoreSettings
from kvstore.system_clock import MonotonicClock
from loadtests.kvstore.benchmarks.memory import chains, content, named
from loadtests.kvstore.nodes import ROOT, StoreNode, environment, short_folder

PLACES = ("process", "thread", "loop")
BLOCK_BYTES = 128 << 10
# Numbers of blocks: the blocks of a prompt of 3,000 tokens are looked up, and a few new blocks are written.
LOOKED_UP, WRITTEN = 94, 8
CAPACITY_BYTES = 64 << 20
TICK_SECONDS, BUSY_SECONDS, BUSY_EVERY = 0.001, 0.003, 10
PROCESS_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("host", "client"), help=argparse.SUPPRESS)
    parser.add_argument("--place", choices=PLACES, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role == "host":
        uvloop.run(_host(options.place, msgspec.json.decode(options.settings, type=StoreSettings), options.seconds))
    elif options.role == "client":
        _client(msgspec.json.decode(options.settings, type=StoreSettings), options.seconds)
    else:
        _compare(options)


def _compare(options: argparse.Namespace) -> None:
    figures: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
    for _ in range(options.rounds):
        for place in PLACES:
            figures[place].append(_round(place, options.seconds))
    medians = {
        place: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        for place, rounds in figures.items()
    }
    names = list(medians["process"])
    print("  ".join(["node in  ", *(f"{name:>16}" for name in names)]))
    for place in PLACES:
        print("  ".join([f"{place:9}", *(f"{medians[place][name]:16.3f}" for name in names)]))
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "rounds": figures}, indent=2))


def _round(place: str, seconds: float) -> dict[str, float]:
    with short_folder() as folder:
        node = StoreNode(folder, capacity_bytes=CAPACITY_BYTES)
        if place == "process":
            node.start()
        host = _start("host", place, node.settings, seconds)
        client = _start("client", place, node.settings, seconds)
        for each in (host, client):
            each.stdin.write("go\n")
            each.stdin.flush()
        found: dict[str, float] = json.loads(client.communicate(timeout=PROCESS_SECONDS)[0])
        # The host runs the node until its standard input ends, which `communicate` causes. So the client is read first.
        found |= json.loads(host.communicate(timeout=PROCESS_SECONDS)[0])
        node.stop()
        return found


def _start(role: str, place: str, settings: dict[str, Any], seconds: float) -> Any:
    """Start a process and wait until it is ready."""
    command = [sys.executable, "-m", "loadtests.kvstore.embedded", "--role", role, "--place", place]
    command += ["--settings", json.dumps(settings), "--seconds", str(seconds)]
    started: Any = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout.readline() == "ready\n", f"the {role} did not start"
    return started


# The host


@asynccontextmanager
async def _node(place: str, settings: StoreSettings) -> AsyncIterator[None]:
    if place == "thread":
        async with open_embedded(settings, MonotonicClock(), new_loop=uvloop.new_event_loop):
            yield
    elif place == "loop":
        async with open_node(settings, MonotonicClock()):
            yield
    else:
        yield


async def _host(place: str, settings: StoreSettings, seconds: float) -> None:
    late: list[float] = []
    async with _node(place, settings):
        await asyncio.to_thread(_wait_for_start)
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            await asyncio.sleep(TICK_SECONDS)
            late.append(time.perf_counter() - began - TICK_SECONDS)
            if len(late) % BUSY_EVERY == 0:
                until = time.perf_counter() + BUSY_SECONDS
                while time.perf_counter() < until:
                    pass
        await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(spread("late", late)))


# The client


def _client(settings: StoreSettings, seconds: float) -> None:
    made, blocks = chains(LOOKED_UP), content(BLOCK_BYTES, LOOKED_UP)
    took: list[float] = []
    with StoreClient.connect(settings.listen[0], named(BLOCK_BYTES), timeout_seconds=30) as client:
        chain = next(made)
        client.write(chain, list(blocks))
        into = list(np.empty((LOOKED_UP, BLOCK_BYTES), np.uint8))
        _wait_for_start()
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends:
            match = client.match(chain, lease_seconds=10)
            took.append(time.perf_counter() - began)
            client.read(match, range(len(match)), into)
            client.release(match.lease_id)
            client.write([*chain, *next(made)[:WRITTEN]], [*blocks, *blocks[:WRITTEN]])
    print(json.dumps(spread("look-up", took) | {"look-ups/s": len(took) / seconds}))


def _wait_for_start() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles and the maximum in milliseconds. If there is a single value, the percentiles are this value."""
    cuts = statistics.quantiles(seconds if len(seconds) > 1 else (*seconds, *seconds), n=100)
    return {f"{name} p50": 1e3 * cuts[49], f"{name} p99": 1e3 * cuts[98], f"{name} max": 1e3 * max(seconds)}


if __name__ == "__main__":
    main()
