"""Hosted endpoint: sends a request to an OpenAI-compatible service, and passes the answer on to the client.

Rules:

1. The endpoint gets the client's body with the endpoint's own name of the model and without `ROUTER_FIELDS`. If the body
   has no limit for the answer's length, one is added. For a stream, the body asks for the usage. If the client did not ask
   for it, the event that contains only the usage is not passed on.
2. A failure before the first byte of the answer raises `EndpointFailed`, and the caller may give the client another
   answer. A failure after the first byte ends the answer.
3. A status other than 2xx counts as a failure before the first byte. The client sent its request to its own cluster, so
   an error about the endpoint's key or limits would mislead the client. The text of such an error is shown only to
   administrators.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta, Struct

from fleet.backends.external.http_client import FIRST_FINAL_STATUS, ServerAddress, connection_failure_cause
from fleet.core.errors import Reason, RequestRejected
from fleet.net.http.exchange import EVENT_STREAM, Exchange
from fleet.router.settings.overflow import OverflowSettings

FIRST_REDIRECT = 300
FIRST_ERROR = 400
ENDPOINT_AT_FAULT = frozenset({401, 402, 403, 404, 408, 429})
"""HTTP statuses below 500 after which the endpoint would probably reject the next request as well. So it gets no requests
for a pause (rule 4 of `overflow.py`)."""

ROUTER_FIELDS = ("fleet", "priority", "request_id", "session_id")
"""Fields of a body that only the router uses. They do not change the answer and are not sent to the endpoint."""

MAX_EVENT_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20
EXCERPT_BYTES = 200
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data:[ \t]*([^\r\n]*)", re.MULTILINE)

Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]


class HostedUsage(Struct, frozen=True, kw_only=True):
    """Token counts that an endpoint reports."""

    prompt_tokens: Tokens
    completion_tokens: Tokens


class _UsageCarrier(Struct, frozen=True, kw_only=True):
    """The fields of an answer, or of an event of a stream, that the router reads."""

    usage: HostedUsage | None = None
    choices: list[Any] = []


class HostedAnswer(Struct, kw_only=True):
    """Collects what is known about an endpoint's answer while it arrives.

    The caller can read this object even if the answer broke off.
    """

    usage: HostedUsage | None = None


class EndpointFailed(Exception):
    """The endpoint gave no answer, and nothing was sent to the client.

    Attributes:
        message: The cause, as clients may see it; it contains nothing about other tenants.
        excerpt: The beginning of the endpoint's error text, for administrators.
        computed: True if the endpoint may have computed, and charged, an answer.
        at_fault: True if the endpoint should get no requests for a while.
    """

    def __init__(self, message: str, *, computed: bool, at_fault: bool, excerpt: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.excerpt = excerpt
        self.computed = computed
        self.at_fault = at_fault


def hosted_body(
    body: bytes, model: str, max_answer_tokens: int, *, streams: bool, defaults: Mapping[str, float]
) -> bytes:
    """Return the body for the endpoint (rule 1).

    Args:
        body: The client's body, which the router's OpenAI API has accepted.
        model: The name of the model at the endpoint.
        max_answer_tokens: The limit of the answer if the body has none.
        streams: Whether the answer is streamed.
        defaults: Values of sampling parameters that the body leaves out.
    """
    fields: dict[str, Any] = msgspec.json.decode(body)
    for name in ROUTER_FIELDS:
        fields.pop(name, None)
    fields |= defaults
    fields["model"] = model
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    if fields.get(limit) is None:
        fields[limit] = max_answer_tokens
    if streams:
        fields["stream_options"] = (fields.get("stream_options") or {}) | {"include_usage": True}
    return msgspec.json.encode(fields)


class HostedEndpoint:
    """Sends requests to the hosted endpoint of one model, and passes the answers on to the clients."""

    def __init__(self, settings: OverflowSettings, session: aiohttp.ClientSession) -> None:
        self._first_byte = settings.first_byte_seconds
        self._silence = settings.silence_seconds
        self._address = ServerAddress.of(settings.url, "")
        self._session = session

    async def answer(
        self,
        path: str,
        body: bytes,
        api_key: str,
        exchange: Exchange,
        headers: Sequence[tuple[str, str]],
        known: HostedAnswer,
        *,
        streams: bool,
        include_usage: bool,
        most_seconds: float | None,
    ) -> None:
        """Send a request to the endpoint and pass its answer on to the client.

        Args:
            path: Path of the OpenAI API.
            body: Body for the endpoint.
            api_key: Bearer token for the endpoint; empty: none.
            exchange: The client's request, to which the answer goes.
            headers: Headers of the answer to the client.
            known: Object in which the usage is stored as soon as the endpoint reports it.
            streams: True if the client wants a stream.
            include_usage: True if the client wants the usage of a stream.
            most_seconds: Maximum duration of the request: the seconds until the client's deadline; None: no deadline.

        Raises:
            EndpointFailed: The endpoint gave no answer, and nothing was sent to the client.
            RequestRejected: The answer broke off, or the deadline has passed.
            ClientDisconnected: The client has disconnected.
        """
        sent, deadline = False, asyncio.timeout(most_seconds)
        try:
            async with (
                deadline,
                asyncio.timeout(self._first_byte) as limit,
                self._post(path, body, api_key) as answer,
            ):
                sent = True
                await _check_status(answer, api_key)
                silence = _SilenceLimit(limit, self._silence)
                if streams:
                    await _stream(answer, exchange, headers, known, silence, include_usage=include_usage)
                else:
                    await _whole(answer, exchange, headers, known, silence)
        except (aiohttp.ClientError, OSError, ValueError, _BadAnswer) as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                message = "the deadline passed before the answer of the hosted endpoint was complete"
                raise RequestRejected(Reason.DEADLINE_PASSED, message) from error
            cause = connection_failure_cause(error)
            if exchange.began:
                message = f"the hosted endpoint broke the answer off: {cause}"
                raise RequestRejected(Reason.WORKER_LOST, message) from error
            never_sent = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.InvalidURL))
            raise EndpointFailed(cause, computed=sent or not never_sent, at_fault=True) from error

    def _post(self, path: str, body: bytes, api_key: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        headers = {"content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        return self._session.post(
            self._address.url(path), data=body, headers=headers, ssl=self._address.tls or True, allow_redirects=False
        )


class _BadAnswer(Exception):
    """Error: the endpoint's answer does not follow the OpenAI API."""


