"""A topology as processes: their settings, their addresses, and the order in which they come and go.

Rules:

1. Processes of this machine talk over Unix sockets in the runtime folder; only the router's public addresses are TCP.
2. A public port 0 is replaced by a free one here and not in the router, so that a router that is started again has the same
   address, and workers can be told of it before it runs.
3. What can be refused without starting anything is refused here.
"""

import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from fleet.config import SIMULATED, TINY, ClusterSection, PoolSection, StorePlace, Topology, build_settings, save
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from fleet.local.liveness import LivenessLimits
from fleet.local.processes import LocalProcess
from fleet.local.supervision import ChildProcess
from fleet.membership.settings import SupervisionSettings
from kvstore.clock import nanos
from kvstore.net.addresses import unix_path
from kvstore.security.credentials import Credentials
from kvstore.service.settings import StoreSettings
from workers.settings import VllmSettings, WorkerSettings

ENGINE_READY_WITHIN = Nanos(1800 * SECOND)
"""vLLM takes 20 s on two idle cores, and ten minutes and more for a large model from a slow disk."""

SIMULATED_READY_WITHIN = Nanos(30 * SECOND)
READY_WITHIN = Nanos(30 * SECOND)  # of a router or store: a second, unless the machine is very busy
WORKER_DRAIN = Nanos(5 * SECOND)  # on Ctrl-C people wait; the router has drained before
STOP_WITHIN = Nanos(20 * SECOND)  # vLLM takes a few seconds to end its processes

START_STORE, START_ROUTER, START_WORKERS = range(3)  # a router that cannot start must see no worker register elsewhere
STOP_ROUTER, STOP_WORKERS, STOP_STORE = range(3)

ANY_PORT = "127.0.0.1:0"
"""The default address of health and metrics: a free port that only this machine reaches."""

ROUTER = "router"
STORE = "kvstore"


class LocalPool(Struct, frozen=True, kw_only=True):
    """Workers that are alike."""

    name: str
    """The role; with a number where several pools have it."""

    role: Role
    workers: tuple[WorkerId, ...]
    settings: Callable[[WorkerId], WorkerSettings]
    """Of a worker by that name. Raises ConfigurationRefused, of a pool without workers that can have none."""

    ready_within: Nanos
    limits: LivenessLimits = LivenessLimits()


class LocalPlan(Struct, frozen=True, kw_only=True):
    """What to run, and where it will be reached."""

    processes: tuple[LocalProcess, ...]
    model: ModelName
    model_dir: Path
    http: str  # host:port
    grpc: str  # host:port
    health: str  # host:port of health and metrics alone
    control: str  # host:port or unix:/path: of the registry and `fleet.v1.Cluster`
    control_credentials: Credentials  # that callers of the control port need, where it is no Unix socket
    kserve: str  # host:port; empty: not served
    pools: tuple[LocalPool, ...]
    disaggregates: bool  # whether there are prefill workers

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(worker for pool in self.pools for worker in pool.workers)


def plan(topology: Topology, *, folder: Path, model_dir: Path, model: ModelName) -> LocalPlan:
    """Settle a topology, and write the settings files of its processes.

    Args:
        topology: What is wanted.
        folder: The runtime folder.
        model_dir: Of the model to serve.
        model: The name to serve it under.

    Raises:
        ConfigurationRefused: The engine is not installed; a public address is in use, or no address; the model folder
            has no readable configuration.
    """
    _check_engine(topology.cluster.engine)
    with ExitStack() as held:  # all at once, or two could be the same
        http = claim_address("router.http_listen", topology.router.http_listen, held)
        grpc = claim_address("router.grpc_listen", topology.router.grpc_listen, held)
        health = claim_address("router.health_listen", topology.router.health_listen or ANY_PORT, held)
        control = topology.router.control_listen or f"unix:{folder / 'control.sock'}"
        if not unix_path(control):
            control = claim_address("router.control_listen", control, held)
        kserve = topology.router.kserve_listen and claim_address(
            "router.kserve_listen", topology.router.kserve_listen, held
        )
    node = _store(topology, folder) if KvPath.STORE in topology.cluster.kv_paths else None
    is_embedded = topology.store.place is StorePlace.WORKER
    store = node.listen[0] if node is not None else ""
    processes = []
    if node is not None and not is_embedded:
        processes.append(_store_process(folder, node, liveness_limits(topology.supervision, STORE)))
    router = structs.replace(
        topology.router,
        http_listen=http,
        grpc_listen=grpc,
        health_listen=health,
        control_listen=control,
        kserve_listen=kserve,
        store=store,
        models={model: str(model_dir)},
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
    )
    processes += [worker_process(pool, worker, folder) for pool in pools for worker in pool.workers]
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
        pools=tuple(pools),
        disaggregates=topology.replicas(Role.PREFILL) > 0,
    )


def _check_engine(name: str) -> None:
    known = sorted(each.name for each in entry_points(group="workers.engines"))
    if name not in known:
        raise ConfigurationRefused(f"cluster.engine: {name!r} is not one of {', '.join(known)}")
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigurationRefused(
            "cluster.engine: vllm is not installed; run `make install`, or use the engine simulated"
        )


