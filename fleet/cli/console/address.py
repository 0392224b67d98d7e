"""Address options: the options by which commands find a cluster, and the messages if it does not answer."""

import argparse
import shlex

from fleet.client import Client, ClientTls, DeadlineExceeded, FleetError, ServerError, Unauthenticated, Unavailable
from fleet.client.control import CLIENTS_PORT, NOT_KNOWN
from fleet.client.errors import NO_CLIENTS_PORT
from fleet.client.tls import GIVE_TLS, LEAVE_OUT_TLS, tls_cause
from fleet.core.errors import ConfigurationRefused
from fleet.local.runs import run_at
from fleet.local.settings import Topology
from fleet.net.control.access import load_control_access
from kvstore.security.credentials import Credentials

DEFAULT_ADDRESS = Topology().router.grpc_listen
MOST_PORT = 65535

CAUSES = {
    "Connection refused": "nobody listens there",
    "No such file or directory": "nobody listens there",
    "lookup failed": "there is no host of that name",
    "before receiving SETTINGS frame": "whoever listens there does not answer",
    "missing selected ALPN": "that is an HTTPS address, and no router's gRPC address",
    "http1.x server": "that is an HTTP address, and no router's gRPC address",
}
"""Explanations of gRPC's error messages in plain words. Each key is a text that the message contains."""

CREDENTIALS = "control_credentials"
"""Name of the credentials of the control port in a TLS diagnosis. Messages of commands name the options `--control-…` instead."""


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the option for the address of a cluster."""
    parser.add_argument(
        "--address",
        type=router_address,
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"a router's gRPC address (default: {DEFAULT_ADDRESS})",
    )


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Add the options for TLS on connections to the router's port for clients."""
    parser.add_argument(
        "--tls", action="store_true", help="use TLS, with the authorities that gRPC knows unless --ca names one"
    )
    files = {
        "ca": "certificates (PEM) that verify the router; implies --tls (default: those of a cluster that fleet up --tls runs here)",
        "certificate": "certificate (PEM) of this client, for routers that ask for one",
        "key": "private key (PEM) of that certificate",
    }
    for name, text in files.items():
        parser.add_argument(f"--{name}", default="", metavar="FILE", help=text)
    parser.add_argument(
        "--insecure", action="store_true", help="send the API key to another host without TLS, on a network of your own"
    )


def client_tls(arguments: argparse.Namespace) -> ClientTls | None:
    """Return the TLS files that the options of `add_tls` name; None: TLS is not used.

    Without such options, use the authority of the cluster that `fleet up --tls` runs at this address, if there is one.

    Raises:
        ConfigurationRefused: Only one of `--certificate` and `--key` is given.
    """
    if bool(arguments.certificate) != bool(arguments.key):
        raise ConfigurationRefused("--key: --certificate and --key go together")
    if arguments.ca or arguments.tls or arguments.certificate:
        return ClientTls(authority=arguments.ca, certificate=arguments.certificate, key=arguments.key)
    run = run_at(arguments.address)
    return ClientTls(authority=str(run.authority)) if run is not None and run.authority.exists() else None


def address_option(address: str) -> str:
    """Return the option by which another command gets the same address; empty for the default address."""
    return "" if address == DEFAULT_ADDRESS else f" --address {shlex.quote(address)}"


def add_control(parser: argparse.ArgumentParser) -> None:
    """Add the options for the address and control port of a cluster."""
    add_address(parser)
    parser.add_argument(
        "--control-address",
        type=router_address,
        metavar="HOST:PORT",
        help="the router's control address, or unix:/path (default: that of this user's router on this machine)",
    )
    files = {
        "secret-file": "file with the secret of the control port",
        "authority": "certificates (PEM) that verify the control port",
        "certificate": "certificate (PEM) for the control port",
        "key": "private key (PEM) of that certificate",
    }
    for name, text in files.items():
        parser.add_argument(f"--control-{name}", default="", metavar="FILE", help=text)


def control_client(arguments: argparse.Namespace) -> Client:
    """Return a client for the cluster that the options of `add_control` name.

    Raises:
        ConfigurationRefused: A credentials file cannot be used, or only one of `--control-certificate` and `--control-key`
            is given.
    """
    return Client(
        arguments.address, control=arguments.control_address or "", control_credentials=_credentials(arguments)
    )


