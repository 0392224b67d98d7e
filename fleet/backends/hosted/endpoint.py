"""Hosted endpoint: one request to an OpenAI-compatible service, and its answer on the way to the client.

Rules:

1. The body is the client's, with the endpoint's name of the model, without `ROUTER_FIELDS`, and with a
   limit of the answer. Streams ask for their usage; the event that only holds the usage is not passed on to a client that did not ask for it.
2. A failure before the first byte is `EndpointFailed`, and the client may get another answer. A later one breaks the answer off.
3. An answer with a status of 400 or more is such a failure too: the client's request was one for its own cluster, and an error about
   the endpoint's key or limits would mislead it. What the endpoint said about it is for operators alone.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
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
"""Statuses below 500 after which the endpoint would refuse the next request as well."""

ROUTER_FIELDS = ("fleet", "priority", "request_id", "session_id")
"""Fields that tell the router how to treat a request, and do not change its answer."""

MAX_EVENT_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20
EXCERPT_BYTES = 200
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data:[ \t]*([^\r\n]*)", re.MULTILINE)

Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]


class HostedUsage(Struct, frozen=True, kw_only=True):
    """Usage that an endpoint reports."""

    prompt_tokens: Tokens
    completion_tokens: Tokens


class _UsageCarrier(Struct, frozen=True, kw_only=True):
    """The part of an answer or event that is read."""

    usage: HostedUsage | None = None
    choices: list[Any] = []


class HostedAnswer(Struct, kw_only=True):
    """Facts about an answer so far; it stays readable when the answer breaks off."""

    usage: HostedUsage | None = None


class EndpointFailed(Exception):
    """The endpoint gave no answer, and nothing was sent to the client.

    Attributes:
        message: Why, for clients; all tenants may read it.
        excerpt: What the endpoint said, for operators.
        computed: Whether the endpoint may have computed, and charged, an answer.
        at_fault: Whether the endpoint should get no requests for a while.
    """

    def __init__(self, message: str, *, computed: bool, at_fault: bool, excerpt: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.excerpt = excerpt
        self.computed = computed
        self.at_fault = at_fault


def hosted_body(body: bytes, model: str, max_answer_tokens: int, *, streams: bool) -> bytes:
    """Return the body for the endpoint (rule 1); `body` is one that the OpenAI API has accepted."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    for name in ROUTER_FIELDS:
        fields.pop(name, None)
    fields["model"] = model
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    if fields.get(limit) is None:
        fields[limit] = max_answer_tokens
    if streams:
        fields["stream_options"] = (fields.get("stream_options") or {}) | {"include_usage": True}
    return msgspec.json.encode(fields)


class HostedEndpoint:
    """The endpoint of one model."""

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
        """Send a request and pass its answer on.

        Args:
            path: Path of the API.
            body: Body for the endpoint.
            api_key: Its bearer token; empty: none.
            exchange: Takes the answer.
            headers: Headers of the answer.
            known: Gets the usage as soon as it is reported.
            streams: Whether the client wants a stream.
            include_usage: Whether the client wants the usage of a stream.
            most_seconds: Time until the client's deadline; None: it has none.

        Raises:
            EndpointFailed: There is no answer, and nothing was sent to the client.
            RequestRejected: The answer broke off, or the deadline has passed.
            ClientDisconnected: The client has gone.
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
    """The answer is not one of the OpenAI API."""


class _SilenceLimit(Struct, frozen=True):
    """Time limit of the next bytes of an answer."""

    timeout: asyncio.Timeout
    seconds: float

    def renew(self) -> None:
        self.timeout.reschedule(asyncio.get_running_loop().time() + self.seconds)

    def suspend(self) -> None:
        """Set no limit, while the client reads."""
        self.timeout.reschedule(None)


async def _check_status(answer: aiohttp.ClientResponse, api_key: str) -> None:
    if FIRST_FINAL_STATUS <= answer.status < FIRST_REDIRECT:
        return
    excerpt = (await answer.content.read(EXCERPT_BYTES + len(api_key))).decode("latin-1")
    at_fault = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR or answer.status in ENDPOINT_AT_FAULT
    if api_key:
        excerpt = excerpt.replace(api_key, "KEY")  # before it is cut, so that no part of a key stays
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
    """Note the usage of an event; return whether it holds anything else."""
    try:
        carrier = msgspec.json.decode(data, type=_UsageCarrier)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    if carrier.usage is None:
        return True
    known.usage = carrier.usage
    return bool(carrier.choices)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """Yield the events that each read completes, with the empty lines that end them."""
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
