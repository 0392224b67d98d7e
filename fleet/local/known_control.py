"""Control ports that can be found on this machine, by the address at which clients reach their routers."""

from msgspec import Struct

from fleet.local.runs import run_at
from fleet.net.control.address import find_control_socket
from kvstore.security.credentials import Credentials


class KnownControl(Struct, frozen=True, kw_only=True):
    """A control port, and what its callers have to prove."""

    address: str
    credentials: Credentials = Credentials()


def known_control(address: str) -> KnownControl | None:
    """Return the control port of a router of this user on this machine; None: none is known.

    Args:
        address: At which clients reach the router, or its control address.
    """
    run = run_at(address)
    if run is not None and not run.killed and (addresses := run.addresses()) is not None and addresses.control_listen:
        return KnownControl(address=addresses.control_listen, credentials=addresses.control_credentials)
    socket = find_control_socket(address)
    return None if socket is None else KnownControl(address=socket)
