"""What operators may set about the endpoint picker, which answers gateways of the Gateway API Inference Extension."""

from ipaddress import ip_address
from typing import Annotated

from msgspec import Meta, Struct

from fleet.router.http_settings import KIB, MIB

Port = Annotated[int, Meta(ge=0, le=65_535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


def endpoint_of(host: str, port: int) -> str:
    """What gateways take: an address and a port.

    Raises:
        ValueError: The host is a name, or the port is none.
    """
    address = ip_address(host.removeprefix("[").removesuffix("]"))
    if not 1 <= port <= 65_535:
        raise ValueError(port)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def endpoint_in(text: str) -> str:
    """What is written as ``ip:port``, in the way of `endpoint_of`; IPv6 with or without brackets, short or long.

    Raises:
        ValueError: It is none.
    """
    host, _, port = text.rpartition(":")
    return endpoint_of(host, int(port))


class EndpointPickerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "0.0.0.0"  # noqa: S104 - see below
    """Where it listens: on all addresses (``[::]``: those of IPv6 too), since a gateway is on another host. It asks for no key: a
    NetworkPolicy keeps others out."""

    port: Port = 9002
    """The customary one; 0 takes a free one."""

    router_endpoint: str = ""
    """``ip:port`` of this router's own HTTP API. All requests are then sent there, and placed when they come: for Fleet's own workers,
    which speak no HTTP. Empty: requests are sent to the workers themselves."""

    target_port: Port = 0
    """Where workers speak HTTP, on the addresses that they are known by; 0: on the ports that they are known by."""

    fallbacks: Annotated[int, Meta(ge=0, le=16)] = 1
    """Endpoints named besides the one chosen, for gateways that try again elsewhere."""

    wait_seconds: Seconds = 10.0
    """While all workers are busy; then the request is shed with 429."""

    body_seconds: Seconds = 60.0
    """From a request's headers to the end of its body."""

    lease_seconds: Seconds = 600.0
    """A request of which the gateway tells nothing for so long takes up no worker any more: longer than any prefill."""

    max_body_bytes: Annotated[int, Meta(ge=KIB, le=1024 * MIB)] = 8 * MIB
    """Of a request: two million tokens as ids."""

    max_held_bytes: Annotated[int, Meta(ge=KIB, le=1 << 40)] = 512 * MIB
    """Of the bodies of all requests that are not placed yet; beyond, requests are shed with 429."""

    retry_after_ms: Annotated[int, Meta(ge=1)] = 1000
    """The hint to those that are shed."""

    def __post_init__(self) -> None:
        if self.router_endpoint and not self.own_endpoint:
            raise ValueError(f"router_endpoint: {self.router_endpoint!r} must be ip:port; gateways look up no names")

    @property
    def listen(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def own_endpoint(self) -> str:
        """`router_endpoint` as gateways write it; empty: none."""
        try:
            return endpoint_in(self.router_endpoint)
        except ValueError:
            return ""
