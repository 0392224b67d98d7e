"""`fleet up`: runs a whole cluster on this machine until Ctrl-C.

`fleet.local.topology` decides which processes there are, and `fleet.local.processes` starts them.
"""

import argparse
import asyncio
import secrets
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import get_args, get_type_hints

from msgspec import structs

from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.generate import summary
from fleet.cli.local.cluster import LocalCluster, LocalClusterOptions, cluster_client, say, with_cluster
from fleet.client import FleetError
from fleet.config import build_settings, load, parse_changes
from fleet.core.errors import ConfigurationRefused
from fleet.core.roles import KvPath, Placement, Role
from fleet.local.processes import ClusterFailed
from fleet.local.settings import SIMULATED, PoolSection, Topology
from fleet.local.topology import addresses
from fleet.router.tenants import TenantSettings
from workers.settings import ModelTask, SimulatedSettings

DEMO_TOKENS = 48
DEMO_SECONDS = 120.0
KEYS_TENANT = "api-key"  # name of the tenant to which the keys of --api-key belong
SIMULATED_RANKS = get_args(get_type_hints(SimulatedSettings)["tensor_parallel"])
MOST = 1 << 31
OWN_TENANT = "fleet-up"  # name of the tenant for the requests of --demo and --check, if clients need a key


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="TOML", help="topology; the options below override it")
    parser.add_argument("--engine", help="vllm (default) or simulated, which needs no engine installed")
    _add_model_options(parser)
    parser.add_argument("--prefill", type=_count, metavar="N", help="prefill workers (default: 1)")
    parser.add_argument("--decode", type=_count, metavar="N", help="decode workers (default: 1)")
    parser.add_argument(
        "--host", type=_host, metavar="HOST", help="address of all ports for clients (default: 127.0.0.1; all: 0.0.0.0)"
    )
    parser.add_argument(
        "--http-port", "--port", type=_port, metavar="PORT", help="OpenAI API (default: 8000; 0: any free one)"
    )
    parser.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help="keys that clients must have one of, for the tenant api-key; others see them in the list of processes",
    )
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
    parser.add_argument(
        "--access-log", action="store_true", help="write a line for each request to the router's log (see fleet logs)"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="keep the logs of all processes there; a folder for one running cluster",
    )
    parser.add_argument("--demo", metavar="TEXT", help="send this prompt when ready and show the answer")
    parser.add_argument(
        "--check", action="store_true", help="compare tokens with one aggregated engine, report, and end"
    )


