"""What operators may set about the endpoint picker, which answers gateways of the Gateway API Inference Extension."""

from ipaddress import ip_address
from typing import Annotated

from msgspec import Meta, Struct

from fleet.net.settings import KIB, MIB

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


class PickerLease(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Lease (coordination.k8s.io): of several pickers that do not know what the others have booked, gateways are to ask its holder."""

    name: Annotated[str, Meta(min_length=1, max_length=63)]

    identity: Annotated[str, Meta(min_length=1, max_length=253)]
    """Unique among those that share the Lease: the pod's name. Processes of one router have the same, since they tell each other what they
    have booked."""

    namespace: str = ""
    """Where the Lease is; empty: the namespace of the pod."""

    kubeconfig: str = ""
    """File that says how to reach the API; empty: as a pod does, by its service account."""

    owner: Annotated[str, Meta(max_length=253)] = ""
    """The Deployment in that namespace which the pickers' pods belong to: the Lease goes when it goes. Empty: it stays."""

    duration_seconds: Annotated[int, Meta(ge=2, le=3600)] = 15
    """How long the others wait for a holder that renews no more. It renews every 2/15 of that, and after 2/3 says that it is not ready."""

    service: Annotated[str, Meta(max_length=63)] = ""
    """A Service without a selector: the holder is its only endpoint, by an EndpointSlice with the name of the Lease. Empty: none."""

    endpoint: str = ""
    """With `service`: ``ip:port`` at which gateways reach this picker."""

    def __post_init__(self) -> None:
        if self.service:
            try:
                endpoint_in(self.endpoint)
            except ValueError as error:
                raise ValueError(f"endpoint: {self.endpoint!r} must be ip:port, since service is set") from error


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

    lease: PickerLease | None = None
    """Which of several pickers is to be asked, where each would pick workers' own endpoints without knowing what the others have booked. Not
    needed with one router, however many processes it has, with `replicas`, and with `router_endpoint`."""

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
        if self.router_endpoint and self.lease is not None:
            raise ValueError(
                "lease: any router may be asked where requests go to router_endpoint; leave out one of the two"
            )

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
