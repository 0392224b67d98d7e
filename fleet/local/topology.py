"""Processes of a topology: plans the settings and addresses of all processes, and the order in which they start and stop.

Rules:

1. The processes call each other over Unix sockets in the runtime folder. Only the router's control port is a TCP port, if
   `router.control_listen` names one. Other TCP ports are the router's ports for clients, gateways, peer routers and health,
   the ports for metrics, and the ports that workers choose for NIXL (KV path `direct`).
2. A port 0 of the router is replaced by a free port here, not in the router. So a restarted router keeps its address,
   and workers can get the address before the router runs.
3. Every fault in the topology that can be found without starting a process is reported here.
"""

import errno
import json
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from fleet.config import build_settings, save
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused, install_command
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from fleet.local.liveness import LivenessLimits
from fleet.local.planner import PLANNER, planner_settings
from fleet.local.processes import LocalProcess
from fleet.local.runs import AUTHORITY
from fleet.local.settings import SIMULATED, TINY, ClusterSection, PoolSection, StorePlace, SupervisionSettings, Topology
from fleet.local.supervision import ChildProcess
from fleet.planner.messages import PoolName, worker_prefix
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from fleet.router.settings.images import ImageSettings
from fleet.router.settings.router import RouterSettings
from kvstore.clock import nanos
from kvstore.net.addresses import unix_path
from kvstore.security.credentials import Credentials
from kvstore.service.settings import StoreSettings
from workers.settings import VllmSettings, WorkerSettings

ENGINE_READY_WITHIN = Nanos(1800 * SECOND)
"""Time limit for the start of a worker, unless its engine is the simulated one. vLLM starts in 20 s with the tiny model on two
idle cores, and takes more than ten minutes for a large model on a slow disk."""

SIMULATED_READY_WITHIN = Nanos(30 * SECOND)
# time limit for the start of the router, the store and the planner; each starts in a second unless the machine is very busy
READY_WITHIN = Nanos(30 * SECOND)
# time limit for the drain of a worker that is stopped with the cluster; short, because a person waits, and the router has ended already
WORKER_DRAIN = Nanos(5 * SECOND)
# time from the signal that asks a process to end until it is killed; workers get `WORKER_DRAIN` in addition; vLLM takes a few seconds
# to end its processes
STOP_WITHIN = Nanos(20 * SECOND)

# Workers start after the router. If they started earlier, they could register with another program that listens at the router's address.
START_STORE, START_ROUTER, START_WORKERS, START_PLANNER = range(4)
STOP_ROUTER, STOP_WORKERS, STOP_STORE = range(3)

ANY_PORT = "127.0.0.1:0"
"""Default address of the router's health port: a free port that only this machine reaches."""

ALL_INTERFACES = ("0.0.0.0", "[::]")  # noqa: S104 - compared, not bound
MOST_PORT = 65_535
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
CHOSEN_PORTS = 10_000
"""If an address has port 0, a free port is chosen from this number of ports just below the system's ephemeral ports."""
PORT_TRIES = 100

ROUTER = "router"
STORE = "kvstore"


class LocalPool(Struct, frozen=True, kw_only=True):
    """Equal workers of a local cluster."""

    name: str
    """Name of the pool: its role, followed by a number if several pools have this role."""

    role: Role
    workers: tuple[WorkerId, ...]
    settings: Callable[[WorkerId], WorkerSettings]
    """Function that returns the settings of a worker, by its name. It raises ConfigurationRefused if
    the settings are invalid."""

    ready_within: Nanos
    limits: LivenessLimits = LivenessLimits()