def advise(unknown: Sequence[str]) -> str:
    """Return advice about unknown arguments, such as which option was probably meant, as the end of an error message."""
    word = unknown[0]
    if not word.startswith("-"):
        return f"; did you mean --model {word}?"
    name, equals, value = word.partition("=")
    if not equals:
        value = unknown[1] if len(unknown) > 1 and not unknown[1].startswith("-") else "true"
    return f"; an option of vLLM goes behind --vllm-arg, as in --vllm-arg {name.lstrip('-').replace('-', '_')}={value}"


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the model, under the names that they have in vLLM and SGLang."""
    parser.add_argument(
        "--model",
        "--model-path",
        metavar="DIR",
        help="Hugging Face folder or repository (default: a tiny model, made on the spot)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="name under which clients ask for the model (default: that of its folder or repository)",
    )
    parser.add_argument(
        "--task",
        choices=tuple(task.value for task in ModelTask),
        help="what the model does; embed and classify serve /v1/embeddings, /v1/rerank, /v1/score (default: by the model)",
    )
    parser.add_argument(
        "--max-model-len",
        "--context-length",
        type=_positive,
        metavar="N",
        help="most tokens of prompt plus answer (default: 4096, or less if the model has less)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        "-tp",
        type=_positive,
        metavar="N",
        help="ranks of every worker (default: 1)",
    )
    parser.add_argument("--dtype", metavar="TYPE", help="data type of weights and activations (default: auto)")
    parser.add_argument(
        "--gpu-memory-utilization",
        "--mem-fraction-static",
        type=_share,
        metavar="SHARE",
        help="share of the GPU's memory for the engine (default: that of vLLM; on CPUs: `vllm.kv_cache_gib` of a pool)",
    )
    parser.add_argument(
        "--max-num-seqs",
        "--max-running-requests",
        type=_positive,
        metavar="N",
        help="requests in one batch of a worker (default: 16)",
    )
    parser.add_argument(
        "--vllm-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any other argument of vLLM's engine, such as quantization=fp8; may be repeated",
    )
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template of chats (default: that of the model)"
    )
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="parser of tool calls, by vLLM's name (default: by the chat template)",
    )
    parser.add_argument(
        "--reasoning-parser", metavar="NAME", help="parser of reasoning, by vLLM's name (default: by the chat template)"
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
    """Show the addresses, and then keep the pools at the sizes of the plans, until cancelled."""
    # This writes the first report before the cluster is announced, so that `fleet scale` can show the pools at once.
    cluster.pools.step()
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
    """Stream one answer, disaggregated if possible, and show where the blocks of the prompt came from."""
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
    """Return the topology with an additional tenant for the requests of this program, and the key of that tenant.

    If clients need no key, return the topology unchanged, and an empty key.

    This program cannot use the key of a client, because the settings contain only digests of these keys.
    """
    tenants = topology.router.tenants
    if not any(tenant.api_key_sha256 for tenant in tenants.values()):
        return topology, ""
    key = secrets.token_urlsafe(32)
    own = TenantSettings(api_key_sha256=(sha256(key.encode()).hexdigest(),))
    router = structs.replace(topology.router, tenants={**tenants, OWN_TENANT: own})
    return structs.replace(topology, router=router), key


def read_topology(arguments: argparse.Namespace) -> Topology:
    """Return the topology in the file of `--config`, or the default one, with the changes that the options demand.

    Raises:
        ConfigurationRefused: The file or an option cannot be used.
    """
    topology = load(arguments.config, Topology) if arguments.config else Topology()
    given = {
        "engine": arguments.engine,
        "model": arguments.model,
        "served_name": arguments.served_model_name,
        "max_model_len": arguments.max_model_len,
        "task": arguments.task,
        "chat_template": arguments.chat_template and str(arguments.chat_template.absolute()),
        "tool_call_parser": arguments.tool_call_parser,
        "reasoning_parser": arguments.reasoning_parser,
        "tls": arguments.tls or None,
        "kv_paths": arguments.kv_paths,
    }
    cluster = structs.replace(topology.cluster, **{name: value for name, value in given.items() if value is not None})
    kserve_listen = topology.router.kserve_listen
    if arguments.kserve_port is not None:
        kserve_listen = _with_port(kserve_listen or topology.router.grpc_listen, arguments.kserve_port)
    router = structs.replace(
        topology.router,
        http_listen=_with_host(_with_port(topology.router.http_listen, arguments.http_port), arguments.host),
        grpc_listen=_with_host(_with_port(topology.router.grpc_listen, arguments.grpc_port), arguments.host),
        kserve_listen=_with_host(kserve_listen, arguments.host),
        access_log=topology.router.access_log or arguments.access_log,
        tenants=_with_keys(topology.router.tenants, arguments.api_key or ()),
    )
    pools = _with_replicas(topology.pools, Role.PREFILL, arguments.prefill)
    pools = _with_replicas(pools, Role.DECODE, arguments.decode)
    if arguments.tensor_parallel_size is not None:
        pools = tuple(_with_ranks(pool, cluster.engine, arguments.tensor_parallel_size) for pool in pools)
    pools = tuple(_with_engine_options(pool, arguments) for pool in pools)
    return build_settings(
        Topology,
        **{
            **{name: getattr(topology, name) for name in Topology.__struct_fields__},
            "cluster": cluster,
            "router": router,
            "pools": pools,
        },
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


def _with_engine_options(pool: PoolSection, arguments: argparse.Namespace) -> PoolSection:
    extra = parse_changes(arguments.vllm_arg, "--vllm-arg")
    if nested := next((name for name in extra if "." in name), None):
        raise ConfigurationRefused(
            f"--vllm-arg: {nested}: is not the name of an argument; an object is NAME={{key = 1}}"
        )
    if arguments.gpu_memory_utilization is not None:
        extra["gpu_memory_utilization"] = arguments.gpu_memory_utilization
    vllm = structs.replace(pool.vllm, extra_args={**pool.vllm.extra_args, **extra}) if extra else pool.vllm
    if arguments.dtype is not None:
        vllm = structs.replace(vllm, dtype=arguments.dtype)
    return structs.replace(pool, vllm=vllm, max_running=arguments.max_num_seqs or pool.max_running)


def _with_ranks(pool: PoolSection, engine: str, ranks: int) -> PoolSection:
    if engine != SIMULATED:
        extra = {**pool.vllm.extra_args, "tensor_parallel_size": ranks}
        return structs.replace(pool, vllm=structs.replace(pool.vllm, extra_args=extra))
    if ranks not in SIMULATED_RANKS:
        raise ConfigurationRefused(
            f"--tensor-parallel-size: {ranks}: the simulated engine has {', '.join(map(str, SIMULATED_RANKS))} ranks"
        )
    return structs.replace(pool, simulated=structs.replace(pool.simulated, tensor_parallel=ranks))


def _with_keys(tenants: dict[str, TenantSettings], keys: Sequence[str]) -> dict[str, TenantSettings]:
    """Return the tenants of the settings. If the command line has keys, add one more tenant with these keys.

    Raises:
        ConfigurationRefused: A key cannot be used, or the settings have a tenant `KEYS_TENANT` already.
    """
    if not keys:
        return tenants
    if KEYS_TENANT in tenants:
        raise ConfigurationRefused(f"--api-key: the topology has a tenant {KEYS_TENANT}; give it the keys in the file")
    if not all(keys):
        raise ConfigurationRefused("--api-key: a key is empty")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigurationRefused("--api-key: a key has characters that HTTP clients cannot send; use printable ASCII")
    digests = tuple(sha256(key.encode()).hexdigest() for key in dict.fromkeys(keys))
    return {**tenants, KEYS_TENANT: TenantSettings(api_key_sha256=digests)}


def _with_host(listen: str, host: str | None) -> str:
    return listen if host is None or not listen else f"{host}:{listen.rpartition(':')[2]}"


def _with_port(listen: str, port: int | None) -> str:
    return listen if port is None else f"{listen.rpartition(':')[0]}:{port}"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > 64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 64")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return share


def _host(text: str) -> str:
    if not text or "/" in text or any(each.isspace() for each in text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a host, as in 127.0.0.1")
    return f"[{text}]" if ":" in text and not text.startswith("[") else text


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
