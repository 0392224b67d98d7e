"""Passage: a request for an external backend that is passed on while it arrives, without placement by its prompt.

Passages are uploads, downloads, WebSockets, and all other requests in which the router knows no prompt. The name of the model is
only needed to choose among servers with different models. The router looks for it in the query and in the first bytes
of the body. These bytes are kept, and sent on before the rest of the body.
"""

import re
from collections.abc import AsyncIterator, Sequence
from urllib.parse import parse_qs

import msgspec

from fleet.core.ids import RequestId
from fleet.frontend.openai.relay_requests import end_to_end_headers
from fleet.net.http.exchange import Exchange

MODEL_BYTES = 64 << 10
"""Number of bytes at the beginning of a body in which the model's name is looked for. These bytes usually contain the name, because OpenAI's
clients send the fields of a form before its files. Without the name, any server may get the passage."""

_IN_JSON = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){0,1000}")')
_IN_FORM = re.compile(rb'name="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{0,1000})\r\n')
# Header that is forwarded for passages, but not for other relayed requests: the router does not read the answer of a passage, so the
# answer may be compressed.
_CONTENT_HEADERS = frozenset({b"accept-encoding"})


class Passage:
    """One request that is passed on to an external backend, and the exchange that receives the answer."""

    def __init__(
        self,
        exchange: Exchange,
        request_id: RequestId,
        credentials: bytes,
        limits: Sequence[tuple[str, str]],
    ) -> None:
        """Prepare the request.

        Args:
            exchange: The client's request.
            request_id: Id of the request, for the headers of the answer.
            credentials: The client's header lines with its key. They go to servers for which the settings have no key.
            limits: Rate limit headers of the tenant.
        """
        request = exchange.request
        head = request.head
        self.exchange = exchange
        self.request_id = request_id
        self.credentials = credentials
        self.limits = limits
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.switches = b"upgrade" in head.headers and request.arriving is not None
        """True if the client asks for a WebSocket."""

        self.sized = b"transfer-encoding" not in head.headers
        """False if the client sends the body in chunks, which are then also sent on in chunks; True for other requests."""

        self.is_bodyless = not self.switches and not request.body and request.arriving is None
        self._begun: list[bytes] = [request.body] if request.body else []

    def header_lines(self) -> bytes:
        """Return the header lines for the server, without host and credentials."""
        head = self.exchange.request.head
        lines = end_to_end_headers(head, _CONTENT_HEADERS)
        if self.switches:
            return lines + b"connection: upgrade\r\nupgrade: websocket\r\n"
        if not self.sized:
            framing = b"transfer-encoding: chunked\r\n"
        elif (length := head.headers.get(b"content-length")) is not None:
            framing = b"content-length: " + length + b"\r\n"
        else:
            framing = b""
        return lines + framing + b"connection: close\r\n"

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the body, or the bytes that arrive over the WebSocket; it can be read only once.

        Raises:
            RequestRejected: The rest of the body does not arrive.
        """
        for piece in self._begun:
            yield piece
        self._begun.clear()
        if (arriving := self.exchange.request.arriving) is not None:
            async for piece in arriving:
                yield piece

    async def named_model(self) -> str:
        """Return the name of the model in the query or in the beginning of the body; empty if neither has one.

        Raises:
            RequestRejected: The body does not arrive.
        """
        if named := parse_qs(self.query[1:].decode("latin-1")).get("model"):
            return named[0]
        if self.switches:
            return ""
        begun = b"".join(self._begun)
        arriving = self.exchange.request.arriving
        while not (model := _model_in(begun)) and arriving is not None and len(begun) < MODEL_BYTES:
            piece = await anext(arriving, b"")
            if not piece:
                break
            self._begun.append(piece)
            begun += piece
        return model


def _model_in(content: bytes) -> str:
    if (field := _IN_FORM.search(content, 0, MODEL_BYTES)) is not None:
        return field[1].decode("utf-8", "replace")
    if (value := _IN_JSON.search(content, 0, MODEL_BYTES)) is not None:
        try:
            return msgspec.json.decode(value[1], type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""
    return ""