def _store(topology: Topology, folder: Path) -> StoreSettings:
    return StoreSettings(
        store_id="local",
        listen=(f"unix:{folder / 'kvstore.sock'}",),
        shm_socket=str(folder / "pool.sock"),
        capacity_bytes=topology.store.capacity_mib << 20,
        eviction=topology.store.eviction,
        tiers=topology.store.tiers,
    )


def _store_process(folder: Path, settings: StoreSettings, limits: LivenessLimits) -> LocalProcess:
    child = ChildProcess(
        name=STORE, start_stage=START_STORE, stop_stage=STOP_STORE, ready_within=READY_WITHIN, stop_within=STOP_WITHIN
    )
    return _process(child, folder, settings, limits)


def worker_process(pool: LocalPool, name: WorkerId, folder: Path) -> LocalProcess:
    """A worker of a pool, by that name; its settings file is written."""
    child = ChildProcess(
        name=name,
        start_stage=START_WORKERS,
        stop_stage=STOP_WORKERS,
        ready_within=pool.ready_within,
        stop_within=Nanos(WORKER_DRAIN + STOP_WITHIN),
    )
    return _process(child, folder, pool.settings(name), pool.limits)


def _pools(topology: Topology, folder: Path, **fields: Any) -> list[LocalPool]:
    """`fields`: settings that all workers have alike."""
    fields["max_model_len"] = min(topology.cluster.max_model_len, _length_limit(Path(fields["model_dir"])))
    numbers = dict.fromkeys((pool.role for pool in topology.pools), 0)
    pools = []
    for name, pool in zip(pool_names(topology), topology.pools, strict=True):
        first = numbers[pool.role]
        numbers[pool.role] += pool.replicas
        pools.append(
            LocalPool(
                name=name,
                role=pool.role,
                workers=tuple(WorkerId(f"{pool.role}-{number}") for number in range(first, numbers[pool.role])),
                settings=partial(_worker, topology.cluster, pool, folder, fields),
                ready_within=SIMULATED_READY_WITHIN if topology.cluster.engine == SIMULATED else ENGINE_READY_WITHIN,
                limits=liveness_limits(topology.supervision, name),
            )
        )
    return pools


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
        adapters=cluster.adapters,
        adapter_slots=cluster.adapter_slots,
        drain_timeout_ms=WORKER_DRAIN // MILLISECOND,
        vllm=_exact_settings(pool.vllm) if cluster.model == TINY else pool.vllm,
        simulated=pool.simulated,
        watchdog=pool.watchdog,
        **fields,
    )


def pool_names(topology: Topology) -> list[str]:
    """Of the pools, in their order: the role, with a number behind it where several have the same one."""
    roles = [pool.role for pool in topology.pools]
    return [
        f"{role}/{roles[: index + 1].count(role)}" if roles.count(role) > 1 else str(role)
        for index, role in enumerate(roles)
    ]


def _exact_settings(settings: VllmSettings) -> VllmSettings:
    """The tiny model in its own precision, which "auto" would halve: its answers are the same whatever the batch."""
    return structs.replace(settings, dtype="float32") if settings.dtype == "auto" else settings


def liveness_limits(settings: SupervisionSettings, name: str) -> LivenessLimits:
    """Return how long a process of this name may not respond; any name but the router's and the store's is a worker's."""
    silences = {ROUTER: settings.router_silence_seconds, STORE: settings.store_silence_seconds}
    silence = silences.get(name, settings.worker_silence_seconds)
    return LivenessLimits(stopped=nanos(settings.stopped_seconds), silent=nanos(silence))


def _process(child: ChildProcess, folder: Path, settings: Struct, limits: LivenessLimits) -> LocalProcess:
    part = child.name if child.name in (ROUTER, STORE) else "worker"
    path = folder / f"{child.name}.json"
    save(settings, path)
    command = (sys.executable, "-m", "fleet.cli.main", "serve", part, "--config", str(path))
    return LocalProcess(child=child, command=command, limits=limits)


def _length_limit(model_dir: Path) -> int:
    """Positions that the model was made for; as many as one likes where it does not say."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
        return int(config.get("max_position_embeddings", sys.maxsize))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigurationRefused(f"cluster.model: {path} is not a model's configuration: {error}") from error


def claim_address(field: str, listen: str, held: ExitStack) -> str:
    """The address with a definite port that nobody listens on, and nobody can while `held` is open.

    Somebody may still take it between that and the router's start; then the router refuses its settings.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationRefused(f"{field}: {listen!r} is not host:port")
    try:
        probe = held.enter_context(socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may linger
        probe.bind((host.strip("[]"), int(port)))
        probe.listen(1)
        return f"{host}:{probe.getsockname()[1]}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationRefused(
                f"{field}: {listen} is in use; name another port, or 0 for any free one"
            ) from error
        raise ConfigurationRefused(f"{field}: {listen}: {os.strerror(error.errno or 0)}") from error


def _dialled(listen: str) -> str:
    """The address to connect to, from this machine."""
    host, _, port = listen.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]") else listen  # noqa: S104 - compared, not bound


def addresses(plan_: LocalPlan) -> Sequence[str]:
    """Lines for a person: how the cluster is reached."""
    lines = [f"http  http://{plan_.http}/v1   model {plan_.model}", f"grpc  {plan_.grpc}"]
    lines += [f"health  http://{plan_.health}/health, /metrics", f"control  {plan_.control}"]
    if plan_.kserve:
        lines.append(f"kserve  {plan_.kserve}")
    return lines
