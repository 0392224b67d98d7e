"""Open ports of a router: those at which other hosts need no credentials, or may read what clients send."""

from collections.abc import Iterator

from fleet.router.settings.router import RouterSettings
from kvstore.security.open_ports import NO_CREDENTIALS, OpenPort

IN_THE_CLEAR = "API keys and prompts cross the network in the clear"


def open_router_ports(settings: RouterSettings, *, keyed: bool) -> Iterator[OpenPort]:
    """Yield the ports of a router at which callers need no credentials, or the connection is not encrypted.

    `keyed` is True if clients need an API key.
    """
    listens = {"http_listen": settings.http_listen, "grpc_listen": settings.grpc_listen}
    if settings.kserve_listen:
        listens["kserve_listen"] = settings.kserve_listen
    tls = settings.tls
    for setting, address in listens.items():
        if not keyed and not tls.client_authority:
            remedy = "give tenants API keys, set tls.client_authority, or let only a gateway reach the port"
            yield OpenPort(setting, address, NO_CREDENTIALS, remedy)
        elif not tls.certificate:
            remedy = "set tls.certificate and tls.key, or end TLS in a gateway that alone reaches the port"
            yield OpenPort(setting, address, IN_THE_CLEAR, remedy)
    picker = settings.endpoint_picker
    if picker is not None and not (tls.endpoint_picker and tls.client_authority):
        remedy = "let only the gateway reach the port, or set tls.endpoint_picker and tls.client_authority"
        yield OpenPort("endpoint_picker.host", picker.listen, NO_CREDENTIALS, remedy)