class LocalPlan(Struct, frozen=True, kw_only=True):
    """The processes of a local cluster and its addresses."""

    processes: tuple[LocalProcess, ...]
    model: ModelName
    model_dir: Path
    http: str  # host:port of the router's OpenAI API
    grpc: str  # host:port of the router's gRPC API
    health: str  # host:port of the router's health port
    control: str  # host:port or unix:/path of the router's control port
    control_credentials: Credentials  # credentials that callers of the control port need, unless it is a Unix socket
    kserve: str  # host:port of the Open Inference Protocol; empty: not served
    speaks_tls: bool  # True if the router's ports for clients use TLS
    authority: str  # file with the certificate authority that was made for this cluster; empty: none was made
    pools: tuple[LocalPool, ...]
    disaggregates: bool  # True if there are prefill workers
    max_model_len: int  # maximum number of tokens of prompt plus answer

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(worker for pool in self.pools for worker in pool.workers)


def plan(topology: Topology, *, folder: Path, model_dir: Path, model: ModelName) -> LocalPlan:
    """Plan the processes of a topology, and write their settings files.

    Args:
        topology: The cluster.
        folder: The runtime folder.
        model_dir: Folder of the model.
        model: Name under which the model is served.

    Raises:
        ConfigurationRefused: The engine is not installed, an address is in use or invalid, the model folder has no readable
            configuration, another file that the topology names cannot be used, or settings contradict each other.
        OSError: A settings file cannot be written.
    """
    _check_engine(topology.cluster.engine)
    _check_images(topology.router.images)
    check_overflow(topology, model)
    with ExitStack() as held:  # all ports are reserved at once, so that no two addresses get the same port
        http = claim_address("router.http_listen", topology.router.http_listen, held)
        grpc = claim_address("router.grpc_listen", topology.router.grpc_listen, held)
        health = claim_address("router.health_listen", topology.router.health_listen or ANY_PORT, held)
        control = topology.router.control_listen or f"unix:{folder / 'control.sock'}"
        if not unix_path(control):
            control = claim_address("router.control_listen", control, held)
        kserve = topology.router.kserve_listen and claim_address(
            "router.kserve_listen", topology.router.kserve_listen, held
        )
        _claim_metrics(topology, held)
    node = _store(topology, folder) if KvPath.STORE in topology.cluster.kv_paths else None
    is_embedded = topology.store.place is StorePlace.WORKER
    store = node.listen[0] if node is not None else ""
    processes = []
    if node is not None and not is_embedded:
        processes.append(_store_process(folder, node, liveness_limits(topology.supervision, STORE)))
    router = structs.replace(
        topology.router,
        prompt_secret=_prompt_secret(topology.router),
        http_listen=http,
        grpc_listen=grpc,
        health_listen=health,
        control_listen=control,
        kserve_listen=kserve,
        endpoint_picker=_picker(topology.router.endpoint_picker, http),
        store=store,
        models={model: str(model_dir)},
        tracing=topology.tracing,
    )
    processes.append(
        _process(
            ChildProcess(
                name=ROUTER,
                start_stage=START_ROUTER,
                stop_stage=STOP_ROUTER,
                ready_within=READY_WITHIN,
                stop_within=STOP_WITHIN,
            ),
            folder,
            router,
            liveness_limits(topology.supervision, ROUTER),
        )
    )
    pools = _pools(
        topology,
        folder,
        model_dir=str(model_dir),
        model=model,
        registry=_dialled(control),
        registry_credentials=Credentials() if unix_path(control) else topology.router.control_credentials,
        store="" if is_embedded else store,
        embedded_store=node if is_embedded else None,
        tracing=topology.tracing,
        metrics_access=topology.metrics_access,
        metrics_tls=topology.metrics_tls,
    )
    processes += [worker_process(pool, worker, folder) for pool in pools for worker in pool.workers]
    if topology.planner is not None:
        settings = planner_settings(
            topology, topology.planner, pool_names(topology), folder=folder, model=model, control=_dialled(control)
        )
        child = ChildProcess(
            name=PLANNER,
            start_stage=START_PLANNER,
            stop_stage=STOP_ROUTER,
            ready_within=READY_WITHIN,
            stop_within=STOP_WITHIN,
        )
        processes.append(_process(child, folder, settings, liveness_limits(topology.supervision, PLANNER)))
    return LocalPlan(
        processes=tuple(processes),
        model=model,
        model_dir=model_dir,
        http=_dialled(http),
        grpc=_dialled(grpc),
        health=_dialled(health),
        control=_dialled(control),
        control_credentials=topology.router.control_credentials,
        kserve=_dialled(kserve),
        speaks_tls=bool(topology.router.tls.certificate),
        authority=str(authority) if (authority := folder / AUTHORITY).exists() else "",
        pools=tuple(pools),
        disaggregates=topology.replicas(Role.PREFILL) > 0,
        max_model_len=_max_model_len(topology, model_dir),
    )


