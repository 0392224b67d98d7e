"""Main benchmark: how much latency Fleet adds to that of the engine, and how much its KV store saves, in one run on the tiny model.

Four targets answer equal loads in turn, round by round, so that a change of the machine's speed affects all of them:

- ``vllm``: plain vLLM with its own OpenAI server, as the limit.
- ``fleet-aggregated``: one Fleet worker serves the whole request.
- ``fleet-store``: disaggregated; the blocks move through the store node. It shares a cluster with ``fleet-aggregated``.
- ``fleet-direct``: disaggregated; the blocks move by NIXL, in a cluster of its own.

While one target is measured, the processes of the other targets are stopped (SIGSTOP), because NIXL's progress thread uses most of
a core even when it is idle.
Prompts are random tokens that are repeated only in the prefix scenario. The client has one keep-alive connection, server-sent events
and concurrency 1.

    python -m loadtests.main_job [--rounds N] [--json FILE] [--targets vllm,fleet-aggregated,...]
"""

import argparse
import http.client
import importlib.metadata
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fleet.config import default_cache_dir
from fleet.local.tiny_model import build_tiny_model
from loadtests.kvstore.nodes import free_port

ANSWER_TOKENS = 64
VOCABULARY = range(64, 4000)
START_SECONDS = 300
REQUEST_SECONDS = 120
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 4096


@dataclass
class ServedAnswer:
    ttft_ms: float
    tpot_ms: float
    fleet: dict[str, Any]


