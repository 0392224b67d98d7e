"""Error answers over HTTP: JSON objects and last events of streams, in the forms of the OpenAI and Anthropic APIs."""

from collections.abc import Callable, Mapping
from http import HTTPStatus

import msgspec
from msgspec import Struct

from fleet.core.errors import CONTEXT_LENGTH_EXCEEDED, Reason, RequestRejected
from fleet.net.http.exchange import (
    EVENT_STREAM,
    NO_RETRY,
    Exchange,
    MalformedRequest,
    is_anthropic,
    rate_limit_headers,
    sse_event,
)
from fleet.net.status_codes import REASON_STATUSES


class ErrorForm(Struct, frozen=True):
    """The functions that write errors in the form of one API: a whole body, and the last event of a started stream."""

    body: Callable[[RequestRejected], bytes]
    event: Callable[[RequestRejected, int | None], bytes]  # the number is the argument `events` of `send_rejection`


def send_rejection(
    exchange: Exchange,
    refused: RequestRejected,
    *more: tuple[str, str],
    form: ErrorForm | None = None,
    events: int | None = None,
) -> None:
    """Answer a rejected request; a started stream ends with an error event.

    Args:
        exchange: The exchange of the request.
        refused: The rejection.
        more: Further headers, which are sent if the answer has not started yet.
        form: The form of the API; None: the form of completions and chat.
        events: Number of the earlier events of a started stream, which the Responses API states; None if it is unknown.

    Raises:
        ClientDisconnected: The connection is closed.
    """
    form = form or OPENAI_ERRORS
    if exchange.began:
        exchange.send(form.event(refused, events), content_type=EVENT_STREAM, last=True)
        return
    headers = (*more, *rejection_headers(refused))
    exchange.respond(REASON_STATUSES[refused.reason].http, form.body(refused), headers=headers)


def rejection_headers(refused: RequestRejected) -> tuple[tuple[str, str], ...]:
    """Return the headers of the answer to a rejected request that follow from the rejection alone."""
    headers = rate_limit_headers(refused.allowance)
    if seconds := -(-refused.retry_after_ms // 1000):
        headers += (("retry-after", str(seconds)),)
    elif refused.reason is Reason.DEADLINE_PASSED:
        headers += (NO_RETRY,)  # a retry would have the same deadline
    if refused.reason is Reason.UNAUTHENTICATED:
        headers += (("www-authenticate", "Bearer"),)  # an answer with status 401 must have it (RFC 9110, 15.5.2)
    return headers


def send_http_error(exchange: Exchange, status: HTTPStatus, message: str, *, allow: str = "") -> None:
    """Answer a request that no handler can take, in the form of the API to which its path or its headers belong.

    `allow` is the value of the header ``Allow``; empty: the answer has no such header.

    Raises:
        ClientDisconnected: The connection is closed.
    """
    malformed = MalformedRequest(
        status, message, is_anthropic=is_anthropic(exchange.request.path, exchange.request.headers)
    )
    exchange.respond(status, http_error_body(malformed), headers=(("allow", allow),) if allow else ())


def http_error_body(malformed: MalformedRequest) -> bytes:
    """Return the body of the answer to a malformed request, in the form of its API."""
    if malformed.is_anthropic:
        return _anthropic_body(malformed.status, malformed.message)
    kind = "server_error" if malformed.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    code = malformed.status.name.lower()
    return msgspec.json.encode({"error": {"message": malformed.message, "type": kind, "param": None, "code": code}})


def error_body(refused: RequestRejected) -> bytes:
    """Return the body of a rejection, in the form of completions and chat."""
    return msgspec.json.encode({"error": _error(refused)})


def error_event(refused: RequestRejected, _events: int | None = None) -> bytes:
    """Return the last event of a failed stream of completions or chat.

    It contains the retry hint, which is in a header if the answer has not started yet.
    """
    error = _error(refused)
    if refused.retry_after_ms:
        error["retry_after_ms"] = refused.retry_after_ms
    return sse_event(msgspec.json.encode({"error": error}))


def _error(refused: RequestRejected) -> dict[str, object]:
    error: dict[str, object] = {
        "message": refused.message,
        "type": REASON_STATUSES[refused.reason].openai,
        "param": refused.field or None,
        "code": _code(refused),
    }
    if refused.cause:
        error["cause"] = refused.cause
    return error


def _code(refused: RequestRejected) -> str:
    """Return the error code: the reason, or ``context_length_exceeded``, which OpenAI's clients look for in this field."""
    return CONTEXT_LENGTH_EXCEEDED if refused.cause == CONTEXT_LENGTH_EXCEEDED else refused.reason


def responses_error_event(refused: RequestRejected, events: int | None) -> bytes:
    """Return the last event of a failed stream of the Responses API; `events` is the number of events before it, or None."""
    error: dict[str, object] = {
        "type": "error",
        "code": _code(refused),
        "message": refused.message,
        "param": refused.field or None,
    }
    if events is not None:
        error["sequence_number"] = events
    return b"event: error\n" + sse_event(msgspec.json.encode(error))


_ANTHROPIC_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def anthropic_error_body(refused: RequestRejected) -> bytes:
    """Return the body of a rejection in the Messages API."""
    return _anthropic_body(REASON_STATUSES[refused.reason].http, refused.message)


def _anthropic_body(status: int, message: str) -> bytes:
    other = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
    return msgspec.json.encode({"type": "error", "error": error})


def anthropic_error_event(refused: RequestRejected, _events: int | None) -> bytes:
    """Return the last event of a failed stream of the Messages API."""
    return b"event: error\n" + sse_event(anthropic_error_body(refused))


OPENAI_ERRORS = ErrorForm(error_body, error_event)
RESPONSES_ERRORS = ErrorForm(error_body, responses_error_event)
ANTHROPIC_ERRORS = ErrorForm(anthropic_error_body, anthropic_error_event)
