"""What operators may set about the HTTP front: what one client may take of a router that serves many."""

from typing import Annotated

from msgspec import Meta, Struct

KIB, MIB = 1 << 10, 1 << 20

ORDINARY_BODY_BYTES = 64 * KIB

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class HttpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_connections: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    """More are answered with 503 and closed; each costs about 20 KiB, and a file descriptor."""

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

    write_timeout_seconds: Seconds = 30.0
    """A client that reads nothing for so long, while there is something to read, is cut off."""
