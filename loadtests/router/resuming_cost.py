"""Cost of resumable streams, which continue after the loss of a router: CPU time of the router per request, and TTFT.

    python -m loadtests.router.resuming_cost [--rounds N] [--requests N] [--tokens N] [--prompts N] [--seed N] [--json FILE]
        [--most-cpu-percent P] [--most-ttft-percent P] [--before DIR]

Three routers serve the same two workers (the simulated engine, twice as fast as by default). One router has no peer, and is measured
with ordinary streams. The other two are peers; one of them is measured, with ordinary streams and with resumable ones. Each round
measures these variants in another order. Clients of gRPC keep the tokens of resumable streams themselves. Clients of server-sent events
keep only an event id, so the workers keep the tokens of these streams.

The CPU times of the measured router and of its peer are reported separately. They are measured with `STREAMS` requests at a time. The
time to the first token is measured with one request at a time, whose prompt has `LONG_PROMPT_TOKENS` tokens that no cache holds. Ratios
compare figures of the same round. Rounds are short and many, because a virtual machine changes its speed within seconds. With
`--before`, a fourth router and two more workers run the code of another checkout of Fleet, whose native modules must be built. All
ratios then compare with the ordinary streams of the fourth router: they contain all changes between the two checkouts, not only what
resuming costs. With `--most-cpu-percent` or `--most-ttft-percent` the command fails if the median of a ratio exceeds 1 by more than
this percentage.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import msgspec
import uvloop
from msgspec import Struct, structs

from fleet.client.requests import Options, build_message
from fleet.local.tiny_model import build_tiny_model
from fleet.net.grpc.options import CHANNEL_OPTIONS
from loadtests import host
from loadtests.environments import SystemUnavailable
from loadtests.kvstore.nodes import ROOT, environment, free_port
from loadtests.router.grpc_stream import METHOD
from loadtests.router.systems.processes import (
    Cores,
    ProcessTree,
    cores_of_this_process,
    running_on,
    started,
    wait_until_it_answers,
)

STREAMS = 32
PROMPT_TOKENS = 128
LONG_PROMPT_TOKENS = 2048
WORKERS = 2
SPEEDUP = 2.0  # factor of the speed of the simulated engines, so that a round is short
START_SECONDS = 90.0
BETWEEN_SECONDS = 0.05
MODEL = "tiny"
LAST_EVENT = b"data: [DONE]\n\n"

Stream = Callable[[Sequence[int], int], Awaitable[float]]
"""Function that sends a prompt, reads an answer with the given number of tokens, and returns the seconds to the first token."""


class Variant(Struct, frozen=True, kw_only=True):
    """One measured case: the protocol, whether streams are resumable, and whether the router has a peer."""

    protocol: str
    has_peer: bool = False
    resumable: bool = False
    before: bool = False
    """True if the router and its workers run the code of the other checkout."""

    @property
    def name(self) -> str:
        return (
            self.protocol
            + ", resumable" * self.resumable
            + ", with a peer" * self.has_peer
            + ", the other checkout" * self.before
        )


VARIANTS = [
    Variant(protocol=protocol, has_peer=has_peer, resumable=resumable)
    for protocol in ("gRPC", "SSE")
    for resumable in (False, True)
    for has_peer in (False, True)
]


class RouterUnderTest(Struct, frozen=True, kw_only=True):
    process: ProcessTree
    grpc: str
    http: str
    peer: ProcessTree | None = None


class RoundFigures(Struct, frozen=True, kw_only=True):
    """Figures of one variant in one round."""

    cpu_seconds: float
    """CPU time of the router per request."""

    peer_cpu_seconds: float
    """CPU time of the router's peer per request of the router; 0 without a peer."""

    ttft_seconds: float
    """Median time to the first token of the requests with a long prompt."""


class Figures(Struct, frozen=True, kw_only=True):
    """Medians of one variant over the rounds, and its ratios to the base that `compare` chooses.

    An interval contains the median of all possible rounds with a probability of about 95 %: it leaves out the ratios that are more than
    the square root of the number of rounds away from the middle of the sorted list (a normal approximation of the sign test).
    """

    variant: str
    cpu_microseconds: float
    peer_cpu_microseconds: float
    cpu_ratio: float
    cpu_ratio_interval: tuple[float, float]
    ttft_milliseconds: float
    ttft_ratio: float
    ttft_ratio_interval: tuple[float, float]


