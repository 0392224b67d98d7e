"""Open ports: warns, when a process starts, of each port at which other hosts have to prove nothing.

Ports that ask for credentials are refused beyond loopback without them, unless the settings name that (`insecure`,
`metrics_access.open`). The ports here are open by nature, or by the settings of clients, so a warning names them.
"""

import logging
from collections.abc import Iterator

from msgspec import Struct

from fleet.core.roles import KvPath
from fleet.router.settings.router import RouterSettings
from kvstore.net.addresses import is_local
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

NOTHING_PROVEN = "callers prove nothing"
IN_THE_CLEAR = "API keys and prompts cross the network in the clear"


class OpenPort(Struct, frozen=True):
    """A port that other hosts reach, although callers prove nothing or the connection is not encrypted."""

    setting: str
    address: str
    cause: str
    to_change: str


def open_router_ports(settings: RouterSettings, *, keyed: bool) -> list[OpenPort]:
    """Return the open ports of a router; `keyed` is True if clients need an API key."""
    listens = {"http_listen": settings.http_listen, "grpc_listen": settings.grpc_listen}
    if settings.kserve_listen:
        listens["kserve_listen"] = settings.kserve_listen
    tls = settings.tls
    ports: list[OpenPort] = []
    for setting, address in listens.items():
        if not keyed and not tls.client_authority:
            remedy = "give tenants API keys, set tls.client_authority, or let only a gateway reach the port"
            ports.append(OpenPort(setting, address, NOTHING_PROVEN, remedy))
        elif not tls.certificate:
            remedy = "set tls.certificate and tls.key, or end TLS in a gateway that alone reaches the port"
            ports.append(OpenPort(setting, address, IN_THE_CLEAR, remedy))
    picker = settings.endpoint_picker
    if picker is not None and not (tls.endpoint_picker and tls.client_authority):
        remedy = "let only the gateway reach the port, or set tls.endpoint_picker and tls.client_authority"
        ports.append(OpenPort("endpoint_picker.host", picker.listen, NOTHING_PROVEN, remedy))
    return [port for port in ports if _is_reached_by_others(port.address)]


def open_worker_ports(settings: WorkerSettings) -> list[OpenPort]:
    """Return the open ports of a worker, or of one of the other ranks of its engine."""
    return [
        OpenPort(
            setting,
            address,
            NOTHING_PROVEN,
            "let only hosts of the engines reach these ports, by a network of their own",
        )
        for setting, address in _ports_of_engines(settings)
        if _is_reached_by_others(address)
    ]


def _is_reached_by_others(address: str) -> bool:
    try:
        return not is_local(address)
    except ValueError:  # an address for other hosts that is not host:port; whoever uses it reports the fault
        return True


def _ports_of_engines(settings: WorkerSettings) -> Iterator[tuple[str, str]]:
    """Yield the setting and the address of each port at which engines talk to each other without credentials."""
    group = settings.group
    if group is not None and not group.rank:
        yield ("group.listen", group.listen) if group.listen else ("group.leader", group.leader)
    if KvPath.DIRECT not in settings.kv_paths:
        return
    if settings.engine == "simulated":
        yield "simulated.direct_listen", settings.simulated.direct_listen
    elif settings.engine == "vllm":
        # The side channel of NIXL listens on the same host.
        yield ("advertise", settings.advertise) if settings.advertise else ("listen", settings.listen)


def warn_of_open_ports(ports: list[OpenPort]) -> None:
    """Log a warning for each port."""
    for port in ports:
        log.warning(
            "port open to other hosts",
            extra={
                "setting": port.setting,
                "address": port.address,
                "cause": port.cause,
                "to_change": port.to_change,
            },
        )
