"""Which cluster a command is for, and what a person is told when it does not answer."""

import argparse

from fleet.adapters.local_runs import run_at
from fleet.client import DeadlineExceeded, FleetError, Unavailable
from fleet.config import Topology

MOST_PORT = 65535

CAUSES = {
    "Connection refused": "nobody listens there",
    "No such file or directory": "nobody listens there",
    "lookup failed": "there is no host of that name",
    "before receiving SETTINGS frame": "whoever listens there does not answer",
    "http1.x server": "that is an HTTP address, and no router's gRPC address",
}
"""What gRPC's words mean, by what they contain."""


def add_address(parser: argparse.ArgumentParser) -> None:
    """The option that says which cluster."""
    default = Topology().router.grpc_listen
    parser.add_argument(
        "--address",
        type=_address,
        default=default,
        metavar="HOST:PORT",
        help=f"a router's gRPC address (default: {default})",
    )


def said(error: FleetError, address: str) -> str:
    """Why a call to an address failed, and what to do where nobody answers there."""
    if error.reason is None and isinstance(error, DeadlineExceeded):
        return f"{address}: no answer in time; --address names a router's gRPC address, which its HTTP address is not"
    if error.reason is not None or not isinstance(error, Unavailable):
        return error.message
    run = run_at(address)
    if run is not None and run.killed:
        return f"{address}: the cluster in {run.folder} was killed; fleet up clears up after it and starts another"
    cause = next((meaning for sign, meaning in CAUSES.items() if sign in error.message), error.message)
    return f"{address}: {cause}; fleet up starts a cluster on this machine, --address names another's router"


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    is_port = port.isdecimal() and 1 <= int(port) <= MOST_PORT
    if not text.startswith("unix:") and (not host or "/" in host or not is_port):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:50051")
    return text
