"""`fleet up`: runs a whole cluster on this machine until Ctrl-C."""

import argparse
import asyncio
import secrets
from hashlib import sha256
from pathlib import Path

from msgspec import structs

from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.generate import summary
from fleet.cli.local.cluster import LocalCluster, LocalClusterOptions, cluster_client, say, with_cluster
from fleet.client import FleetError
from fleet.config import build_settings, load
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath, Placement, Role
from fleet.local.processes import ClusterFailed
from fleet.local.settings import PoolSection, Topology
from fleet.local.topology import addresses
from fleet.router.tenants import TenantSettings

DEMO_TOKENS = 48
DEMO_SECONDS = 120.0
OWN_TENANT = "fleet-up"  # tenant for the requests of --demo and --check, if clients need a key


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="TOML", help="topology; the options below override it")
    parser.add_argument("--engine", help="vllm (default) or simulated, which needs no engine installed")
    parser.add_argument(
        "--model", metavar="DIR", help="Hugging Face folder or repository (default: a tiny model, made on the spot)"
    )
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="parser of tool calls, by vLLM's name (default: by the chat template)",
    )
    parser.add_argument(
        "--reasoning-parser", metavar="NAME", help="parser of reasoning, by vLLM's name (default: by the chat template)"
    )
    parser.add_argument("--prefill", type=_count, metavar="N", help="prefill workers (default: 1)")
    parser.add_argument("--decode", type=_count, metavar="N", help="decode workers (default: 1)")
    parser.add_argument("--http-port", type=_port, metavar="PORT", help="OpenAI API (default: 8000; 0: any free one)")
    parser.add_argument("--grpc-port", type=_port, metavar="PORT", help="gRPC API (default: 50051; 0: any free one)")
    parser.add_argument(
        "--kserve-port",
        type=_port,
        metavar="PORT",
        help="Open Inference Protocol, for clients of KServe and Triton (default: not served; 8001 is usual; 0: any free one)",
    )
    parser.add_argument(
        "--tls", action="store_true", help="TLS on the ports for clients, with an authority made on the spot"
    )
    parser.add_argument(
        "--kv-paths",
        type=_kv_paths,
        metavar="PATHS",
        help="KV paths from prefill to decode: store (default), direct, or both",
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="write endpoints and process ids there when ready"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="keep the logs of all processes there")
    parser.add_argument("--demo", metavar="TEXT", help="send this prompt when ready and show the answer")
    parser.add_argument(
        "--check", action="store_true", help="compare tokens with one aggregated engine, report, and end"
    )


def run(arguments: argparse.Namespace) -> int:
    topology = read_topology(arguments)
    if arguments.ready_file is not None and not arguments.ready_file.absolute().parent.is_dir():
        raise ConfigurationRefused(f"--ready-file: {arguments.ready_file}: its folder does not exist")
    if arguments.ready_file is not None and arguments.ready_file.is_dir():
        raise ConfigurationRefused(f"--ready-file: {arguments.ready_file}: is a folder; name a file in it")
    surroundings = LocalClusterOptions(
        relative_to=Path() if arguments.model or not arguments.config else arguments.config.parent,
        logs=arguments.log_dir,
    )
    try:
        if arguments.check:
            from fleet.cli.local.check import check  # noqa: PLC0415 - most runs check nothing

            paths = arguments.kv_paths or tuple(KvPath)
            topology, key = with_own_key(topology)
            return DONE if asyncio.run(check(topology, surroundings, paths, key)) else FAILED
        topology, key = with_own_key(topology) if arguments.demo else (topology, "")
        asyncio.run(with_cluster(topology, surroundings, lambda cluster: _stay(cluster, arguments, key)))
    except ClusterFailed as error:
        say(str(error))
        return FAILED
    return DONE


async def _stay(cluster: LocalCluster, arguments: argparse.Namespace, api_key: str) -> None:
    """Show the addresses, and keep the pools as large as plans say, until cancelled."""
    cluster.pools.step()  # done before the cluster is announced, so that `fleet scale` can show its pools at once
    for line in addresses(cluster.plan):
        print(line)
    print("ready; Ctrl-C stops it", flush=True)
    if arguments.ready_file is not None:
        cluster.write_ready_file(arguments.ready_file)
    if arguments.demo:
        try:
            await _demonstrate(cluster, arguments.demo, api_key)
        except FleetError as error:
            say(f"the demo failed: {error.message}")
    await cluster.pools.follow()


