"""`fleet down`: stops a cluster of `fleet up` on this machine."""

import argparse
import os
import signal
import sys
import time
from contextlib import suppress

from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.console.seconds import seconds
from fleet.cli.local.running import add_local_address, grpc_address, local_cluster
from fleet.core.clock import SECOND
from fleet.core.system_clock import SystemClock

POLL_SECONDS = 0.1


def configure(parser: argparse.ArgumentParser) -> None:
    add_local_address(parser)
    parser.add_argument(
        "--within",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="longest wait until everything has ended (default: 120)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Return the exit status: 0 if the cluster has ended, 1 if it has not ended in time."""
    cluster = local_cluster(arguments.address)
    supervisor, address = cluster.supervisor(), grpc_address(cluster)
    clock = SystemClock()
    deadline = clock.now() + round(arguments.within * SECOND)
    if supervisor is not None:
        with suppress(ProcessLookupError):  # the supervisor has just ended
            os.kill(supervisor.pid, signal.SIGTERM)
    while cluster.folder.exists() and not cluster.killed:
        if clock.now() > deadline:
            print(f"fleet: {address}: still stops after {arguments.within:g} s; fleet logs shows why", file=sys.stderr)
            return FAILED
        time.sleep(POLL_SECONDS)
    print(f"stopped {address}")
    return DONE
