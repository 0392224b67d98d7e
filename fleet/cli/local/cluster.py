"""A local cluster around a piece of work: `fleet up` and its check both are `with_cluster` and something to do meanwhile."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct, structs

from fleet.app.hub import fetch_topology_model
from fleet.cli.console.files import whole_file
from fleet.client import AsyncClient, FleetError
from fleet.config import (
    SIMULATED,
    TINY,
    Topology,
    adapter_folders,
    child_environment,
    default_cache_dir,
    model_folder,
    served_name,
)
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock
from fleet.local.pools import LocalPools, drain
from fleet.local.processes import ClusterFailed, LocalProcesses
from fleet.local.runs import PARTS, local_runs, runtime_folder
from fleet.local.tiny_model import build_tiny_model
from fleet.local.topology import LocalPlan, plan
from kvstore.clock import nanos

WORKERS_VISIBLE_SECONDS = (
    30.0  # seconds from the last worker's readiness to the router's knowing it; less than one is usual
)
STATUS_POLL_SECONDS = 0.05  # seconds


class LocalCluster(Struct, frozen=True):
    """A cluster that is ready."""

    plan: LocalPlan
    pids: dict[str, int]
    pools: LocalPools

    def write_ready_file(self, path: Path) -> None:
        """Say as JSON how the cluster is reached and who it is; whoever sees the file sees all of it.

        Raises:
            ConfigurationRefused: It cannot be written there.
        """
        content = {
            "http": f"http://{self.plan.http}",
            "grpc": self.plan.grpc,
            "control": self.plan.control,
            "health": f"http://{self.plan.health}",
            **({"kserve": self.plan.kserve} if self.plan.kserve else {}),
            "model": self.plan.model,
            "plans": str(self.pools.folder),
            "parts": str(self.pools.folder.parent / PARTS),
            "pids": {"supervisor": os.getpid(), **self.pids},
        }
        with whole_file(path, "--ready-file") as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")


class LocalClusterOptions(Struct, frozen=True, kw_only=True):
    """Where a cluster runs."""

    relative_to: Path  # folder that a relative model path starts from
    logs: Path | None  # folder to keep the children's logs in; None: they go with the cluster


async def with_cluster(
    topology: Topology, surroundings: LocalClusterOptions, body: Callable[[LocalCluster], Awaitable[None]]
) -> bool:
    """Start a cluster, run `body` when it is ready, stop the cluster when that returns or a signal asks to.

    Args:
        topology: What to start.
        surroundings: Where to run it.
        body: What to do with the cluster.

    Returns:
        Whether `body` came to its end; False when a signal stopped it.

    Raises:
        ConfigurationRefused: Something in the topology cannot be obeyed.
        ClusterFailed: A process failed before the cluster was ready.
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
    adapters = adapter_folders(topology.cluster, surroundings.relative_to)
    topology = structs.replace(topology, cluster=structs.replace(topology.cluster, adapters=adapters))
    _clean_up_killed_runs()
    with runtime_folder() as runtime:
        planned = plan(topology, folder=runtime, model_dir=folder, model=served_name(topology.cluster, folder))
        processes = LocalProcesses(
            planned.processes,
            folder=runtime,
            logs=_log_folder(surroundings.logs) or runtime,
            environment=child_environment(),
            clock=SystemClock(),
            say=say,
            drain=drain,
            longest_pause=nanos(topology.supervision.longest_pause_seconds),
        )

        async def when_ready() -> None:
            await _wait_until_serving(planned)
            pools = LocalPools(topology, planned, processes, runtime, say)
            await body(LocalCluster(planned, processes.pids, pools))

        return await hold(processes, when_ready)


def _clean_up_killed_runs() -> None:
    """Before ports and memory are asked for that they may hold."""
    for run in local_runs():
        ended = run.clear() if run.killed else None
        if ended is not None:
            say(f"cleared up after a cluster that was killed: {run.folder}" + (f", {ended} processes" if ended else ""))


async def hold(processes: LocalProcesses, when_ready: Callable[[], Awaitable[None]]) -> bool:
    """`LocalProcesses.hold`, ended by the signals that ask a command to stop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _on_signal, processes)
    try:
        return await processes.hold(when_ready)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _log_folder(wanted: Path | None) -> Path | None:
    if wanted is not None:
        try:
            wanted.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationRefused(f"--log-dir: {wanted}: {error.strerror}") from error
    return wanted


async def _wait_until_serving(planned: LocalPlan) -> None:
    """Return when the router counts every worker as serving."""
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


def cluster_client(planned: LocalPlan) -> AsyncClient:
    """Return a client of a planned cluster's router, which reaches its control port."""
    return AsyncClient(planned.grpc, control=planned.control, control_credentials=planned.control_credentials)


def _on_signal(processes: LocalProcesses) -> None:
    say("stopping; once more to stop at once")
    processes.request_stop()


def say(line: str) -> None:
    """One line (or a log's tail) for the person at the terminal."""
    print(f"fleet: {line}", file=sys.stderr, flush=True)
