"""Open ports of a router: those at which other hosts have to prove nothing, or may read what clients send."""

from collections.abc import Iterator

from fleet.router.settings.router import RouterSettings
from kvstore.security.open_ports import NOTHING_PROVEN, OpenPort

IN_THE_CLEAR = "API keys and prompts cross the network in the clear"


def open_router_ports(settings: RouterSettings, *, keyed: bool) -> Iterator[OpenPort]:
    """Yield the ports of a router without proof or encryption; `keyed` is True if clients need an API key."""
    listens = {"http_listen": settings.http_listen, "grpc_listen": settings.grpc_listen}
    if settings.kserve_listen:
        listens["kserve_listen"] = settings.kserve_listen
    tls = settings.tls
    for setting, address in listens.items():
        if not keyed and not tls.client_authority:
            remedy = "give tenants API keys, set tls.client_authority, or let only a gateway reach the port"
            yield OpenPort(setting, address, NOTHING_PROVEN, remedy)
        elif not tls.certificate:
            remedy = "set tls.certificate and tls.key, or end TLS in a gateway that alone reaches the port"
            yield OpenPort(setting, address, IN_THE_CLEAR, remedy)
    picker = settings.endpoint_picker
    if picker is not None and not (tls.endpoint_picker and tls.client_authority):
        remedy = "let only the gateway reach the port, or set tls.endpoint_picker and tls.client_authority"
        yield OpenPort("endpoint_picker.host", picker.listen, NOTHING_PROVEN, remedy)
