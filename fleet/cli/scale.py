"""`fleet scale`: shows and changes the sizes of pools, on this machine, on Kubernetes, or at another orchestrator."""

import argparse
import asyncio
import os
import shlex
import sys
import threading
from pathlib import Path

from fleet.cli.console.address import router_address
from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.console.seconds import seconds
from fleet.cli.console.stopping import INTERRUPT_SIGNALS
from fleet.cli.local.pools import pool_line, table, unfinished
from fleet.config import load
from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import SystemClock, unix_milliseconds
from fleet.local.runs import LocalRun, local_plans, local_runs, run_at
from fleet.planner.connectors.open import connector_of
from fleet.planner.execution import PlanOutcome, forbidden
from fleet.planner.messages import MOST_REPLICAS, Observation, Plan, PlanId, PlanWriter, PoolName
from fleet.planner.ports import ConnectorError, PlanConnector, PoolReleaser
from fleet.planner.server import carry_out
from fleet.planner.settings import FolderTarget, KubernetesTarget, PlanConnectorSettings, Target


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pools",
        nargs="*",
        type=_desired_size,
        metavar="POOL=N",
        help="number of workers for a pool; without any: show all pools",
    )
    parser.add_argument(
        "--release",
        action="append",
        default=[],
        type=PoolName,
        metavar="POOL",
        help="give a pool back to the planner: it keeps its size until the planner changes it",
    )
    parser.add_argument(
        "--within",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="time limit, after which workers that have not come are given up (default: 600)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--address",
        type=router_address,
        metavar="HOST:PORT",
        help="gRPC address of the cluster on this machine, if several run",
    )
    where.add_argument(
        "--plans", metavar="DIR", help="plan folder of the cluster on this machine, if several run (see its ready file)"
    )
    where.add_argument(
        "--deployment", metavar="[NAMESPACE/]NAME", help="a DisaggDeployment on Kubernetes instead of this machine"
    )
    where.add_argument(
        "--connector", type=Path, metavar="FILE", help="connector settings: a folder, keys in etcd, or Kubernetes"
    )
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        default=str(Path("~/.kube/config").expanduser()),
        help="with --deployment (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Return the exit status: 0 if the pools that the command line names have reached their sizes, or if it names none; 1 if
    they have not, if the wait was interrupted, or if the orchestrator does not answer.
    """
    wanted = dict(arguments.pools)
    if len(wanted) != len(arguments.pools):
        raise ConfigurationRefused("POOL=N: a pool is named twice")
    if arguments.release and wanted:
        raise ConfigurationRefused("--release: cannot go with POOL=N, because a size that you set pins the pool")
    try:
        if arguments.release:
            asyncio.run(_release(target_of(arguments), arguments.release))
        return asyncio.run(_scale(target_of(arguments), wanted, arguments.within, _place(arguments)))
    except ConnectorError as error:
        _say(str(error))
    except asyncio.CancelledError:
        _say(f"stopped waiting; the plan stays: fleet scale{_place(arguments)} shows the progress")
    return FAILED


async def _scale(target: Target, wanted: dict[PoolName, int], within_seconds: float, place: str) -> int:
    this = asyncio.current_task()
    assert this is not None
    if wanted and threading.current_thread() is threading.main_thread():  # only the main thread may handle signals
        for number in INTERRUPT_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    async with connector_of(target, PlanWriter.PERSON) as connector:
        before = await connector.observe()
        outcome, seen = PlanOutcome.SETTLED, before
        if wanted:
            outcome, seen = await _change(connector, wanted, before, within_seconds)
    for line in table(seen):
        print(line)
    if outcome is PlanOutcome.SETTLED:
        for line in unfinished(seen, place):
            _say(line)
    return DONE if outcome is PlanOutcome.SETTLED else FAILED


async def _release(target: Target, pools: list[PoolName]) -> None:
    async with connector_of(target, PlanWriter.PLANNER) as connector:
        if not isinstance(connector, PoolReleaser):
            raise ConfigurationRefused("--release: this connector cannot give pools back to a planner")
        await connector.release(pools)


async def _change(
    connector: PlanConnector, wanted: dict[PoolName, int], before: Observation, within_seconds: float
) -> tuple[PlanOutcome, Observation]:
    plan = Plan(
        id=PlanId(f"scale-{unix_milliseconds()}-{os.getpid()}"),
        replicas=wanted,
        within=Nanos(round(within_seconds * SECOND)),
    )

    forbidden_part: Plan | None = None

    def tell(seen: Observation) -> None:
        nonlocal forbidden_part
        forbidden_part = forbidden(plan, seen)
        for each in seen.pools:
            if each.name in wanted and not each.settled:
                _say(pool_line(each))

    outcome, seen = await carry_out(
        connector, plan, before, SystemClock(), tell, lambda cause: _say(f"{cause}; trying again")
    )
    if forbidden_part is not None and outcome is not PlanOutcome.SETTLED:
        named = " ".join(f"{name}={count}" for name, count in forbidden_part.replicas.items())
        kept = "took back" if outcome is PlanOutcome.ROLLED_BACK else "did not change"
        _say(f"the bounds of the orchestrator do not allow {named}; fleet scale {kept} the written numbers")
        return outcome, seen
    match outcome:
        case PlanOutcome.ROLLED_BACK:
            _say("time limit reached; workers that have not come are given up")
        case PlanOutcome.UNSETTLED:
            _say("time limit reached; the change goes on by itself")
        case PlanOutcome.SETTLED:
            pass
    return outcome, seen


def target_of(arguments: argparse.Namespace) -> Target:
    if arguments.connector is not None:
        return load(arguments.connector, PlanConnectorSettings).connector
    if arguments.deployment is not None:
        namespace, slash, name = arguments.deployment.rpartition("/")
        if not name or (slash and not namespace):
            raise ConfigurationRefused(f"--deployment: {arguments.deployment!r} is not [NAMESPACE/]NAME")
        return KubernetesTarget(deployment=name, namespace=namespace or "default", kubeconfig=arguments.kubeconfig)
    if arguments.address is not None:
        return FolderTarget(folder=str(_local_at(arguments.address)))
    return FolderTarget(folder=arguments.plans or str(_only_local()))


def _place(arguments: argparse.Namespace) -> str:
    """Return the options of this command line that say where the pools are, as text for another command."""
    given = {
        "--address": arguments.address,
        "--plans": arguments.plans,
        "--deployment": arguments.deployment,
        "--connector": arguments.connector,
    }
    return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given.items() if value is not None)


def _only_local() -> Path:
    found = local_plans()
    if not found:
        killed = [str(run.folder) for run in local_runs() if run.killed]
        raise ConfigurationRefused(
            f"no cluster of fleet up runs on this machine: that of {', '.join(killed)} was killed; fleet up clears up and starts another"
            if killed
            else "no cluster of fleet up runs on this machine; fleet up starts one, --deployment names one on Kubernetes, --connector any other"
        )
    if len(found) > 1:
        raise ConfigurationRefused(
            "several clusters run on this machine: --address or --plans names one of "
            + ", ".join(f"{_grpc_address(plans)} ({plans})" for plans in found)
        )
    return found[0]


def _local_at(address: str) -> Path:
    run = run_at(address)
    if run is None or run.killed:
        raise ConfigurationRefused(
            f"--address: no cluster of fleet up on this machine has the router {address}; --deployment names a cluster on"
            " Kubernetes, --connector any other"
        )
    return run.plans


def _grpc_address(plans: Path) -> str:
    """Return the router's gRPC address of the cluster to which this plan folder belongs; ``?`` if it cannot be read."""
    addresses = LocalRun(plans.parent).addresses()
    return (addresses and addresses.grpc_listen) or "?"


def _say(line: str) -> None:
    print(f"fleet: {line}", file=sys.stderr, flush=True)


def _desired_size(text: str) -> tuple[PoolName, int]:
    name, _, number = text.rpartition("=")
    if not name or not number.isdecimal() or int(number) > MOST_REPLICAS:
        raise argparse.ArgumentTypeError(f"{text!r} is not POOL=N, with N from 0 to {MOST_REPLICAS}")
    return PoolName(name), int(number)
