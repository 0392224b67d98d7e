"""Settings of client ports: limits that keep one client from taking too much of a router."""

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

KIB, MIB = 1 << 10, 1 << 20

ORDINARY_BODY_BYTES = 64 * KIB

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ConnectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the connections of one port, for all protocols."""

    max_connections: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """The largest number of open connections; each costs about 20 KiB and a file descriptor. When the port is full, a
    new connection displaces a waiting one: a connection whose client has not sent its next bytes for a second, or else
    the connection that has waited longest. A connection whose request is being served is never displaced. A new
    connection that displaces no other is refused: over HTTP with 503 and Retry-After."""

    address_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """The part of `max_connections` that one client address (for IPv6, one /64 network) may use. An address at its
    limit makes room among its own connections only. 0.9 leaves room for others when one client takes all it can. Behind
    a single load balancer, all clients have the same address and would lose a tenth of the connections; set 1 there.
    Clients over Unix sockets count as one address."""

    first_byte_timeout_seconds: Seconds = 10.0
    """The longest time from the start of a connection to its first byte; then the connection is closed. The default is
    the same as for a whole head (`http.head_timeout_seconds`)."""

    write_timeout_seconds: Seconds = 30.0
    """The time in which a client must read all bytes that waited for it, or at least `min_read_bytes`. A slower client
    is disconnected, even if it reads a byte now and then."""

    min_read_bytes: Annotated[int, Meta(ge=1, le=1024 * MIB)] = 64 * KIB
    """The number of bytes that a client must read within `write_timeout_seconds` if that many bytes wait for it. The default is
    the number of buffered bytes at which the writer of a connection waits. With the default
    `write_timeout_seconds` it requires a rate of 2 KiB/s, which every network has."""


class ClientTlsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the ports for clients: HTTP, gRPC and KServe; with `health` also the health port, with `endpoint_picker` the picker.

    The files are read again when they change.
    """

    certificate: str = ""
    """PEM file of the router's certificate, followed by the certificates between this one and its authority. Empty: the
    ports do not speak TLS, so a proxy in front of them has to."""

    key: str = ""
    """PEM file of the certificate's private key, without a passphrase."""

    client_authority: str = ""
    """PEM file of the authorities of which one must have signed a client's certificate (mTLS). Empty: clients need no certificate."""

    health: bool = False
    """True if `health_listen` speaks TLS as well. The default is false, because probes of a load balancer or of Kubernetes
    usually use plain HTTP. With `client_authority`, probes need a certificate, and probes of Kubernetes have none."""

    endpoint_picker: bool = False
    """True if the endpoint picker speaks TLS as well, for gateways that call pickers over TLS. With `client_authority`,
    gateways need a certificate."""

    renewal_check_seconds: Annotated[float, Meta(ge=0.1, le=86_400)] = 10.0
    """The time between two checks whether the files have changed. If they have changed, new connections use the renewed
    certificate, and open connections continue. If the files cannot be used, this is logged, and the old certificate
    stays in use. Kubernetes writes a renewed secret into a pod after about a minute, so ten seconds add little."""

    expiry_warning_days: Annotated[float, Meta(ge=0, le=3650)] = 14.0
    """A warning is logged once a day if the certificate ends within this time. Certificates are usually renewed 30 days
    before their end, so two weeks mean that a renewal has failed."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("tls.key: certificate and key go together")
        if self.client_authority and not self.certificate:
            raise ValueError("tls.client_authority: needs certificate and key")
        for name in ("health", "endpoint_picker"):
            if getattr(self, name) and not self.certificate:
                raise ValueError(f"tls.{name}: needs certificate and key")


class GrpcLibrary(StrEnum):
    """Library that serves the gRPC ports for clients."""

    NGH2 = "ngh2"
    GRPCIO = "grpcio"


class GrpcSettings(ConnectionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The library and the limits of the gRPC ports for clients, applied to each of `grpc_listen` and `kserve_listen`."""

    library: GrpcLibrary = GrpcLibrary.NGH2
    """`ngh2` serves by libnghttp2. `grpcio` serves the same methods by gRPC's own library, for a machine or a client
    that has trouble with `ngh2`. `grpcio` takes about twice the CPU time per token. It has no `address_share` and no
    `min_read_bytes`, and displaces no idle connection on a full port. It counts a message towards `grpc_max_held_bytes`
    only once the message has arrived."""


DEFAULT_GRPC_LIMITS = GrpcSettings()
"""The library and the limits of a gRPC port whose opener passes no settings."""


class HttpSettings(ConnectionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the HTTP port."""

    max_head_bytes: Annotated[int, Meta(ge=KIB, le=16 * MIB)] = 32 * KIB
    """The maximum size of the request line and the headers together."""

    max_body_bytes: Annotated[int, Meta(ge=KIB, le=1024 * MIB)] = 8 * MIB
    """The maximum size of a request body. The default is enough for about one million token ids."""

    max_held_bytes: Annotated[int, Meta(ge=KIB, le=1 << 40)] = 1024 * MIB
    """The maximum size of the bodies of all connections together. A body counts from its first byte to the end of its
    answer. Beyond this size, the port answers long requests with 503. Requests with bodies of up to 64 KiB are always
    accepted."""

    head_timeout_seconds: Seconds = 10.0
    """The longest time from the first byte of a request to the end of its headers; then the port answers with status 408."""

    body_timeout_seconds: Seconds = 30.0
    """The longest time from the end of the headers to the end of the body; then the port answers with status 408. A body
    that is read while it arrives may take longer, but `min_read_bytes` of it must arrive in each time of this length."""

    idle_timeout_seconds: Seconds = 75.0
    """The longest time between two requests of a connection; the connection is then closed. The default is that of nginx, so
    that proxies can reuse their connections to this port."""

    cors_origins: tuple[str, ...] = ("*",)
    """The origins whose web pages may call the port, such as ``https://chat.example``; ``*`` stands for all, as in vLLM. A page
    must send its API key itself, because the browser never adds one. So pages of other sites cannot use a user's key. Answers
    of external servers have their own headers."""

    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """The treatment of unknown fields in the bodies of completions, chats, responses and messages. ``ignore`` ignores them, as
    OpenAI-compatible servers ignore each other's fields. ``refuse`` refuses the request, and the error names the field. Unknown
    fields within messages and tools, and in bodies for other paths, are always ignored. External servers check their own bodies."""
