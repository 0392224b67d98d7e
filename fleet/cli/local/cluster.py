"""Local cluster: `with_cluster` starts a cluster, runs the work of `fleet up` or of its check, and stops the cluster."""

import asyncio
import fcntl
import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import trustme
from msgspec import Struct, structs

from fleet.app.hub import fetch_topology_model
from fleet.cli.console.files import whole_file
from fleet.client import AsyncClient, ClientTls, FleetError
from fleet.config import child_environment, default_cache_dir
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock
from fleet.local.pools import LocalPools, drain, router_cache_worth
from fleet.local.processes import ClusterFailed, LocalProcesses
from fleet.local.runs import AUTHORITY, PARTS, local_runs, note_supervisor, runtime_folder
from fleet.local.settings import (
    SIMULATED,
    TINY,
    Topology,
    adapter_folders,
    for_task,
    model_folder,
    served_name,
    with_chat_template,
)
from fleet.local.tiny_model import build_tiny_model
from fleet.local.topology import LocalPlan, plan
from fleet.net.control.access import load_control_access
from kvstore.clock import nanos
from kvstore.net.addresses import unix_path
from kvstore.security.credentials import Credentials
from kvstore.security.metrics_access import MetricsTls

CERTIFICATE, KEY = "router.pem", "router.key"  # names of the files of a certificate that `fleet up` makes
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
WORKERS_VISIBLE_SECONDS = 30.0  # time limit until the router knows all ready workers; usually 1 s is enough
STATUS_POLL_SECONDS = 0.05


class LocalCluster(Struct, frozen=True):
    """A local cluster that is ready: its addresses and its processes."""

    plan: LocalPlan
    pids: dict[str, int]
    pools: LocalPools

    def write_ready_file(self, path: Path) -> None:
        """Write the addresses and process ids as JSON; readers see the whole file or none.

        Raises:
            ConfigurationRefused: The file cannot be written.
        """
        content = {
            "http": f"{'https' if self.plan.speaks_tls else 'http'}://{self.plan.http}",
            "grpc": self.plan.grpc,
            "control": self.plan.control,
            "health": f"http://{self.plan.health}",
            **({"kserve": self.plan.kserve} if self.plan.kserve else {}),
            **({"ca": self.plan.authority} if self.plan.authority else {}),
            "model": self.plan.model,
            "plans": str(self.pools.folder),
            "parts": str(self.pools.folder.parent / PARTS),
            "pids": {"supervisor": os.getpid(), **self.pids},
        }
        with whole_file(path, "--ready-file") as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")


class LocalClusterOptions(Struct, frozen=True, kw_only=True):
    """Folders of a local cluster: the folder that relative paths of the topology start from, and the folder for logs."""

    relative_to: Path  # folder from which relative paths of the model, the chat template and the LoRA adapters start
    logs: Path | None  # folder for the logs; None: they are removed with the cluster


async def with_cluster(
    topology: Topology, surroundings: LocalClusterOptions, body: Callable[[LocalCluster], Awaitable[None]]
) -> bool:
    """Start a cluster, run `body` when it is ready, and stop the cluster after that or at a signal.

    Args:
        topology: The topology of the cluster.
        surroundings: The folders of the cluster.
        body: The work to do with the cluster.

    Returns:
        True if `body` returned; False if a signal stopped it.

    Raises:
        ConfigurationRefused: Something in the topology cannot be used.
        ClusterFailed: The cluster has not become ready, or `body` has raised this error.
    """
    simulated = topology.cluster.engine == SIMULATED
    tiny = Path()
    if topology.cluster.model == TINY:
        try:
            tiny = build_tiny_model(default_cache_dir(), tokenizer_only=simulated)
        except OSError as error:
            raise ConfigurationRefused(f"the tiny model cannot be built in {default_cache_dir()}: {error}") from error
    topology = await fetch_topology_model(topology, surroundings.relative_to, SystemClock())
    folder = model_folder(topology.cluster, tiny, surroundings.relative_to)
    topology = for_task(topology, folder)
    adapters = adapter_folders(topology.cluster, surroundings.relative_to)
    topology = structs.replace(topology, cluster=structs.replace(topology.cluster, adapters=adapters))
    _clean_up_killed_runs()
    with _log_folder(surroundings.logs) as logs, runtime_folder() as runtime:
        note_supervisor(runtime)
        topology = with_certificate(topology, runtime)
        model = served_name(topology.cluster, folder)
        folder = with_chat_template(folder, topology.cluster.chat_template, surroundings.relative_to, runtime)
        planned = plan(topology, folder=runtime, model_dir=folder, model=model)
        if planned.max_model_len < topology.cluster.max_model_len:
            wanted = topology.cluster.max_model_len
            say(f"max_model_len: {wanted} is more than the model has; requests may have {planned.max_model_len} tokens")
        processes = LocalProcesses(
            planned.processes,
            folder=runtime,
            logs=logs or runtime,
            environment=child_environment(),
            clock=SystemClock(),
            say=say,
            drain=drain,
            longest_pause=nanos(topology.supervision.longest_pause_seconds),
        )

        async def when_ready() -> None:
            await _wait_until_serving(planned)
            credentials = Credentials() if unix_path(planned.control) else planned.control_credentials
            access = load_control_access("router.control_credentials", credentials)
            ask = partial(router_cache_worth, planned.control, access)
            pools = LocalPools(topology, planned, processes, runtime, say, ask)
            await body(LocalCluster(planned, processes.pids, pools))

        return await hold(processes, when_ready)


