"""Targets: starts each router of the benchmark in front of workers that speak the OpenAI API.

A target has the form `name` or `name:policy` on the command line; without a policy, the router places requests by the workers' caches.
With `+tls` after the name, the router serves the client over TLS with a certificate of the run; its connections to workers do not change.
Dynamo's target has workers of its own (Dynamo's mocker), because its frontend can use no others.
"""

import importlib.metadata
import json
import os
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import trustme
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused
from loadtests.environments import SystemDistribution, SystemUnavailable, python_of
from loadtests.kvstore.nodes import environment, free_port
from loadtests.router.load.prompts import MODEL, PATH
from loadtests.router.systems import compared as peers
from loadtests.router.systems import relay
from loadtests.router.systems.processes import Cores, ProcessTree, started, started_module, wait_until_it_answers

START_SECONDS = 90.0
TLS = "+tls"
DYNAMO_AT_ONCE = 1000.0  # speed-up of Dynamo's simulated engine for scenarios without a pause between tokens
DYNAMO_PACED = 0.007  # seconds per token of Dynamo's simulated engine without a speed-up


class ServerCertificate(Struct, frozen=True, kw_only=True):
    """A certificate for 127.0.0.1."""

    certificate: Path  # PEM file with the certificate
    key: Path  # PEM file with the private key
    trusted: ssl.SSLContext
    """TLS context of a client that trusts the certificate's authority."""


class BenchmarkSetting(Struct, frozen=True, kw_only=True):
    """Surroundings in which the routers run: workers, folders, cores and certificate."""

    workers: tuple[int, ...] = ()
    """Ports of the workers."""

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

    served: ServerCertificate | None = None
    """Certificate with which the router serves the client; None: no TLS. It is set if the target's name contains `+tls`."""


class RunningRouter(Struct, frozen=True, kw_only=True):
    """A router that is ready, and how the client connects to it."""

    ports: tuple[int, ...]
    """Ports among which the client's connections are distributed."""

    server: ProcessTree | None
    """The router's process; None: the client asks workers directly."""

    own_workers: bool = False
    """True if the target has workers of its own; their counters cannot be read."""

    tls: ssl.SSLContext | None = None
    """TLS context of the client's connections; None: no TLS."""


Start = Callable[[BenchmarkSetting, str], AbstractContextManager[RunningRouter]]
"""Function that runs a router with a policy while the context is open; an empty policy means the router's cache-aware one.

The function may raise `SystemUnavailable`.
"""


class RouterTarget(Struct, frozen=True, kw_only=True):
    name: str
    """Name as on the command line, including `+tls` and the policy if they are given there."""

    policy: str
    version: str
    start: Start
    tls: bool = False

    @contextmanager
    def running(self, setting: BenchmarkSetting) -> Iterator[RunningRouter]:
        """Run the router while the context is open. For TLS, make a certificate, and put all files into the subfolder `tls`.

        Raises:
            SystemUnavailable: The router does not start.
        """
        if not self.tls:
            with self.start(setting, self.policy) as running:
                yield running
            return
        folder = setting.folder / "tls"
        folder.mkdir(exist_ok=True)
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        served = ServerCertificate(
            certificate=folder / f"{self.name}.pem",
            key=folder / f"{self.name}.key",
            trusted=ssl.create_default_context(cadata=authority.cert_pem.bytes().decode()),
        )
        served.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        served.key.write_bytes(issued.private_key_pem.bytes())
        with self.start(msgspec.structs.replace(setting, folder=folder, served=served), self.policy) as running:
            yield msgspec.structs.replace(running, tls=served.trusted)


def targets(names: Sequence[str]) -> list[RouterTarget]:
    """Return the target without a router, which every table needs, and then the targets with these names.

    Raises:
        ConfigurationRefused: A target is unknown.
    """
    return [_target(name) for name in dict.fromkeys((DIRECT, *names))]


def _target(full_name: str) -> RouterTarget:
    base, _, policy = full_name.partition(":")
    name = base.removesuffix(TLS)
    if (known := KNOWN.get(name)) is None:
        raise ConfigurationRefused(f"--targets: {name} is not one of {', '.join(KNOWN)}")
    version, start = known
    if name == DIRECT != base:
        raise ConfigurationRefused(f"--targets: the workers of {base} serve without TLS")
    return RouterTarget(name=full_name, policy=policy, version=version, start=start, tls=name != base)


@contextmanager
def _direct(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:  # noqa: ARG001 - there is no router
    """Connect each client connection to one worker, without a router."""
    yield RunningRouter(ports=setting.workers, server=None)


@contextmanager
def _relay(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:  # noqa: ARG001 - it has no policy
    arguments = [str(port) for port in setting.workers]
    if (served := setting.served) is not None:
        arguments += ["--tls", str(served.certificate), str(served.key)]
    with started_module(relay.__name__, arguments, setting.folder, setting.cores.router) as (server, ready):
        yield RunningRouter(ports=(ready["port"],), server=server)


@contextmanager
def _fleet(setting: BenchmarkSetting, policy: str) -> Iterator[RunningRouter]:
    """Run `fleet serve router` of this checkout in front of the workers; it finds cached prefixes by blocks of tokens."""
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
    if (served := setting.served) is not None:
        lines += [
            f"tls.certificate = {json.dumps(str(served.certificate))}",
            f"tls.key = {json.dumps(str(served.key))}",
        ]
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
        command = [*command_of(python, port, urls, policy or default), *_tls_options(setting)]
        with _serving(name, policy, command, port, setting, {}) as running:
            yield running

    return start


def _tls_options(setting: BenchmarkSetting) -> Sequence[str]:
    """Return the options for TLS, which all compared systems have in common."""
    if (served := setting.served) is None:
        return ()
    return "--tls-cert-path", str(served.certificate), "--tls-key-path", str(served.key)


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
    command = [*peers.dynamo_command(python, port, policy or "kv"), *_tls_options(setting)]
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
        request = PATH, json.dumps(body).encode()
        trusted = None if setting.served is None else setting.served.trusted
        wait_until_it_answers(server, port, request, START_SECONDS, tls=trusted)
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
