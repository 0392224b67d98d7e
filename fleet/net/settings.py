"""Settings of the fronts for clients: what one client may take of a router that serves many."""

from typing import Annotated

from msgspec import Meta, Struct

KIB, MIB = 1 << 10, 1 << 20

ORDINARY_BODY_BYTES = 64 * KIB

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ConnectionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the connections of one port, whatever is spoken there."""

    max_connections: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """Connections at once; each costs about 20 KiB, and a file descriptor. When there are so many, a newcomer takes the place of one
    that waits: first of one that has sent nothing for a second, then of the one that has waited longest, never of one whose request is being served. A
    newcomer that finds no place is refused: over HTTP with 503 and Retry-After."""

    address_share: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Part of `max_connections` that one client address (of IPv6: one /64 network) may have. An address that has so many makes room among
    its own connections only. 0.9 leaves room for others when one client takes all it can, and costs a single load balancer in
    front, whose address all clients share, a tenth of the connections; set 1 there. Clients over Unix sockets count as one address."""

    first_byte_timeout_seconds: Seconds = 10.0
    """From the beginning of a connection to its first byte: clients connect in order to say something, and the same time
    is enough for a whole head (`http.head_timeout_seconds`)."""

    write_timeout_seconds: Seconds = 30.0
    """In so long a client has to take all that waited for it, or at least `min_read_bytes`; else it is cut off, however often
    it takes a byte."""

    min_read_bytes: Annotated[int, Meta(ge=1, le=1024 * MIB)] = 64 * KIB
    """See `write_timeout_seconds`. What is buffered for one connection before its writer waits, so a client is
    judged by a rate of 2 KiB/s, which every network has."""


class GrpcSettings(ConnectionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the gRPC fronts for clients, for each of `grpc_listen` and `kserve_listen`."""


DEFAULT_GRPC_LIMITS = GrpcSettings()
"""The limits that hold where nothing is set."""


class HttpSettings(ConnectionSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of the HTTP front."""

    max_head_bytes: Annotated[int, Meta(ge=KIB, le=16 * MIB)] = 32 * KIB
    """Request line and headers."""

    max_body_bytes: Annotated[int, Meta(ge=KIB, le=1024 * MIB)] = 8 * MIB
    """Of a request: two million tokens as ids."""

    max_held_bytes: Annotated[int, Meta(ge=KIB, le=1 << 40)] = 1024 * MIB
    """Of the bodies of all connections together, from the first byte to the end of the answer. Beyond that long ones are answered
    with 503; ordinary ones, up to `ORDINARY_BODY_BYTES`, are always taken."""

    head_timeout_seconds: Seconds = 10.0
    """From the first byte of a request to the end of its headers."""

    body_timeout_seconds: Seconds = 30.0
    """From the end of the headers to the end of the body."""

    idle_timeout_seconds: Seconds = 75.0
    """Between two requests of a connection (as nginx has it, so that proxies reuse connections)."""