def _check_engine(name: str) -> None:
    known = sorted(each.name for each in entry_points(group="workers.engines"))
    if name not in known:
        raise ConfigurationRefused(f"cluster.engine: {name!r} is not one of {', '.join(known)}")
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigurationRefused(
            f"cluster.engine: vllm is not installed; run {install_command('vllm')}, or use the engine simulated"
        )


def _check_images(settings: ImageSettings) -> None:
    """Check that the router can read the file with the certificate authority by which it verifies servers of images.

    Raises:
        ConfigurationRefused: The file cannot be used. The message names the setting as it is called in a topology.
    """
    if settings.fetch_urls and settings.authority:
        from fleet.frontend.images.fetcher import load_trust  # noqa: PLC0415 - most routers fetch no images

        load_trust(settings.authority, field="router.images.authority")


def _prompt_secret(router: RouterSettings) -> str:
    """Return the value of the router's setting `prompt_secret`, the secret for resume tokens.

    If clients have keys and the settings have neither `prompt_secret` nor `tenant_secret`, return a new secret, because a
    router without a secret would give these clients no resume tokens. In all other cases, return the setting unchanged.
    """
    if router.prompt_secret or router.tenant_secret or not any(each.api_key_sha256 for each in router.tenants.values()):
        return router.prompt_secret
    return secrets.token_hex(32)


def check_overflow(topology: Topology, model: ModelName) -> None:
    """Check that the hosted endpoints are for the cluster's model, which is served as `model`.

    Raises:
        ConfigurationRefused: An endpoint is for another model.
    """
    for name in topology.router.overflow:
        if name != model:
            raise ConfigurationRefused(f"router.overflow.{name}: this cluster serves no such model, only {model}")


def _store(topology: Topology, folder: Path) -> StoreSettings:
    return StoreSettings(
        store_id="local",
        listen=(f"unix:{folder / 'kvstore.sock'}",),
        shm_socket=str(folder / "pool.sock"),
        capacity_bytes=topology.store.capacity_mib << 20,
        eviction=topology.store.eviction,
        tiers=topology.store.tiers,
        tracing=topology.tracing,
        metrics_listen=topology.store.metrics_listen,
        metrics_access=topology.metrics_access,
        metrics_tls=topology.metrics_tls,
    )


def _store_process(folder: Path, settings: StoreSettings, limits: LivenessLimits) -> LocalProcess:
    child = ChildProcess(
        name=STORE, start_stage=START_STORE, stop_stage=STOP_STORE, ready_within=READY_WITHIN, stop_within=STOP_WITHIN
    )
    return _process(child, folder, settings, limits)


def worker_process(pool: LocalPool, name: WorkerId, folder: Path) -> LocalProcess:
    """Return the process of a worker, and write its settings file.

    Raises:
        ConfigurationRefused: The settings of the worker are invalid.
        OSError: The file cannot be written.
    """
    child = ChildProcess(
        name=name,
        start_stage=START_WORKERS,
        stop_stage=STOP_WORKERS,
        ready_within=pool.ready_within,
        stop_within=Nanos(WORKER_DRAIN + STOP_WITHIN),
    )
    return _process(child, folder, pool.settings(name), pool.limits)


