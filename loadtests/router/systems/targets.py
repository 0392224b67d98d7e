"""Targets: how each router is started in front of workers that speak the OpenAI API.

A target has the form `name` or `name:policy` on the command line; without a policy, it places requests by the workers' caches.
Dynamo brings its own workers (its mocker), because its frontend speaks to no others.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from loadtests.environments import SystemDistribution, SystemUnavailable, python_of
from loadtests.kvstore.nodes import environment, free_port
from loadtests.router.load.prompts import MODEL, PATH
from loadtests.router.systems import compared as peers
from loadtests.router.systems import relay
from loadtests.router.systems.processes import Cores, ProcessTree, started, started_module, wait_until_it_answers

START_SECONDS = 90.0
DYNAMO_AT_ONCE = 1000.0  # factor of the speed of its simulated engine
DYNAMO_PACED = 0.007  # seconds per token at speed 1


class BenchmarkSetting(Struct, frozen=True, kw_only=True):
    """Surroundings of a router."""

    workers: tuple[int, ...] = ()
    """Ports of the workers; these and the next fields come from the scenario."""

    cache_blocks: int = 0
    """Prefix cache of a worker in blocks of about 64 tokens; 0: none."""

    gap_seconds: float = 0.0
    """Seconds between the tokens of an answer; 0: no pause."""

    model_dir: Path
    """Folder with the model's tokenizer."""

    folder: Path
    """Folder for logs and settings."""

    cache: Path
    """Cache folder for the environments of compared systems."""

    cores: Cores

    before: Path | None = None
    """Another checkout of Fleet for the target `fleet-before`, or None."""


class RunningRouter(Struct, frozen=True, kw_only=True):
    """A router that is ready."""

    ports: tuple[int, ...]
    """Ports among which the client's connections are distributed."""

    server: ProcessTree | None
    """The router's process; None: the client asks workers directly."""

    own_workers: bool = False
    """True if the target brings its own workers, whose counters are unknown."""


Start = Callable[[BenchmarkSetting, str], AbstractContextManager[RunningRouter]]
"""Runs the router with a policy (empty: its own cache-aware one) as long as the context is open; may raise `SystemUnavailable`."""


class RouterTarget(Struct, frozen=True, kw_only=True):
    name: str
    """Name as on the command line, with the policy."""

    policy: str
    version: str
    start: Start

    def running(self, setting: BenchmarkSetting) -> AbstractContextManager[RunningRouter]:
        return self.start(setting, self.policy)


def targets(names: Sequence[str]) -> list[RouterTarget]:
    """Return the targets with these names, and before them the client that asks workers directly, which every table needs.

    Raises:
        ConfigurationRefused: A target is unknown.
    """
    return [_target(name) for name in dict.fromkeys((DIRECT, *names))]


def _target(full_name: str) -> RouterTarget:
    name, _, policy = full_name.partition(":")
    if (known := KNOWN.get(name)) is None:
        raise ConfigurationRefused(f"--targets: {name} is not one of {', '.join(KNOWN)}")
    version, start = known
    return RouterTarget(name=full_name, policy=policy, version=version, start=start)