@contextmanager
def service(
    part: str, settings: dict[str, Any], folder: Path, cores: frozenset[int], checkout: Path
) -> Iterator[ProcessTree]:
    """Run `fleet serve` of a checkout with a log and a settings file in the folder."""
    name = settings.get("router_id") or settings["worker_id"]
    config = folder / f"{name}.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "fleet.cli.main", "serve", part, "--config", str(config)]
    with started(name, command, folder, cores, environment() | {"PYTHONPATH": str(checkout)}) as running:
        yield running


def check_checkout(checkout: Path) -> None:
    """Check that Python finds the native modules in a checkout. Without them, slower Python code would be measured instead.

    Raises:
        SystemUnavailable: A module is missing, or Python finds it elsewhere.
    """
    names = [f"kvstore.native.{name}" for name in ("_table", "_chain", "_kernels")] + ["fleet.router.native._costs"]
    command = [sys.executable, "-c", f"import {', '.join(names)}; print({names[0]}.__file__)"]
    with tempfile.TemporaryDirectory() as folder:
        environment_of_checkout = environment() | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(
            command, cwd=folder, env=environment_of_checkout, capture_output=True, text=True, check=False
        )
    if done.returncode or not Path(done.stdout.strip()).is_relative_to(checkout):
        why = done.stderr.strip().rpartition("\n")[2] or f"Python finds {done.stdout.strip()}"
        raise SystemUnavailable(f"--before {checkout}: build its native modules first ({why})")


class Cluster:
    """Workers, and routers that serve them, all with the code of one checkout."""

    def __init__(self, folder: Path, cores: Cores, checkout: Path, opened: ExitStack):
        """Start the workers.

        Args:
            folder: Empty folder for sockets, settings and logs; its path must be short enough for Unix sockets.
            cores: The cores of the processes.
            checkout: Root of the checkout whose code runs.
            opened: Stack that ends the processes.
        """
        self.folder = folder
        self._cores, self._checkout, self._opened = cores, checkout, opened
        (folder / "members").mkdir()
        self._discovery = {"kind": "file", "folder": str(folder / "members"), "lease_seconds": 30, "poll_ms": 100}
        self._model_dir = str(build_tiny_model(folder, tokenizer_only=True))
        for number in range(WORKERS):
            settings = {
                "worker_id": f"worker-{number}",
                "engine": "simulated",
                "model": MODEL,
                "model_dir": self._model_dir,
                "listen": f"unix:{folder}/w{number}",
                "control_listen": f"unix:{folder}/c{number}",
                "discovery": self._discovery,
                "simulated": {"eos_probability": 0.0, "speedup": SPEEDUP},
            }
            opened.enter_context(service("worker", settings, folder, cores.others, checkout))

    def router(self, name: str, on: frozenset[int], **more: Any) -> RouterUnderTest:
        """Start a router on these cores, and wait until it answers.

        Raises:
            SystemUnavailable: The router does not answer.
        """
        http, rpc = free_port(), free_port()
        settings = {
            "router_id": name,
            "http_listen": f"127.0.0.1:{http}",
            "grpc_listen": f"127.0.0.1:{rpc}",
            "control_listen": f"unix:{self.folder}/{name}",
            "models": {MODEL: self._model_dir},
            "discovery": self._discovery,
            "prompt_secret": "a secret of all routers",
            "heartbeat_timeout_seconds": 30.0,  # long, because the cores are busy
            **more,
        }
        process = self._opened.enter_context(service("router", settings, self.folder, on, self._checkout))
        body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1, "stream": True}).encode()
        wait_until_it_answers(process, http, ("/v1/completions", body), START_SECONDS)
        return RouterUnderTest(process=process, grpc=f"127.0.0.1:{rpc}", http=f"127.0.0.1:{http}")


@contextmanager
def routers(folder: Path, cores: Cores, before: Path | None) -> Iterator[Callable[[Variant], RouterUnderTest]]:
    """Run the workers and the routers; yield a function that returns the measured router of a variant.

    Raises:
        SystemUnavailable: A router does not answer, or the peers do not reach each other, or lose their connection later.
    """
    with ExitStack() as opened:
        (folder / "now").mkdir()
        now = Cluster(folder / "now", cores, ROOT, opened)
        alone = now.router("alone", cores.router)
        own, other = (f"127.0.0.1:{free_port()}" for _ in range(2))
        peering: dict[str, Any] = {"replicas_credentials": {"insecure": True}}
        with_peer = now.router("peer", cores.router, replicas_listen=own, replicas=[other], **peering)
        peer = now.router("other", cores.others, replicas_listen=other, replicas=[own], **peering)
        with_peer = structs.replace(with_peer, peer=peer.process)
        earlier = alone
        if before is not None:
            (folder / "before").mkdir()
            earlier = Cluster(folder / "before", cores, before, opened).router("alone", cores.router)
        log = now.folder / "peer.log"
        _wait_for_peer(log)
        yield lambda variant: earlier if variant.before else with_peer if variant.has_peer else alone
        if "peer router lost" in log.read_text():
            raise SystemUnavailable("the routers lost each other, so the figures are not those of peers")


