"""Control port: finds a router's control address and the credentials for it, and opens channels to this address."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc

from fleet.client.errors import FleetError, Unauthenticated, Unavailable, error_of
from kvstore.security.call_proofs import UNPROVEN, UnprovenAnswer
from kvstore.security.credentials import Credentials

if TYPE_CHECKING:
    from fleet.net.control.access import ControlAccess

NOT_KNOWN = (
    "; --control-address names the router's control_listen, and --control-secret-file the file with its secret where it"
    " is host:port"
)
"""End of the error message for an unknown control address."""

CLIENTS_PORT = "that is an address for clients; status, explain and thresholds are asked at the router's control_listen"


class ControlPort:
    """Connects to the control port of one router; `channel` and `aio_channel` find the address if it is not given."""

    def __init__(self, address: str, control: str, credentials: Credentials) -> None:
        """Prepare the control port.

        Args:
            address: Address of the router for clients.
            control: The router's control address. If it is empty, the address of this user's router on this machine is
                looked up.
            credentials: Credentials for a control port over TCP. With the default, the credentials of the local run are used if the
                address was looked up, and otherwise none.

        Raises:
            ConfigurationRefused: A credentials file cannot be used.
        """
        from fleet.net.control.access import load_control_access  # noqa: PLC0415 - imported here, because most clients never use the control port

        self._address = address
        self._control = control
        self._access = load_control_access("control_credentials", credentials) if credentials != Credentials() else None

    def channel(self) -> grpc.Channel:
        """Return a channel for synchronous calls.

        Raises:
            Unavailable: The control address is unknown.
            ConfigurationRefused: A credentials file cannot be used.
        """
        access, address = self._resolved()
        return access.channel(address)

    def aio_channel(self) -> grpc.aio.Channel:
        """Return a channel for calls on an event loop; raise the same errors as `channel`."""
        access, address = self._resolved()
        return access.aio_channel(address)

    def _resolved(self) -> "tuple[ControlAccess, str]":
        from fleet.net.control.access import OPEN_ACCESS, load_control_access  # noqa: PLC0415 - imported here, because most clients never use the control port

        if self._control:
            return self._access or OPEN_ACCESS, self._control
        address, credentials = self._found()
        return self._access or load_control_access("control_credentials", credentials), address

    def _found(self) -> tuple[str, Credentials]:
        """Return the control address of the router, which must be one of this user on this machine, and the credentials for it.

        Raises:
            Unavailable: Neither a local run nor a control socket is known for the router's address.
        """
        from fleet.local.runs import run_at  # noqa: PLC0415 - imported here, because most clients never use the control port
        from fleet.net.control.address import control_folder, find_control_socket  # noqa: PLC0415 - imported here, because most clients never use the control port

        run = run_at(self._address)
        addresses = None if run is None or run.killed else run.addresses()
        if addresses is not None and addresses.control_listen:
            return addresses.control_listen, addresses.control_credentials
        if (found := find_control_socket(self._address)) is not None:
            return found, Credentials()
        raise Unavailable(
            f"{self._address}: the control address of the router is not known: no control socket was found for it in"
            f" {control_folder()}{NOT_KNOWN}"
        )


@contextmanager
def control_errors() -> Iterator[None]:
    """Translate the error of a failed call to a control port into a `FleetError`.

    Raises:
        FleetError: The call failed.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise _control_error(error) from error


def _control_error(error: grpc.RpcError) -> FleetError:
    if isinstance(error, UnprovenAnswer):
        return Unauthenticated(UNPROVEN)
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError)), error
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(CLIENTS_PORT)
    return error_of(error)