@contextmanager
def _direct(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:  # noqa: ARG001 - it has no policy
    """Connect each client connection to one worker, without a router."""
    yield RunningRouter(ports=setting.workers, server=None)


@contextmanager
def _relay(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:  # noqa: ARG001 - it has no policy
    ports = [str(port) for port in setting.workers]
    with started_module(relay.__name__, ports, setting.folder, setting.cores.router) as (server, ready):
        yield RunningRouter(ports=(ready["port"],), server=server)


@contextmanager
def _fleet(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:
    """Run `fleet serve router` of this checkout in front of the workers; it compares exact token blocks."""
    with _fleet_of(environment(), "fleet", setting, policy) as running:
        yield running


@contextmanager
def _fleet_before(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:
    """Run the router of another checkout with the dependencies of this one."""
    if setting.before is None:
        raise SystemUnavailable("--before names no checkout")
    with _fleet_of({**os.environ, "PYTHONPATH": str(setting.before)}, BEFORE, setting, policy) as running:
        yield running


@contextmanager
def _fleet_of(
    variables: Mapping[str, str], name: str, setting: BenchmarkSetting, policy: str
) -> Iterator[RunningRouter]:
    port = free_port()
    lines = [f'http_listen = "127.0.0.1:{port}"', 'grpc_listen = "127.0.0.1:0"']
    lines += [f"policy = {json.dumps(policy)}"] if policy else []
    for number, worker in enumerate(setting.workers):
        lines += [
            "",
            "[[openai_workers]]",
            f'worker_id = "worker-{number}"',
            f'url = "http://127.0.0.1:{worker}"',
            f'model = "{MODEL}"',
            f"tokenizer = {json.dumps(str(setting.model_dir))}",
            f"block_tokens = {peers.BLOCK_TOKENS}",
            *([f"kv_blocks = {setting.cache_blocks}"] if setting.cache_blocks else []),
        ]
    config = setting.folder / f"{name}{policy and '-'}{policy}.toml"
    config.write_text("\n".join([*lines, ""]))
    command = [sys.executable, "-m", "fleet.cli.main", "serve", "router", "--config", str(config)]
    with _serving(name, policy, command, port, setting, variables) as running:
        yield running


def _peer(name: str, distribution: SystemDistribution, command_of: peers.CommandOf, default: str) -> Start:
    @contextmanager
    def start(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:
        python = python_of(distribution, setting.cache)
        port = free_port()
        urls = [f"http://127.0.0.1:{worker}" for worker in setting.workers]
        command = command_of(python, port, urls, policy or default)
        with _serving(name, policy, command, port, setting, {}) as running:
            yield running

    return start


@contextmanager
def _dynamo(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:
    """Run the frontend on the router's core, and the mocker on the other cores."""
    python = python_of(peers.DYNAMO, setting.cache)
    port = free_port()
    more = peers.dynamo_environment(setting.folder)
    speed = DYNAMO_AT_ONCE if not setting.gap_seconds else DYNAMO_PACED / setting.gap_seconds
    simulated = peers.dynamo_workers(
        python, setting.model_dir, MODEL, speed, len(setting.workers), setting.cache_blocks
    )
    command = peers.dynamo_command(python, port, policy or "kv")
    with (
        started("dynamo-mocker", simulated, setting.folder, setting.cores.others, more),
        _serving("dynamo", policy, command, port, setting, more) as running,
    ):
        yield msgspec.structs.replace(running, own_workers=True)


@contextmanager
def _serving(
    name: str, policy: str, command: Sequence[str], port: int, setting: BenchmarkSetting, more: Mapping[str, str]
) -> Iterator[RunningRouter]:
    """Run a router on its core, and yield it when it answers."""
    full_name = f"{name}:{policy}" if policy else name
    body = {"model": MODEL, "stream": True, "max_tokens": 1, "temperature": 0, "prompt": "Are you there?"}
    with started(full_name, command, setting.folder, setting.cores.router, more) as server:
        wait_until_it_answers(server, port, (PATH, json.dumps(body).encode()), START_SECONDS)
        yield RunningRouter(ports=(port,), server=server)


DIRECT = "direct"
BEFORE = "fleet-before"

KNOWN: Mapping[str, tuple[str, Start]] = {
    DIRECT: ("", _direct),
    "relay": (f"uvloop {importlib.metadata.version('uvloop')}", _relay),
    "fleet": (importlib.metadata.version("fleet-serving"), _fleet),
    BEFORE: (importlib.metadata.version("fleet-serving"), _fleet_before),
    **{
        distribution.name: (distribution.version, _peer(distribution.name, distribution, command_of, default))
        for distribution, command_of, default in peers.PEERS
    },
    peers.DYNAMO.name: (peers.DYNAMO.version, _dynamo),
}