async def _demonstrate(cluster: LocalCluster, text: str, api_key: str) -> None:
    """Stream one answer, disaggregated if possible, and show the source of its prompt blocks."""
    placement = Placement.DISAGGREGATED if cluster.plan.disaggregates else Placement.AUTO
    print(f"\n> {text}", flush=True)
    async with (
        cluster_client(cluster.plan, api_key) as client,
        client.generate(
            text, max_tokens=DEMO_TOKENS, temperature=0, placement=placement, timeout_seconds=DEMO_SECONDS
        ) as stream,
    ):
        async for delta in stream:
            print(delta.text, end="", flush=True)
    print("\n")
    for line in summary(stream.result, cluster.plan.grpc):
        print(line)


def with_own_key(topology: Topology) -> tuple[Topology, str]:
    """Return the topology with a tenant for this program's requests, and its key; both unchanged if clients need no key.

    The settings hold only digests of the clients' keys, so the program cannot use one of them.
    """
    tenants = topology.router.tenants
    if not any(tenant.api_key_sha256 for tenant in tenants.values()):
        return topology, ""
    key = secrets.token_urlsafe(32)
    own = TenantSettings(api_key_sha256=(sha256(key.encode()).hexdigest(),))
    router = structs.replace(topology.router, tenants={**tenants, OWN_TENANT: own})
    return structs.replace(topology, router=router), key


def read_topology(arguments: argparse.Namespace) -> Topology:
    """Return the topology of the file, or the default, changed by the options."""
    topology = load(arguments.config, Topology) if arguments.config else Topology()
    cluster = topology.cluster
    if arguments.engine:
        cluster = structs.replace(cluster, engine=arguments.engine)
    if arguments.model:
        cluster = structs.replace(cluster, model=arguments.model)
    if arguments.tls:
        cluster = structs.replace(cluster, tls=True)
    for name in ("tool_call_parser", "reasoning_parser"):
        if getattr(arguments, name) is not None:
            cluster = structs.replace(cluster, **{name: getattr(arguments, name)})
    if arguments.kv_paths:
        cluster = structs.replace(cluster, kv_paths=arguments.kv_paths)
    kserve_listen = topology.router.kserve_listen
    if arguments.kserve_port is not None:
        kserve_listen = _with_port(kserve_listen or topology.router.grpc_listen, arguments.kserve_port)
    router = structs.replace(
        topology.router,
        http_listen=_with_port(topology.router.http_listen, arguments.http_port),
        grpc_listen=_with_port(topology.router.grpc_listen, arguments.grpc_port),
        kserve_listen=kserve_listen,
    )
    pools = _with_replicas(topology.pools, Role.PREFILL, arguments.prefill)
    pools = _with_replicas(pools, Role.DECODE, arguments.decode)
    return build_settings(
        Topology,
        cluster=cluster,
        hub=topology.hub,
        router=router,
        store=topology.store,
        supervision=topology.supervision,
        pools=pools,
        planner=topology.planner,
    )


def _with_replicas(pools: tuple[PoolSection, ...], role: Role, replicas: int | None) -> tuple[PoolSection, ...]:
    if replicas is None:
        return pools
    of_role = [pool for pool in pools if pool.role is role]
    if len(of_role) > 1:
        raise ConfigurationRefused(
            f"--{role}: the topology has {len(of_role)} pools of that role; change the file instead"
        )
    changed = structs.replace(of_role[0] if of_role else PoolSection(role=role), replicas=replicas)
    return (*(pool for pool in pools if pool.role is not role), changed)


def _with_port(listen: str, port: int | None) -> str:
    return listen if port is None else f"{listen.rpartition(':')[0]}:{port}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 64")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _kv_paths(text: str) -> tuple[KvPath, ...]:
    try:
        paths = tuple(KvPath(each.strip()) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(KvPath)}") from None
    if len(set(paths)) != len(paths):
        raise argparse.ArgumentTypeError(f"{text!r} names a path twice")
    return paths