@dataclass
class ServerUnderTest:
    """A running server: plain vLLM, or a cluster of Fleet. `pids` are its main processes; their children are found from these."""

    port: int
    pids: list[int]
    router_pid: int | None = None
    ready_path: str = "/health"

    def processes(self) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for pid in self.pids:
            if psutil.pid_exists(pid):
                process = psutil.Process(pid)
                found |= {each.pid: each for each in [process, *process.children(recursive=True)]}
        return list(found.values())

    def signal(self, number: int) -> None:
        for process in self.processes():
            if process.is_running():
                process.send_signal(number)

    def router_cpu_seconds(self) -> float:
        assert self.router_pid is not None
        times = psutil.Process(self.router_pid).cpu_times()
        return float(times.user + times.system)

    def wait_until_healthy(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", self.ready_path)
                healthy = connection.getresponse().status == 200
                connection.close()
            except OSError:
                healthy = False
            if healthy:
                return
            time.sleep(0.2)
        raise SystemExit(f"the server on port {self.port} was not healthy within {seconds:.0f} s")


@dataclass
class ServingTarget:
    name: str
    server: ServerUnderTest
    model: str
    extra: dict[str, Any] = field(default_factory=dict)

    def ask(self, tokens: Sequence[int], **extra: Any) -> ServedAnswer:
        """Send a request for a streamed completion. Each event gets the instant at which the client has read it."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **(self.extra | extra),
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=REQUEST_SECONDS)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload = json.dumps(body).encode()
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", payload, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{self.name}: HTTP {response.status}: {response.read(500)!r}")
        texts: list[float] = []
        events: list[float] = []
        fleet: dict[str, Any] = {}
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            fleet = event.get("fleet") or fleet
            if event.get("choices"):
                events.append(now)
                if event["choices"][0].get("text"):
                    texts.append(now)
        connection.close()
        assert texts, f"{self.name}: an answer without text"
        # An event may hold no token or several (incomplete characters), so the mean is taken over tokens.
        return ServedAnswer(
            ttft_ms=(texts[0] - started) * 1e3,
            tpot_ms=(events[-1] - events[0]) * 1e3 / (ANSWER_TOKENS - 1),
            fleet=fleet,
        )


@contextmanager
def plain_vllm(model_dir: Path, log: Path) -> Iterator[ServerUnderTest]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model_dir),
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    command += ["--max-num-seqs", "16", "--block-size", str(BLOCK_TOKENS), "--served-model-name", "tiny"]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    server = ServerUnderTest(port=port, pids=[process.pid])
    try:
        server.wait_until_healthy(START_SECONDS)
        yield server
    finally:
        stop(server, process)


@contextmanager
def fleet_cluster(kv_path: str, folder: Path) -> Iterator[ServerUnderTest]:
    ready = folder / f"{kv_path}.json"
    port = free_port()
    topology = folder / f"{kv_path}.toml"
    topology.write_text("[router]\nheartbeat_timeout_seconds = 60\n")  # long, because NIXL slows other processes down
    command = [
        sys.executable,
        "-m",
        "fleet.cli.main",
        "up",
        "--config",
        str(topology),
        "--http-port",
        str(port),
        "--grpc-port",
        "0",
    ]
    command += ["--kv-paths", kv_path, "--ready-file", str(ready)]
    with (folder / f"{kv_path}.log").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    server = ServerUnderTest(port=port, pids=[process.pid])
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"the {kv_path} cluster did not start:\n{(folder / f'{kv_path}.log').read_text()[-2000:]}"
                )
            time.sleep(0.2)
        server.router_pid = json.loads(ready.read_text())["pids"]["router"]
        yield server
    finally:
        stop(server, process)


def stop(server: ServerUnderTest, process: subprocess.Popen[bytes]) -> None:
    server.signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        for each in server.processes():
            each.kill()
        process.wait(10)


def turn(servers: Sequence[ServerUnderTest], chosen: ServerUnderTest) -> None:
    """Continue the chosen server, stop all others by SIGSTOP, and wait until the chosen one is healthy."""
    for server in servers:
        if server is not chosen:
            server.signal(signal.SIGSTOP)
    chosen.signal(signal.SIGCONT)
    chosen.wait_until_healthy(30)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(length)]


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "min": round(ordered[0], 3),
        "p90": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))], 3),
        "n": len(ordered),
    }


def measure_cost(targets: Sequence[ServingTarget], rounds: int, per_round: int, seed: int) -> dict[str, Any]:
    """Measure TTFT, TPOT and router CPU of every target at both prompt lengths."""
    rng = random.Random(seed)
    servers = list({id(target.server): target.server for target in targets}.values())
    results: dict[str, dict[str, Any]] = {target.name: {} for target in targets}
    samples: dict[tuple[str, int], list[ServedAnswer]] = {}
    router: dict[tuple[str, int], list[float]] = {}
    for round_number in range(rounds + 1):  # round 0 is a warm-up
        for target in targets:
            turn(servers, target.server)
            for length in (128, 2048):
                before = target.server.router_cpu_seconds() if target.server.router_pid else 0.0
                answers = [target.ask(prompt(rng, length)) for _ in range(per_round)]
                if round_number == 0:
                    continue
                samples.setdefault((target.name, length), []).extend(answers)
                if target.server.router_pid:
                    used = target.server.router_cpu_seconds() - before
                    router.setdefault((target.name, length), []).append(used / per_round * 1e3)
        print(f"round {round_number} of {rounds} done", file=sys.stderr)
    for (name, length), answers in samples.items():
        results[name][str(length)] = {
            "ttft_ms": spread([answer.ttft_ms for answer in answers]),
            "tpot_ms": spread([answer.tpot_ms for answer in answers]),
        }
        if (name, length) in router:
            results[name][str(length)]["router_cpu_ms_per_request"] = spread(router[name, length])
    return results


def measure_prefix(target: ServingTarget, servers: Sequence[ServerUnderTest], rounds: int, seed: int) -> dict[str, Any]:
    """Measure the TTFT of a 2k-token prompt on the worker that computed its blocks, and on a worker that loads them from the store."""
    rng = random.Random(seed)
    turn(servers, target.server)
    cold: list[float] = []
    same: list[float] = []
    cold_other: list[float] = []
    other: list[float] = []
    for _ in range(rounds):
        prefix = prompt(rng, 2048)
        # The decode worker gets the prefix twice, and computes it only once. Then the prefill worker gets it for the first time.
        cold.append(target.ask(prefix + prompt(rng, 16), fleet={"placement": "aggregated"}).ttft_ms)
        same.append(target.ask(prefix + prompt(rng, 16), fleet={"placement": "aggregated"}).ttft_ms)
        answer = target.ask(prefix + prompt(rng, 16), fleet={"placement": "disaggregated"})
        other.append(answer.ttft_ms)
        assert stored_blocks(answer, "prefill") == 2048 // BLOCK_TOKENS, answer.fleet
        cold_other.append(target.ask(prompt(rng, 2064), fleet={"placement": "disaggregated"}).ttft_ms)
    return {
        "cold_ms": spread(cold),
        "repeated_same_worker_ms": spread(same),
        "cut_same_worker": round(1 - statistics.median(same) / statistics.median(cold), 3),
        "cold_other_worker_ms": spread(cold_other),
        "repeated_other_worker_ms": spread(other),
        "cut_other_worker": round(1 - statistics.median(other) / statistics.median(cold_other), 3),
    }


def stored_blocks(answer: ServedAnswer, phase: str) -> int:
    return sum(
        origin["blocks"]
        for each in answer.fleet.get("kv", [])
        if each["phase"] == phase
        for origin in each["origins"]
        if origin["source"] == "store"
    )


def machine() -> dict[str, Any]:
    versions = {
        name: importlib.metadata.version(name) for name in ("fleet-serving", "vllm-cpu", "torch", "grpcio", "uvloop")
    }
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        **versions,
    }


def show(report: dict[str, Any]) -> None:
    print(f"machine: {report['machine']}")
    print(
        f"{'target':18} {'prompt':>6} {'TTFT ms: median (min, p90)':>30} {'TPOT ms: median (min, p90)':>30} {'router CPU ms/request':>22}"
    )
    for name, lengths in report["cost"].items():
        for length, row in lengths.items():
            cells = [
                f"{row[key]['median']:.2f} ({row[key]['min']:.2f}, {row[key]['p90']:.2f})"
                for key in ("ttft_ms", "tpot_ms")
            ]
            cpu = row.get("router_cpu_ms_per_request")
            print(f"{name:18} {length:>6} {cells[0]:>30} {cells[1]:>30} {cpu['median'] if cpu else '-':>22}")
    for length, row in report.get("added", {}).items():
        print(
            f"fleet-aggregated over vllm at {length} tokens: TTFT {row['ttft_ms']:+.2f} ms, TPOT {row['tpot_percent']:+.1f} %"
        )
    for key, value in report.get("prefix", {}).items():
        print(f"2k prefix, {key}: {value}")


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=4, help="requests a target, prompt length and round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default="vllm,fleet-aggregated,fleet-store,fleet-direct")
    parser.add_argument("--json", type=Path, help="write the report here as well")
    arguments = parser.parse_args()
    wanted = arguments.targets.split(",")
    model_dir = build_tiny_model(default_cache_dir())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-bench-")))
        targets: list[ServingTarget] = []
        if "vllm" in wanted:
            targets.append(
                ServingTarget("vllm", stack.enter_context(plain_vllm(model_dir, folder / "vllm.log")), "tiny")
            )
            targets[-1].server.signal(signal.SIGSTOP)  # so that the next target starts undisturbed
        if {"fleet-aggregated", "fleet-store"} & set(wanted):
            store = stack.enter_context(fleet_cluster("store", folder))
            store.signal(signal.SIGSTOP)
            for name, placement in (("fleet-aggregated", "aggregated"), ("fleet-store", "disaggregated")):
                if name in wanted:
                    targets.append(ServingTarget(name, store, "tiny", {"fleet": {"placement": placement}}))
        if "fleet-direct" in wanted:
            direct = stack.enter_context(fleet_cluster("direct", folder))
            targets.append(ServingTarget("fleet-direct", direct, "tiny", {"fleet": {"placement": "disaggregated"}}))
        servers = list({id(target.server): target.server for target in targets}.values())
        report: dict[str, Any] = {"machine": machine(), "answer_tokens": ANSWER_TOKENS, "rounds": arguments.rounds}
        report["cost"] = measure_cost(targets, arguments.rounds, arguments.per_round, arguments.seed)
        if "vllm" in wanted and "fleet-aggregated" in wanted:
            report["added"] = {
                length: {
                    "ttft_ms": round(ours["ttft_ms"]["median"] - plain["ttft_ms"]["median"], 3),
                    "tpot_percent": round(100 * (ours["tpot_ms"]["median"] / plain["tpot_ms"]["median"] - 1), 2),
                }
                for length, ours in report["cost"]["fleet-aggregated"].items()
                for plain in [report["cost"]["vllm"][length]]
            }
        if "fleet-store" in wanted:
            by_name = {target.name: target for target in targets}
            report["prefix"] = measure_prefix(by_name["fleet-store"], servers, arguments.rounds * 2, arguments.seed + 1)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
