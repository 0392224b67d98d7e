"""Lookup of control ports on this machine, by the address that clients use."""

from msgspec import Struct

from fleet.local.runs import run_at
from fleet.net.control.address import find_control_socket
from kvstore.security.credentials import Credentials


class KnownControl(Struct, frozen=True, kw_only=True):
    """A control port and the credentials for it."""

    address: str
    credentials: Credentials = Credentials()


def known_control(address: str) -> KnownControl | None:
    """Return the control port of a router of this user on this machine; None if none is known.

    Args:
        address: Address of the router for clients, or its control address.
    """
    run = run_at(address)
    if run is not None and not run.killed and (addresses := run.addresses()) is not None and addresses.control_listen:
        return KnownControl(address=addresses.control_listen, credentials=addresses.control_credentials)
    socket = find_control_socket(address)
    return None if socket is None else KnownControl(address=socket)