def _pools(topology: Topology, folder: Path, **fields: Any) -> list[LocalPool]:
    """Return the pools of the topology. `fields` are settings that all workers share."""
    fields["max_model_len"] = _max_model_len(topology, Path(fields["model_dir"]))
    pools = []
    for name, pool in zip(pool_names(topology), topology.pools, strict=True):
        prefix = worker_prefix(PoolName(name))
        pools.append(
            LocalPool(
                name=name,
                role=pool.role,
                workers=tuple(WorkerId(f"{prefix}-{number}") for number in range(pool.replicas)),
                settings=partial(_worker, topology.cluster, pool, folder, fields),
                ready_within=_ready_within(topology.cluster, pool),
                limits=liveness_limits(topology.supervision, name),
            )
        )
    return pools


def _ready_within(cluster: ClusterSection, pool: PoolSection) -> Nanos:
    """Return the time limit for the start of a worker.

    For a simulated engine, the loading time that it simulates is added.
    """
    if cluster.engine != SIMULATED:
        return ENGINE_READY_WITHIN
    return Nanos(SIMULATED_READY_WITHIN + int(pool.simulated.start_ms * MILLISECOND))


def _worker(
    cluster: ClusterSection, pool: PoolSection, folder: Path, fields: Mapping[str, Any], name: WorkerId
) -> WorkerSettings:
    return build_settings(
        WorkerSettings,
        worker_id=name,
        role=pool.role,
        engine=cluster.engine,
        listen=f"unix:{folder / name}.sock",
        control_listen=f"unix:{folder / name}-control.sock",
        kv_paths=cluster.kv_paths,
        block_tokens=cluster.block_tokens,
        max_running=pool.max_running,
        task=cluster.task,
        tool_call_parser=cluster.tool_call_parser,
        reasoning_parser=cluster.reasoning_parser,
        adapters=cluster.adapters,
        adapter_slots=cluster.adapter_slots,
        drain_timeout_ms=WORKER_DRAIN // MILLISECOND,
        metrics_listen=_nth_port(pool.metrics_listen, worker_number(name)),
        vllm=_exact_settings(pool.vllm) if cluster.model == TINY else pool.vllm,
        simulated=pool.simulated,
        watchdog=pool.watchdog,
        **fields,
    )


def worker_number(name: WorkerId) -> int:
    """Return the number at the end of a worker's name."""
    return int(name.rpartition("-")[2])


def _claim_metrics(topology: Topology, held: ExitStack) -> None:
    """Reserve the ports for metrics of the store node, the planner and the workers that the cluster starts with.

    Raises:
        ConfigurationRefused: An address cannot be listened on, has port 0 (which only the planner's may have), or is for a
            store that the cluster does not have. Or the ports of a pool overlap with another address or exceed the last port.
    """
    if topology.store.metrics_listen and KvPath.STORE not in topology.cluster.kv_paths:
        raise ConfigurationRefused(
            "store.metrics_listen: this cluster has no store (cluster.kv_paths does not name it, or the model does not"
            " generate); leave it out"
        )
    check_metrics_ranges(topology)
    listens = [("store.metrics_listen", topology.store.metrics_listen)]
    if topology.planner is not None and not topology.planner.metrics_listen.endswith(":0"):
        listens.append(("planner.metrics_listen", topology.planner.metrics_listen))
    listens += [
        (f"pools[{index}].metrics_listen", _nth_port(pool.metrics_listen, number))
        for index, pool in enumerate(topology.pools)
        for number in range(pool.replicas)
    ]
    for field, listen in listens:
        if listen and claim_address(field, listen, held, "name another port") != listen:
            raise ConfigurationRefused(f"{field}: {listen} does not name the port, which scrapers have to know")