def _wait_for_peer(log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "peer router reached" not in log.read_text():
        if time.monotonic() > deadline:
            raise SystemUnavailable(f"the peers did not reach each other within {START_SECONDS:.0f} s")
        time.sleep(BETWEEN_SECONDS)


@asynccontextmanager
async def _grpc_stream(router: RouterUnderTest, resumable: bool) -> Any:
    async with grpc.aio.insecure_channel(router.grpc, options=CHANNEL_OPTIONS) as channel:
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)

        async def stream(prompt: Sequence[int], tokens: int) -> float:
            fields: Options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
            message = build_message(prompt, fields)
            message.resumable = resumable
            sent, messages, first = time.perf_counter(), 0, 0.0
            async for _ in generate(message.SerializeToString()):
                messages += 1
                if messages == 2:  # the first message only says that the request was admitted
                    first = time.perf_counter()
            return first - sent

        yield stream


@asynccontextmanager
async def _sse_stream(router: RouterUnderTest, resumable: bool) -> Any:
    headers = {"x-fleet-resumable": "1"} if resumable else {}
    async with aiohttp.ClientSession(f"http://{router.http}", headers=headers) as session:

        async def stream(prompt: Sequence[int], tokens: int) -> float:
            body = {"model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True}
            body["ignore_eos"] = True
            sent, first, last = time.perf_counter(), 0.0, b""
            async with session.post("/v1/completions", json=body) as answer:
                answer.raise_for_status()
                # The client reads chunks, because reading lines would take it longer for streams with ids. The workers share the
                # client's cores, so this would change how they batch the requests, and thereby the router's costs.
                async for chunk in answer.content.iter_any():
                    first, last = first or time.perf_counter(), (last + chunk)[-len(LAST_EVENT) :]
            if last != LAST_EVENT:
                raise SystemUnavailable(f"a stream ended with {last[:300]!r}")
            return first - sent

        yield stream


STREAM_OF = {"gRPC": _grpc_stream, "SSE": _sse_stream}


async def _round(
    variant: Variant, router: RouterUnderTest, chance: random.Random, requests: int, tokens: int, long_prompts: int
) -> RoundFigures:
    def prompt(length: int) -> list[int]:
        return [chance.randrange(64, 4000) for _ in range(length)]

    async with STREAM_OF[variant.protocol](router, variant.resumable) as stream:
        await stream(prompt(PROMPT_TOKENS), 1)  # opens the connection before anything is measured
        waiting = iter([prompt(PROMPT_TOKENS) for _ in range(requests)])

        async def client() -> None:
            for each in waiting:
                await stream(each, tokens)

        before, peer_before = router.process.cpu_seconds(), _cpu_of(router.peer)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(client())
        spent, peer_spent = router.process.cpu_seconds() - before, _cpu_of(router.peer) - peer_before
        latencies = [await stream(prompt(LONG_PROMPT_TOKENS), 1) for _ in range(long_prompts)]
    return RoundFigures(
        cpu_seconds=spent / requests,
        peer_cpu_seconds=peer_spent / requests,
        ttft_seconds=statistics.median(latencies),
    )


def _cpu_of(process: ProcessTree | None) -> float:
    return 0.0 if process is None else process.cpu_seconds()


def measure(
    rounds: int, requests: int, tokens: int, long_prompts: int, seed: int, before: Path | None = None
) -> dict[Variant, list[RoundFigures]]:
    """Return the figures of each round, by variant.

    Args:
        rounds: Number of rounds, after one that is not counted.
        requests: Requests of a round and variant whose CPU time is measured.
        tokens: Tokens of each of their answers.
        long_prompts: Requests of a round and variant whose time to the first token is measured.
        seed: Seed of prompts and order.
        before: Root of another checkout, whose ordinary streams are measured, too; None: no other one.
    """
    chance, cores = random.Random(seed), cores_of_this_process()
    variants = VARIANTS + [Variant(protocol=protocol, before=True) for protocol in STREAM_OF if before is not None]
    found: dict[Variant, list[RoundFigures]] = {variant: [] for variant in variants}
    with (
        tempfile.TemporaryDirectory(prefix="fr-") as folder,
        running_on(cores.others),
        routers(Path(folder), cores, before) as router_of,
    ):
        for number in range(rounds + 1):
            for variant in chance.sample(variants, len(variants)):
                figures = uvloop.run(_round(variant, router_of(variant), chance, requests, tokens, long_prompts))
                if number:
                    found[variant].append(figures)
            print(f"round {number} of {rounds}", file=sys.stderr)
    return found


def compare(found: dict[Variant, list[RoundFigures]]) -> list[Figures]:
    """Return the medians of each variant, and the ratios to ordinary streams of a router without peers, by the same protocol.

    If another checkout was measured, the ratios compare with its router.
    """
    rows = []
    for variant, figures in found.items():
        ordinary = Variant(protocol=variant.protocol)
        base = found.get(structs.replace(ordinary, before=True), found[ordinary])
        cpu, cpu_interval = _ratios(
            [(each.cpu_seconds, least.cpu_seconds) for each, least in zip(figures, base, strict=True)]
        )
        ttft, ttft_interval = _ratios(
            [(each.ttft_seconds, least.ttft_seconds) for each, least in zip(figures, base, strict=True)]
        )
        rows.append(
            Figures(
                variant=variant.name,
                cpu_microseconds=1e6 * statistics.median(each.cpu_seconds for each in figures),
                peer_cpu_microseconds=1e6 * statistics.median(each.peer_cpu_seconds for each in figures),
                cpu_ratio=cpu,
                cpu_ratio_interval=cpu_interval,
                ttft_milliseconds=1e3 * statistics.median(each.ttft_seconds for each in figures),
                ttft_ratio=ttft,
                ttft_ratio_interval=ttft_interval,
            )
        )
    return rows


def _ratios(pairs: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
    ratios = sorted(each / base for each, base in pairs)
    outside = max(0, int(len(ratios) / 2 - math.sqrt(len(ratios))))
    return statistics.median(ratios), (ratios[outside], ratios[-1 - outside])


def main() -> int:
    """Measure, print the figures, and return 1 if a ratio is above what the options allow."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=2 * STREAMS, help="of a round and variant, for the CPU time")
    parser.add_argument("--tokens", type=int, default=64, help="of each of their answers")
    parser.add_argument("--prompts", type=int, default=2, help="of a round and variant, for the first token")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine to a file")
    parser.add_argument("--most-cpu-percent", type=float, help="fail if a variant costs more CPU time")
    parser.add_argument("--most-ttft-percent", type=float, help="fail if a first token comes later")
    parser.add_argument("--before", type=Path, metavar="DIR", help="compare with the code of another checkout")
    arguments = parser.parse_args()

    before = None if arguments.before is None else arguments.before.resolve()
    if before is not None:
        check_checkout(before)
    rows = compare(
        measure(arguments.rounds, arguments.requests, arguments.tokens, arguments.prompts, arguments.seed, before)
    )
    for row in rows:
        (cpu_low, cpu_high), (ttft_low, ttft_high) = row.cpu_ratio_interval, row.ttft_ratio_interval
        print(
            f"{row.variant:28} {row.cpu_microseconds:6.0f} µs CPU a request, {row.cpu_ratio - 1:+.1%}"
            f" (95 %: {cpu_low - 1:+.1%} to {cpu_high - 1:+.1%}),"
            f" {row.peer_cpu_microseconds:4.0f} µs of the peer;"
            f" {row.ttft_milliseconds:6.1f} ms to the first token, {row.ttft_ratio - 1:+.1%}"
            f" ({ttft_low - 1:+.1%} to {ttft_high - 1:+.1%})"
        )
    if arguments.json:
        machine = host.facts(Path.cwd(), ["grpcio", "aiohttp", "uvloop"])
        arguments.json.write_text(json.dumps({"machine": machine, "variants": msgspec.to_builtins(rows)}, indent=1))
    return _judge(rows, arguments.most_cpu_percent, arguments.most_ttft_percent)


def _judge(rows: Sequence[Figures], most_cpu: float | None, most_ttft: float | None) -> int:
    status = 0
    for row in rows:
        for what, ratio, most in (("CPU time", row.cpu_ratio, most_cpu), ("first token", row.ttft_ratio, most_ttft)):
            if most is not None and 100 * (ratio - 1) > most:
                print(f"{row.variant}: {what} {ratio - 1:+.1%}, and {most:g} % is allowed", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