def _credentials(arguments: argparse.Namespace) -> Credentials:
    names = ("secret_file", "authority", "certificate", "key")
    try:
        return Credentials(**{name: getattr(arguments, f"control_{name}") for name in names})
    except ValueError as error:
        raise ConfigurationRefused("--control-key: --control-certificate and --control-key go together") from error


def describe_control_error(error: FleetError, arguments: argparse.Namespace) -> str:
    """Return why a call to a control port failed, and what to do."""
    if error.reason is None and isinstance(error, Unauthenticated):
        return (
            f"{arguments.control_address or arguments.address}: {error.message}; --control-secret-file names the file that the"
            " router has in control_credentials.secret_file"
        )
    if error.reason is None and isinstance(error, Unavailable) and error.message == CLIENTS_PORT:
        return f"{arguments.control_address or arguments.address}: {error.message}; --control-address names it"
    if error.reason is None and isinstance(error, Unavailable) and error.message.endswith(NOT_KNOWN):
        run = run_at(arguments.address)
        if run is not None and run.killed:
            return describe_error(error, arguments.address)
        return f"{error.message}, or start a cluster on this machine with fleet up"
    if arguments.control_address and error.reason is None and isinstance(error, Unavailable | DeadlineExceeded):
        return _unreachable_control(error, arguments)
    return describe_error(error, arguments.control_address or arguments.address)


def _unreachable_control(error: FleetError, arguments: argparse.Namespace) -> str:
    """Return why the address of `--control-address` does not answer. A diagnosis of TLS takes a few seconds at most."""
    address = arguments.control_address
    access = load_control_access(CREDENTIALS, _credentials(arguments))
    if cause := access.diagnose(address, CREDENTIALS):
        return cause.replace(f"{CREDENTIALS}.", "--control-")
    cause = "no answer in time" if isinstance(error, DeadlineExceeded) else _cause(error)
    return f"{address}: {cause}; --control-address names a router's control_listen"


def describe_error(error: FleetError, address: str, tls: ClientTls | None = None) -> str:
    """Return why a call to an address failed, and what to do. `tls` are the TLS files of the client.

    A diagnosis of TLS takes a few seconds at most, and is made only if the client has made none.
    """
    if error.reason is None and isinstance(error, DeadlineExceeded):
        return f"{address}: no answer in time; --address names a router's gRPC address, which its HTTP address is not"
    if isinstance(error, ServerError) and error.message == NO_CLIENTS_PORT:
        return f"{address}: {error.message}; --address takes the clients' gRPC address of a router (grpc_listen)"
    if error.reason is not None or not isinstance(error, Unavailable):
        return error.message
    run = run_at(address)
    if run is not None and run.killed:
        return f"{address}: the cluster in {run.folder} was killed; fleet up cleans up after it and starts another"
    if cause := tls_cause(address, tls) if error.tls_cause is None else error.tls_cause:
        return _in_options(cause)
    return f"{address}: {_cause(error)}; fleet up starts a cluster on this machine, --address names another's router"


def _in_options(cause: str) -> str:
    """Return a text of `tls_cause`, in which options of `add_tls` replace the names of settings."""
    for phrase, meaning in (
        (LEAVE_OUT_TLS, "; leave out --tls, --ca and --certificate"),
        (GIVE_TLS, ": set --ca, or --tls if gRPC knows the authority"),
        ("tls.authority", "--ca"),
        ("tls.", "--"),
    ):
        cause = cause.replace(phrase, meaning)
    return cause


def _cause(error: FleetError) -> str:
    return next((meaning for sign, meaning in CAUSES.items() if sign in error.message), error.message)


def router_address(text: str) -> str:
    """Check an address of the command line and return it.

    Raises:
        ArgumentTypeError: The address is invalid.
    """
    host, _, port = text.rpartition(":")
    is_port = port.isdecimal() and 1 <= int(port) <= MOST_PORT
    if not text.startswith("unix:") and (not host or "/" in host or not is_port):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:50051")
    return text