def check_metrics_ranges(topology: Topology) -> None:
    """Check that all workers that a pool may ever have get ports for metrics that no other address of the cluster has.

    Raises:
        ConfigurationRefused: The ports of a pool overlap with another address, or exceed the last port.
    """
    router, planner = topology.router, topology.planner
    taken = [
        ("router.http_listen", router.http_listen, 1),
        ("router.grpc_listen", router.grpc_listen, 1),
        ("router.health_listen", router.health_listen, 1),
        ("router.control_listen", router.control_listen, 1),
        ("router.kserve_listen", router.kserve_listen, 1),
        ("store.metrics_listen", topology.store.metrics_listen, 1),
        ("planner.metrics_listen", "" if planner is None else planner.metrics_listen, 1),
    ]
    for index, pool in enumerate(topology.pools):
        field, most = f"pools[{index}].metrics_listen", max(pool.replicas, topology.cluster.most_workers)
        ports = _port_range(pool.metrics_listen, most)
        range_text = (
            f"{field}: {pool.metrics_listen} is the first of {most} ports, one for each worker that the pool may have"
        )
        if ports and ports[-1] > MOST_PORT:
            raise ConfigurationRefused(
                f"{range_text}; name a port up to {MOST_PORT - most + 1}, or lower cluster.most_workers"
            )
        for other, listen, count in taken:
            both = set(ports).intersection(_port_range(listen, count))
            if both and _share_a_host(pool.metrics_listen, listen):
                raise ConfigurationRefused(
                    f"{range_text}, and {other} uses port {min(both)} too; name a port further away, or lower cluster.most_workers"
                )
        taken.append((field, pool.metrics_listen, most))


def _port_range(listen: str, count: int) -> range:
    """Return `count` consecutive ports from the port of an address on; empty if the address has no port, or port 0."""
    port = listen.rpartition(":")[2]
    return range(int(port), int(port) + count) if port.isdecimal() and int(port) else range(0)


def _share_a_host(one: str, other: str) -> bool:
    """Return True if the hosts of two addresses overlap, so that listeners at them cannot have the same port."""
    hosts = {one.rpartition(":")[0], other.rpartition(":")[0]}
    return len(hosts) == 1 or not hosts.isdisjoint(ALL_INTERFACES)


def _nth_port(listen: str, number: int) -> str:
    """Return the address whose port is `number` above that of `listen`; unchanged if `listen` has no port, or port 0."""
    host, _, port = listen.rpartition(":")
    return f"{host}:{int(port) + number}" if port.isdecimal() and int(port) else listen


def pool_names(topology: Topology) -> list[str]:
    """Return the names of the pools: the role (`decode`), or role and number if several pools have this role (`decode/2`)."""
    roles = [pool.role for pool in topology.pools]
    return [
        f"{role}/{roles[: index + 1].count(role)}" if roles.count(role) > 1 else str(role)
        for index, role in enumerate(roles)
    ]


def _exact_settings(settings: VllmSettings) -> VllmSettings:
    """Return vLLM settings with float32, the precision of the tiny model's weights, unless they name another precision.

    With a lower precision, an answer could depend on the other requests in the batch.
    """
    return structs.replace(settings, dtype="float32") if settings.dtype == "auto" else settings


def liveness_limits(settings: SupervisionSettings, name: str) -> LivenessLimits:
    """Return the liveness limits of the process with this name; all except `ROUTER` and `STORE` have the limits of a worker."""
    silences = {ROUTER: settings.router_silence_seconds, STORE: settings.store_silence_seconds}
    silence = silences.get(name, settings.worker_silence_seconds)
    return LivenessLimits(stopped=nanos(settings.stopped_seconds), silent=nanos(silence))


def _process(child: ChildProcess, folder: Path, settings: Struct, limits: LivenessLimits) -> LocalProcess:
    part = child.name if child.name in (ROUTER, STORE, PLANNER) else "worker"
    path = folder / f"{child.name}.json"
    save(settings, path)
    command = (sys.executable, "-m", "fleet.cli.main", "serve", part, "--config", str(path))
    return LocalProcess(child=child, command=command, limits=limits)


def _max_model_len(topology: Topology, model_dir: Path) -> int:
    """Return the maximum number of tokens of prompt and answer together: the number in the topology, or the model's own limit if that is lower."""
    return min(topology.cluster.max_model_len, _length_limit(model_dir))


