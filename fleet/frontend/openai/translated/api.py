"""Translated APIs: APIs that are served as chats, and what their writers of answers have in common.

A translation turns a body into the body of a chat, which is then read, checked and answered like any other chat. It adds
no feature to generation.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import Delta, Finished
from fleet.frontend.openai.requests import OpenAiRequest, read_chat
from fleet.net.http.errors import ErrorForm
from fleet.net.http.exchange import sse_event

Json = dict[str, Any]
Headers = Mapping[bytes, bytes]


class AnswerWriter(Protocol):
    """Writes one answer, as events or as one object."""

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of the next part of the answer; empty if there are none."""
        ...

    def last_chunks(self, finished: Finished) -> bytes:
        """Return the events that end the stream."""
        ...

    def whole(self, finished: Finished) -> bytes:
        """Return the answer as one object; its parts came by `chunk`, whose events were dropped."""
        ...


class AnswerStart(Struct, frozen=True, kw_only=True):
    """The facts of an answer that are known when its request was admitted."""

    request_id: RequestId
    model: ModelName
    prompt_tokens: int
    created: int


class TranslatedRequest(Struct, frozen=True, kw_only=True):
    """A request in the form of a chat, and the maker of its answer's writer."""

    chat: OpenAiRequest
    writer: Callable[[AnswerStart], AnswerWriter]


class TranslatedApi(Struct, frozen=True, kw_only=True):
    """One API."""

    read: Callable[[bytes, RequestId, Nanos, Headers | None], TranslatedRequest]
    """Reads a body; the headers count if they hold hints."""

    errors: ErrorForm
    names: Mapping[str, str]
    """Names of the fields of chats in this API, where they differ."""


def read_translated_chat(
    chat: Json, request_id: RequestId, now: Nanos, headers: Headers | None = None
) -> OpenAiRequest:
    """Read a body of a chat that a translation has made; fields with None are left out.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field of the chat.
    """
    given = {name: value for name, value in chat.items() if value is not None}
    return read_chat(msgspec.json.encode(given), request_id, now, headers)


def named_event(event: Json) -> bytes:
    """Return a server-sent event that is named by its type."""
    return b"event: %s\n%s" % (event["type"].encode(), sse_event(msgspec.json.encode(event)))