def _clean_up_killed_runs() -> None:
    """Clean up after killed runs, because their processes may still use ports and memory."""
    for run in local_runs():
        ended = run.clear() if run.killed else None
        if ended is not None:
            say(f"cleaned up after a killed cluster: {run.folder}" + (f", {ended} processes" if ended else ""))


async def hold(processes: LocalProcesses, when_ready: Callable[[], Awaitable[None]]) -> bool:
    """Run `LocalProcesses.hold`, and stop the processes at SIGINT, SIGTERM or SIGHUP. Return what `LocalProcesses.hold` returns."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal, processes)
    try:
        return await processes.hold(when_ready)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


@contextmanager
def _log_folder(wanted: Path | None) -> Iterator[Path | None]:
    """Make the folder `wanted` of `--log-dir`, keep other clusters from it while the context is open, and yield it.

    If `wanted` is None, make no folder, and yield None.

    Logs of two clusters in one folder would have the same names, so each file would contain lines of both clusters. The
    cleanup after one cluster could also end processes of the other cluster.

    Raises:
        ConfigurationRefused: The folder cannot be made, or another cluster keeps its logs there.
    """
    if wanted is None:
        yield None
        return
    with ExitStack() as held:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
            # Python closes the descriptor on exec, so child processes do not inherit the lock.
            descriptor = os.open(wanted, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
        except OSError as error:
            raise ConfigurationRefused(f"--log-dir: {wanted}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigurationRefused(
                f"--log-dir: {wanted}: another cluster of fleet up keeps its logs there; name another folder, or stop that cluster with fleet down"
            ) from error
        except OSError:  # a file system without locks on folders, such as NFS
            pass
        yield wanted


async def _wait_until_serving(planned: LocalPlan) -> None:
    """Wait until the router reports every worker as serving.

    Raises:
        ClusterFailed: The router does not answer, or does not see all workers in time.
    """
    missing = set(planned.workers)
    try:
        async with asyncio.timeout(WORKERS_VISIBLE_SECONDS), cluster_client(planned) as client:
            while missing:
                status = await client.status()
                workers = [worker for pool in status.pools for worker in pool.workers]
                missing = set(planned.workers) - {worker.worker_id for worker in workers if worker.state == "serving"}
                await asyncio.sleep(STATUS_POLL_SECONDS)
    except TimeoutError as error:
        names = ", ".join(sorted(missing))
        raise ClusterFailed(f"the router does not see {names} within {WORKERS_VISIBLE_SECONDS:.0f} s") from error
    except FleetError as error:
        raise ClusterFailed(f"the router does not answer: {error.message}") from error


def cluster_client(planned: LocalPlan, api_key: str = "") -> AsyncClient:
    """Return a client for a planned cluster that also reaches its control port."""
    return AsyncClient(
        planned.grpc,
        api_key=api_key,
        tls=ClientTls(authority=planned.authority) if planned.speaks_tls else None,
        control=planned.control,
        control_credentials=planned.control_credentials,
    )


def _on_signal(processes: LocalProcesses) -> None:
    say("stopping; once more to stop at once")
    processes.request_stop()


def say(line: str) -> None:
    """Print a message for the person at the terminal. It may have several lines, such as the end of a log."""
    print(f"fleet: {line}", file=sys.stderr, flush=True)


def with_certificate(topology: Topology, folder: Path) -> Topology:
    """Return the topology with the certificate that `cluster.tls` demands, and write its files into the runtime folder.

    If `cluster.tls` is not set, return the topology unchanged. The authority's key is not kept, so nobody can sign another
    certificate with it. The certificate is valid for this machine's loopback addresses, and for the hosts in the listen
    addresses of the router and of metrics. If such an address stands for all interfaces, the certificate is also valid for
    the machine's name.
    """
    if not topology.cluster.tls:
        return topology
    router = topology.router
    planner = topology.planner.metrics_listen if topology.planner is not None else ""
    scraped = (topology.store.metrics_listen, planner, *(pool.metrics_listen for pool in topology.pools))
    listens = (router.http_listen, router.grpc_listen, router.kserve_listen, *scraped)
    hosts = [listen.rpartition(":")[0].strip("[]") for listen in listens if listen]
    names = {*LOOPBACK_NAMES, *(host for host in hosts if not _is_any(host))}
    if any(_is_any(host) for host in hosts):
        names.add(socket.gethostname())
    authority = trustme.CA()
    issued = authority.issue_cert(*sorted(names))
    _write_private(folder / AUTHORITY, authority.cert_pem.bytes())
    _write_private(folder / CERTIFICATE, b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    _write_private(folder / KEY, issued.private_key_pem.bytes())
    files = {"certificate": str(folder / CERTIFICATE), "key": str(folder / KEY)}
    tls = structs.replace(router.tls, **files)
    metrics_tls = topology.metrics_tls if topology.metrics_tls.certificate else MetricsTls(**files)
    cluster = structs.replace(topology.cluster, tls=False)  # `tls` is set to False, because the certificate exists now
    router = structs.replace(router, tls=tls)
    return structs.replace(topology, cluster=cluster, router=router, metrics_tls=metrics_tls)


def _is_any(host: str) -> bool:
    """Return True if a host in a listen address stands for all interfaces of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123 - with a mode
        file.write(content)