def _length_limit(model_dir: Path) -> int:
    """Return the model's maximum context length in tokens; `sys.maxsize` if its configuration does not state it.

    Raises:
        ConfigurationRefused: The model's configuration cannot be read.
    """
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return int(config.get("max_position_embeddings", sys.maxsize))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigurationRefused(f"cluster.model: {path} is not a model's configuration: {error}") from error


def claim_address(
    field: str, listen: str, held: ExitStack, advice: str = "name another port, or 0 for any free one"
) -> str:
    """Return the address with a free port, which stays reserved while `held` is open.

    After `held` is closed, another process may take the port before the process that shall listen there has started. In
    that case, the process that shall listen refuses its settings. For port 0, a port outside the ephemeral range is chosen
    where possible. The system never uses such a port for outgoing connections of other processes, not even while the
    listening process is restarted.

    Args:
        field: The path of the setting, for errors.
        listen: The address as host:port; port 0 stands for any free port.
        held: Keeps the port reserved.
        advice: What the user should do if the port is in use.

    Raises:
        ConfigurationRefused: The address cannot be listened on.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > MOST_PORT:
        raise ConfigurationRefused(f"{field}: {listen!r} is not host:port")
    try:
        probe = held.enter_context(socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET))
        # without this option, connections of an earlier run that are still closing would block the port
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, host.strip("[]"), int(port))
        probe.listen(1)
        return f"{host}:{probe.getsockname()[1]}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationRefused(f"{field}: {listen} is in use; {advice}") from error
        raise ConfigurationRefused(f"{field}: {listen}: {error.strerror or error}") from error


def _bind(probe: socket.socket, host: str, port: int) -> None:
    """Bind the socket to the port. For port 0, choose a free port, outside the ephemeral range if one is found there.

    Raises:
        OSError: The address cannot be listened on.
    """
    if port == 0:
        ephemeral = _first_ephemeral_port()
        for _ in range(PORT_TRIES if ephemeral > 2 * CHOSEN_PORTS else 0):
            chosen = ephemeral - 1 - secrets.randbelow(CHOSEN_PORTS)
            try:
                probe.bind((host, chosen))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return
    probe.bind((host, port))


def _first_ephemeral_port() -> int:
    """Return the first of the ports that the system chooses for outgoing connections; 0 if the system does not state it."""
    try:
        return int(EPHEMERAL_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _picker(settings: EndpointPickerSettings | None, http: str) -> EndpointPickerSettings | None:
    """Return the settings of the endpoint picker; None if it is off.

    By default the picker lets gateways send requests to the router, because the workers of a local cluster speak no HTTP.

    Raises:
        ConfigurationRefused: The settings name no endpoint, and the address `http` does not contain a single IP address.
    """
    if settings is None or settings.router_endpoint or settings.target_port or settings.lease is not None:
        return settings
    try:
        if ip_address(http.rpartition(":")[0].strip("[]")).is_unspecified:
            raise ValueError(http)
        return structs.replace(settings, router_endpoint=http)
    except ValueError as error:
        raise ConfigurationRefused(
            "router.endpoint_picker.router_endpoint: is needed, since router.http_listen names no single IP address; set"
            " the ip:port at which gateways reach the router"
        ) from error


def _dialled(listen: str) -> str:
    """Return the address by which this machine connects to a listener; `listen` may stand for all interfaces."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ALL_INTERFACES else listen


def addresses(plan_: LocalPlan) -> Sequence[str]:
    """Return lines of text that tell a person how to reach the cluster."""
    scheme = "https" if plan_.speaks_tls else "http"
    lines = [f"http  {scheme}://{plan_.http}/v1   model {plan_.model}", f"grpc  {plan_.grpc}"]
    if plan_.authority:
        lines.append(f"ca  {plan_.authority}   for curl --cacert, and fleet generate --ca")
    lines += [f"health  http://{plan_.health}/health, /metrics", f"control  {plan_.control}"]
    if plan_.kserve:
        lines.append(f"kserve  {plan_.kserve}")
    return lines
