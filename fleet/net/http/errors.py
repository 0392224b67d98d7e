"""Error answers over HTTP: JSON objects and last events of streams, in the form of the OpenAI API."""

from http import HTTPStatus

import msgspec

from fleet.core.errors import Reason, RequestRejected
from fleet.net.http.exchange import Exchange
from fleet.net.http.messages import EVENT_STREAM, MalformedRequest, sse_event
from fleet.net.status_codes import REASON_STATUSES


def send_rejection(exchange: Exchange, refused: RequestRejected, *more: tuple[str, str]) -> None:
    """Answer a rejected request; a started stream ends with an error event. `more` are headers of an answer not yet started.

    Raises:
        ClientDisconnected: The connection is closed.
    """
    if exchange.began:
        exchange.send(error_event(refused), content_type=EVENT_STREAM, last=True)
        return
    headers = more
    if seconds := -(-refused.retry_after_ms // 1000):
        headers += (("retry-after", str(seconds)),)
    if refused.reason is Reason.UNAUTHENTICATED:
        headers += (("www-authenticate", "Bearer"),)  # required with 401 (RFC 9110, 15.5.2)
    exchange.respond(REASON_STATUSES[refused.reason].http, error_body(refused), headers=headers)


def send_http_error(exchange: Exchange, status: HTTPStatus, message: str, *, allow: str = "") -> None:
    """Answer a request that no handler can take."""
    content = http_error_body(MalformedRequest(status, message))
    exchange.respond(status, content, headers=(("allow", allow),) if allow else ())


def http_error_body(malformed: MalformedRequest) -> bytes:
    """Return the body that explains an invalid request."""
    kind = "server_error" if malformed.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    code = malformed.status.name.lower()
    return msgspec.json.encode({"error": {"message": malformed.message, "type": kind, "param": None, "code": code}})


def error_body(refused: RequestRejected) -> bytes:
    """Return the body of a rejection."""
    return msgspec.json.encode({"error": _error(refused)})


def error_event(refused: RequestRejected) -> bytes:
    """Return the last event of a failed stream. It contains the retry hint, which otherwise is in a header."""
    error = _error(refused)
    if refused.retry_after_ms:
        error["retry_after_ms"] = refused.retry_after_ms
    return sse_event(msgspec.json.encode({"error": error}))


def _error(refused: RequestRejected) -> dict[str, object]:
    error: dict[str, object] = {
        "message": refused.message,
        "type": REASON_STATUSES[refused.reason].openai,
        "param": refused.field or None,
        "code": refused.reason,
    }
    if refused.cause:
        error["cause"] = refused.cause
    return error
