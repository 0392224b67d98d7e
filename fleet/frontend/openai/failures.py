"""Error answers of the OpenAI API."""

from http import HTTPStatus

import msgspec

from fleet.core.errors import Reason, RequestRejected
from fleet.frontend.openai.answers import EVENT_STREAM, error_body, error_event
from fleet.net.http.exchange import Exchange
from fleet.net.http.messages import MalformedRequest
from fleet.net.status_codes import REASON_STATUSES


def send_rejection(exchange: Exchange, refused: RequestRejected, *more: tuple[str, str]) -> None:
    """Answer a rejected request; a started stream ends with an error event.

    Args:
        exchange: The exchange of the request.
        refused: The rejection.
        more: Further headers if the answer has not started.

    Raises:
        ClientDisconnected: The connection is closed.
    """
    if exchange.began:
        exchange.send(error_event(refused), content_type=EVENT_STREAM, last=True)
        return
    seconds = -(-refused.retry_after_ms // 1000)
    headers = more
    if seconds:
        headers += (("retry-after", str(seconds)),)
    if refused.reason is Reason.UNAUTHENTICATED:
        headers += (("www-authenticate", "Bearer"),)  # required with 401 (RFC 9110, 15.5.2)
    exchange.respond(REASON_STATUSES[refused.reason].http, error_body(refused), headers=headers)


def send_http_error(exchange: Exchange, status: HTTPStatus, message: str, *, allow: str = "") -> None:
    """Answer a request that is not part of the API."""
    exchange.respond(
        status, http_error_body(MalformedRequest(status, message)), headers=(("allow", allow),) if allow else ()
    )


def http_error_body(malformed: MalformedRequest) -> bytes:
    """Return the body that explains an invalid request."""
    kind = "server_error" if malformed.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    code = malformed.status.name.lower()
    return msgspec.json.encode({"error": {"message": malformed.message, "type": kind, "param": None, "code": code}})
