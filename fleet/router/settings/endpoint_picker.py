"""Settings of the endpoint picker, which answers gateways of the Gateway API Inference Extension."""

from ipaddress import ip_address
from typing import Annotated

from msgspec import Meta, Struct

from fleet.net.settings import KIB, MIB

Port = Annotated[int, Meta(ge=0, le=65_535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


def endpoint_of(host: str, port: int) -> str:
    """Return an IP address and a port as one text, in the form that gateways accept: ``ip:port``, with brackets around an IPv6 address.

    Raises:
        ValueError: The host is no IP address, or the port is out of range.
    """
    address = ip_address(host.removeprefix("[").removesuffix("]"))
    if not 1 <= port <= 65_535:
        raise ValueError(port)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def endpoint_in(text: str) -> str:
    """Return an ``ip:port`` in the form of `endpoint_of`. An IPv6 address may be given with or without brackets, and in any notation.

    Raises:
        ValueError: The text is no ``ip:port``.
    """
    host, _, port = text.rpartition(":")
    return endpoint_of(host, int(port))


class PickerLease(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Lease (coordination.k8s.io) that chooses one of several pickers that do not know each other's reservations.

    Gateways ask only the picker that holds the Lease.
    """

    name: Annotated[str, Meta(min_length=1, max_length=63)]
    """The name of the Lease; all pickers among which it chooses have the same name here."""

    identity: Annotated[str, Meta(min_length=1, max_length=253)]
    """The identity of this picker among the pickers that share the Lease; use the name of its pod. Two routers must not have the same
    identity, but all processes of one router have the same, because they tell each other their reservations."""

    namespace: str = ""
    """The namespace of the Lease; empty: the namespace of the pod."""

    kubeconfig: str = ""
    """The kubeconfig file for the API server; empty: the pod's service account."""

    owner: Annotated[str, Meta(max_length=253)] = ""
    """The Deployment in `namespace` that owns the pickers' pods; the Lease is deleted when this Deployment is deleted. Empty: the Lease
    stays."""

    duration_seconds: Annotated[int, Meta(ge=2, le=3600)] = 15
    """Seconds after which another picker takes a Lease that its holder no longer renews. The holder renews the Lease every 2/15 of this
    time. If it cannot renew the Lease for 2/3 of this time, it reports that it is not ready."""

    service: Annotated[str, Meta(max_length=63)] = ""
    """Name of a Service without a selector. The holder of the Lease is its only endpoint, in an EndpointSlice with the name of the Lease,
    so that gateways reach only the holder. Empty: there is no such Service."""

    endpoint: str = ""
    """``ip:port`` at which gateways reach this picker; needed only with `service`, and otherwise empty."""

    def __post_init__(self) -> None:
        if self.service:
            try:
                endpoint_in(self.endpoint)
            except ValueError as error:
                raise ValueError(f"endpoint: {self.endpoint!r} must be ip:port, since service is set") from error


class EndpointPickerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "0.0.0.0"  # noqa: S104 - the text below gives the reason
    """The address at which the picker listens. The default is all IPv4 addresses (``[::]``: IPv6 too), because gateways run on other hosts.
    The picker asks gateways for no credentials of their own, only for the keys of their clients if tenants have keys. So use a NetworkPolicy
    to keep other hosts out."""

    port: Port = 9002
    """The port of the picker; 0: a free one. The default is the customary port of endpoint pickers."""

    router_endpoint: str = ""
    """``ip:port`` of this router's own HTTP API. If it is set, gateways send all requests to the router, which places them when they
    arrive. Fleet's own workers need it, because they speak no HTTP. Empty: gateways send requests to the workers themselves."""

    target_port: Port = 0
    """The HTTP port at which gateways reach the workers, on the host of each worker's address; 0: the port of that address."""

    lease: PickerLease | None = None
    """The Lease that chooses one of several pickers, if each would pick workers without knowing the reservations of the others. In three
    cases no Lease is needed: there is only one router (it may have several processes), or the routers exchange reservations as peers
    (`RouterSettings.replicas`), or gateways send all requests to the router (`router_endpoint`). None: every picker answers gateways."""

    fallbacks: Annotated[int, Meta(ge=0, le=16)] = 1
    """Number of further endpoints that the picker names after the chosen one. Gateways may try them if the chosen endpoint fails."""

    wait_seconds: Seconds = 10.0
    """The longest time for which a request waits while all workers are busy; after this time the request is rejected with 429."""

    body_seconds: Seconds = 60.0
    """The longest time from a request's headers to the end of its body; a request that takes longer is rejected."""

    lease_seconds: Seconds = 600.0
    """A request loses its reservation if the gateway reports nothing about it for this time. The default is longer than
    most prefills. For an answer that is not streamed, it must also cover the generation."""

    max_body_bytes: Annotated[int, Meta(ge=KIB, le=1024 * MIB)] = 8 * MIB
    """The largest request body, in bytes; requests with larger bodies are rejected. The default has room for a prompt of a million token ids
    in JSON."""

    max_held_bytes: Annotated[int, Meta(ge=KIB, le=1 << 40)] = 512 * MIB
    """Memory in bytes for the bodies of all requests that are not placed yet; requests that need more are rejected with 429."""

    retry_after_ms: Annotated[int, Meta(ge=1)] = 1000
    """Retry hint in milliseconds for requests that are rejected with 429, or whose body did not come in time."""

    def __post_init__(self) -> None:
        if self.router_endpoint and not self.own_endpoint:
            raise ValueError(f"router_endpoint: {self.router_endpoint!r} must be ip:port; gateways look up no names")
        if self.router_endpoint and self.lease is not None:
            raise ValueError(
                "lease: with router_endpoint any router may answer gateways, so no Lease is needed; leave out one of the two"
            )

    @property
    def listen(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def own_endpoint(self) -> str:
        """`router_endpoint` in the form that gateways accept; empty if it is not set, or is no ``ip:port``."""
        try:
            return endpoint_in(self.router_endpoint)
        except ValueError:
            return ""
