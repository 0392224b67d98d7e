"""Running cluster: finds the cluster of `fleet up` on this machine to which a command refers."""

import argparse

from fleet.cli.console.address import router_address
from fleet.core.errors import ConfigurationRefused
from fleet.local.runs import LocalRun, local_runs


def add_local_address(parser: argparse.ArgumentParser) -> None:
    """Add the option `--address`, which chooses one of several clusters on this machine."""
    parser.add_argument(
        "--address",
        type=router_address,
        metavar="HOST:PORT",
        help="gRPC address of the cluster on this machine, if several run",
    )


def local_cluster(address: str | None, *, killed: bool = False) -> LocalRun:
    """Return the cluster whose router has this address, or else the only cluster on this machine.

    The cluster may still be starting.

    Args:
        address: Address of the router; None: exactly one cluster must run.
        killed: If true, also accept clusters that were killed and not cleaned up yet.

    Raises:
        ConfigurationRefused: There is no such cluster, or there are several.
    """
    found = [run for run in local_runs() if run.supervisor() is not None or (killed and run.killed)]
    if address is not None:
        found = [run for run in found if run.answers_at(address)]
    alive = [run for run in found if not run.killed] or found
    if len(alive) > 1:
        places = ", ".join(f"{grpc_address(run)} ({run.folder})" for run in alive)
        raise ConfigurationRefused(f"several clusters run on this machine: --address names one of {places}")
    if not alive:
        place = "no cluster of fleet up runs on this machine"
        raise ConfigurationRefused(place if address is None else f"--address: {place} with the router {address}")
    return alive[0]


def grpc_address(run: LocalRun) -> str:
    """Return the address of a cluster's router for clients; ``?`` if it cannot be read."""
    addresses = run.addresses()
    return (addresses and addresses.grpc_listen) or "?"