class _SilenceLimit(Struct, frozen=True):
    """Limits the time until the next bytes of the endpoint's answer arrive."""

    timeout: asyncio.Timeout
    seconds: float

    def renew(self) -> None:
        self.timeout.reschedule(asyncio.get_running_loop().time() + self.seconds)

    def suspend(self) -> None:
        """Stop the limit while the router waits for the client to read."""
        self.timeout.reschedule(None)


async def _check_status(answer: aiohttp.ClientResponse, api_key: str) -> None:
    if FIRST_FINAL_STATUS <= answer.status < FIRST_REDIRECT:
        return
    excerpt = (await answer.content.read(EXCERPT_BYTES + len(api_key))).decode("latin-1")
    at_fault = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR or answer.status in ENDPOINT_AT_FAULT
    if api_key:
        # Replace the key before the text is cut, so that no part of a key remains.
        excerpt = excerpt.replace(api_key, "KEY")
    message = f"it answered with status {answer.status}"
    raise EndpointFailed(
        message, computed=False, at_fault=at_fault or answer.status < FIRST_ERROR, excerpt=excerpt[:EXCERPT_BYTES]
    )


async def _stream(
    answer: aiohttp.ClientResponse,
    exchange: Exchange,
    headers: Sequence[tuple[str, str]],
    known: HostedAnswer,
    silence: _SilenceLimit,
    *,
    include_usage: bool,
) -> None:
    if "event-stream" not in answer.content_type:
        raise _BadAnswer(f"its answer is {answer.content_type}, and a stream was asked for")
    async for events in _events(answer):
        kept: list[bytes] = []
        done = False
        for event in events:
            data = b"".join(_DATA.findall(event))
            done = done or data == b"[DONE]"
            if b'"usage"' in data and not _noted(data, known) and not include_usage:
                continue
            kept.append(event)
        if kept:
            exchange.send(b"".join(kept), content_type=EVENT_STREAM, headers=headers, last=done)
            silence.suspend()
            await exchange.drained()
        if done:
            return
        silence.renew()
    raise _BadAnswer("the stream ended before its last event")


def _noted(data: bytes, known: HostedAnswer) -> bool:
    """Record the usage in an event, if any, in `known`; return True if the event contains anything besides a usage."""
    try:
        carrier = msgspec.json.decode(data, type=_UsageCarrier)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    if carrier.usage is None:
        return True
    known.usage = carrier.usage
    return bool(carrier.choices)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """Yield a list of the events that each read of the answer has completed; each event includes the empty line at its end.

    Raises:
        _BadAnswer: An event is longer than `MAX_EVENT_BYTES`.
    """
    held = b""
    async for part in answer.content.iter_any():
        held += part
        events, begin = [], 0
        for end in _EVENT_END.finditer(held):
            events.append(held[begin : end.end()])
            begin = end.end()
        held = held[begin:]
        if len(held) > MAX_EVENT_BYTES:
            raise _BadAnswer(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        if events:
            yield events


async def _whole(
    answer: aiohttp.ClientResponse,
    exchange: Exchange,
    headers: Sequence[tuple[str, str]],
    known: HostedAnswer,
    silence: _SilenceLimit,
) -> None:
    content = bytearray()
    async for part in answer.content.iter_any():
        silence.renew()
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise _BadAnswer(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
    try:
        carrier = msgspec.json.decode(content, type=_UsageCarrier)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _BadAnswer(f"its answer is not JSON: {error}") from error
    known.usage = carrier.usage
    exchange.respond(answer.status, bytes(content), headers=headers)
