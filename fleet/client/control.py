"""Control address of a client: the router's control port, and the credentials that open it."""

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
"""The end of an error message that names no control address."""

CLIENTS_PORT = "that is an address for clients; status, explain and thresholds are asked at the router's control_listen"


class ControlPort:
    """The control port of one router; nothing is looked up or dialled before the first call."""

    def __init__(self, address: str, control: str, credentials: Credentials) -> None:
        """Say which.

        Args:
            address: At which clients reach the router.
            control: The router's control address; empty: as a router on this machine has it.
            credentials: What proves to a control port over TCP that the client may use it.

        Raises:
            ConfigurationRefused: A file of the credentials cannot be used.
        """
        from fleet.net.control.access import load_control_access  # noqa: PLC0415 - most clients only generate

        self._address = address
        self._control = control
        self._access = load_control_access("control_credentials", credentials) if credentials != Credentials() else None

    def channel(self) -> grpc.Channel:
        """Return a channel for synchronous calls.

        Raises:
            Unavailable: The control address is not known.
            ConfigurationRefused: A file of the credentials cannot be used.
        """
        access, address = self._resolved()
        return access.channel(address)

    def aio_channel(self) -> grpc.aio.Channel:
        """Return a channel for calls on an event loop; raises as `channel` does."""
        access, address = self._resolved()
        return access.aio_channel(address)

    def _resolved(self) -> "tuple[ControlAccess, str]":
        from fleet.local.known_control import known_control  # noqa: PLC0415 - likewise
        from fleet.net.control.access import OPEN_ACCESS, load_control_access  # noqa: PLC0415 - most clients only generate
        from fleet.net.control.address import control_folder  # noqa: PLC0415 - likewise

        if self._control:
            return self._access or OPEN_ACCESS, self._control
        known = known_control(self._address)
        if known is None:
            raise Unavailable(
                f"{self._address}: the control address of the router is not known: no control socket was found for it in"
                f" {control_folder()}{NOT_KNOWN}"
            )
        return self._access or load_control_access("control_credentials", known.credentials), known.address


def control_error(error: grpc.RpcError) -> FleetError:
    """Return the error that a failed call to a control port stands for."""
    if isinstance(error, UnprovenAnswer):
        return Unauthenticated(UNPROVEN)
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError)), error
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unavailable(CLIENTS_PORT)
    return error_of(error)
