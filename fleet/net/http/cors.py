"""Cross-origin requests: the headers that let web pages of other origins call a port (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from collections.abc import Sequence
from http import HTTPStatus

from fleet.net.http.exchange import Exchange

ANY = "*"
PREFLIGHT_SECONDS = "600"  # how long a browser may remember the answer; the longest time that Chrome and Safari keep
_NAMES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_, "


def cors_headers(origin: bytes, allowed: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the headers of an answer to a page of this origin; none if it may not read the answer."""
    if ANY in allowed:
        return (("access-control-allow-origin", ANY), ("access-control-expose-headers", ANY))
    name = origin.decode("latin-1")
    if name not in allowed:
        return ()
    return (
        ("access-control-allow-origin", name),
        ("access-control-expose-headers", "x-request-id, retry-after"),
        ("vary", "origin"),
    )


def answer_options(exchange: Exchange, methods: Sequence[str], allowed: Sequence[str]) -> None:
    """Answer an OPTIONS request: the methods of a path and, to a preflight request of a browser, what its page may send.

    Raises:
        ClientDisconnected: The connection is closed.
    """
    asked = exchange.request.head.headers
    listed = ", ".join((*methods, "OPTIONS"))
    headers = [("allow", listed)]
    if cors_headers(asked.get(b"origin", b""), allowed) and b"access-control-request-method" in asked:
        wanted = asked.get(b"access-control-request-headers", b"")
        headers += [
            ("access-control-allow-methods", listed),
            ("access-control-max-age", PREFLIGHT_SECONDS),
        ]
        if wanted and not wanted.strip(_NAMES):
            headers.append(("access-control-allow-headers", wanted.decode("ascii")))
    exchange.respond(HTTPStatus.OK, b"", headers=headers)
