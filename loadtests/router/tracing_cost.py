"""Cost of tracing: CPU time of the router per request without tracing, and with a sampled share of 1 % and of 100 %.

    python -m loadtests.router.tracing_cost [--rounds N] [--requests N] [--tokens N] [--most-percent P]

There is a cluster for each of the three cases. They run at the same time and are measured in turn, round by round, so that a change of
the machine's speed affects all of them.
Workers are real processes with the simulated engine. The collector runs in this process, and discards all spans.
With `--most-percent` the command fails if a sampled share of 1 % costs more than this percentage of CPU time (median of the rounds).
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop

from fleet.client.requests import Options, build_message
from fleet.net.grpc.options import CHANNEL_OPTIONS
from loadtests.environments import SystemUnavailable
from loadtests.router.grpc_stream import METHOD, PROMPT_TOKENS, TOPOLOGY, cluster
from loadtests.router.systems.processes import cores_of_this_process, cpu_seconds, running_on

STREAMS = 16
OFF, FEW, ALL = "off", "1 %", "100 %"


class TraceSink(grpc.GenericRpcHandler):
    """A collector that counts exports, and discards their spans."""

    def __init__(self) -> None:
        self.exports = 0
        self.endpoint = ""

    def service(self, _: Any) -> Any:
        self.exports += 1
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"")


@contextmanager
def trace_sink() -> Iterator[TraceSink]:
    """Run a `TraceSink` while the context is open."""
    sink = TraceSink()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[sink])
    sink.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield sink
    finally:
        server.stop(None)


async def serve_requests(address: str, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Send the prompts, `STREAMS` at a time, and read all answers."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        waiting = iter(prompts)

        async def client() -> None:
            for prompt in waiting:
                fields: Options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
                async for _ in generate(build_message(prompt, fields).SerializeToString()):
                    pass

        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(client())


def measure(rounds: int, requests: int, tokens: int, seed: int = 1) -> dict[str, list[float]]:
    """Return the router's CPU seconds per request in each round, by the name of the sampled share."""
    chance, cores = random.Random(seed), cores_of_this_process()
    shares = {OFF: None, FEW: 0.01, ALL: 1.0}
    found: dict[str, list[float]] = {name: [] for name in shares}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        opened.enter_context(running_on(cores.others))
        sink = opened.enter_context(trace_sink())
        running: dict[str, tuple[str, int]] = {}
        for number, (name, ratio) in enumerate(shares.items()):
            own = folder / f"share-{number}"
            own.mkdir()
            tracing = "" if ratio is None else f'\n[tracing]\nendpoint = "{sink.endpoint}"\nsample_ratio = {ratio}\n'
            running[name] = opened.enter_context(cluster(own, cores, TOPOLOGY + tracing))
        for number in range(rounds + 1):
            for name, (address, router) in running.items():
                prompts = [[chance.randrange(64, 4000) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
                before, exports = cpu_seconds(router), sink.exports
                uvloop.run(serve_requests(address, prompts, tokens))
                time.sleep(1.5)  # the exporter sends once a second
                if shares[name] == 1 and sink.exports == exports:
                    raise SystemUnavailable(
                        "nothing came to the collector, so the figures would be those of no tracing"
                    )
                if number:  # the first round warms up
                    found[name].append((cpu_seconds(router) - before) / requests)
            print(f"round {number} of {rounds}", file=sys.stderr)
    return found


def main() -> int:
    """Measure, print the figures, and return 1 if tracing costs more than `--most-percent` says."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=300, help="of a round and cluster")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--most-percent", type=float, help="fail above this cost at a sampled share of 1 %%")
    arguments = parser.parse_args()
    found = measure(arguments.rounds, arguments.requests, arguments.tokens)
    status = 0
    for name, figures in found.items():
        ratios = sorted(each / off - 1 for each, off in zip(figures, found[OFF], strict=True))
        median = statistics.median(ratios)
        middle = ratios[len(ratios) // 4 : len(ratios) - len(ratios) // 4]
        print(
            f"sampled {name:6} {1e6 * statistics.median(figures):6.0f} µs CPU a request,"
            f" {median:+.1%} (middle half of the rounds {middle[0]:+.1%} to {middle[-1]:+.1%})"
        )
        if name == FEW and arguments.most_percent is not None and 100 * median > arguments.most_percent:
            print(
                f"tracing of 1 % costs {median:+.1%} of the router's CPU time, and --most-percent allows"
                f" {arguments.most_percent:g} %",
                file=sys.stderr,
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
