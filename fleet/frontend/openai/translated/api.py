"""Translated APIs: APIs whose requests are served as chats, and the interface of the writers of their answers.

A translation turns a body into the body of a chat, which is then read, checked and answered like any other chat. It adds
no feature to generation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, structs

from fleet.core.clock import Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import Delta, Finished, Sampling
from fleet.frontend.images.files import ImageFile, remote_images
from fleet.frontend.openai.requests import OpenAiRequest, read_chat
from fleet.frontend.openai.translated.answer_events import AnswerEvents
from fleet.net.http.errors import ErrorForm
from fleet.net.http.exchange import sse_event
from fleet.net.status_codes import rename_field

Json = dict[str, Any]
Headers = Mapping[bytes, bytes]


class AnswerWriter(Protocol):
    """Writes one answer in the form of its API, as events or as one object."""

    def chunk(self, delta: Delta) -> bytes:
        """Return the events for the next part of the answer; empty if there are none."""
        ...

    def last_chunks(self, finished: Finished) -> bytes:
        """Return the events that end the stream."""
        ...

    def whole(self, finished: Finished) -> bytes:
        """Return the answer as one object. The caller has passed each part of the answer to `chunk` before."""
        ...


class AnswerStart(Struct, frozen=True, kw_only=True):
    """Values for the head of an answer. They are known when the request has been admitted. `created` is in Unix seconds."""

    request_id: RequestId
    model: ModelName
    prompt_tokens: int
    sampling: Sampling
    created: int
    events: AnswerEvents  # counts the events of the answer


class TranslatedRequest(Struct, frozen=True, kw_only=True):
    """A request that was translated to a chat, and the function that creates the writer of its answer."""

    chat: OpenAiRequest
    writer: Callable[[AnswerStart], AnswerWriter]
    # True if the limit of the reasoning is dropped when some worker of the model cannot obey it.
    has_optional_budget: bool = False


class TranslatedApi(Struct, frozen=True, kw_only=True):
    """One translated API: how its bodies are read, and how its errors and fields are named."""

    read: "ReadTranslated"
    errors: ErrorForm
    names: Mapping[str, str]
    """For error messages: the names of fields in this API by their names in chats, for fields whose names differ."""
    letter: str = ""
    """The letter of this API in the ids of events; empty if it has no streams."""


class ReadTranslated(Protocol):
    """Function that reads the body of a translated API."""

    def __call__(
        self, content: bytes, request_id: RequestId, now: Nanos, headers: Headers | None = None, *, strict: bool = False
    ) -> TranslatedRequest:
        """Read a body; the arguments are those of `read_chat`."""
        ...


def read_translated_chat(
    chat: Json, request_id: RequestId, now: Nanos, headers: Headers | None = None, images: Sequence[ImageFile] = ()
) -> OpenAiRequest:
    """Read the body of a chat to which a request was translated; fields with the value None are left out.

    Args:
        chat: The body.
        request_id: Id of the request if the body has no field `request_id`.
        now: Instant of arrival by the monotonic clock; the deadline is counted from it.
        headers: The request's headers if there are hints among them; otherwise None.
        images: The images of the request before its translation. Errors about images at URLs name the fields of these
            images.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field's name in chats.
    """
    given = {name: value for name, value in chat.items() if value is not None}
    read = read_chat(msgspec.json.encode(given), request_id, now, headers)
    if read.request.remote_images:
        read = structs.replace(read, request=structs.replace(read.request, remote_images=remote_images(images)))
    # Translated APIs send events before the first text. The ids of these events contain the resume token, so it cannot come later.
    if read.request.late_token:
        read = structs.replace(read, request=structs.replace(read.request, late_token=False))
    return read


def without_needless_budget(
    asked: TranslatedRequest, limits_reasoning: Callable[[ModelName], bool]
) -> TranslatedRequest:
    """Return a request without an optional limit of the reasoning, unless each worker of the model can obey the limit.

    A request with a limit goes only to workers that can obey it. So the limit would exclude all other workers.

    Args:
        asked: The request.
        limits_reasoning: Returns whether each worker of a model can obey such a limit.
    """
    request = asked.chat.request
    if not asked.has_optional_budget or request.sampling.thinking_tokens is None or limits_reasoning(request.model):
        return asked
    unlimited = structs.replace(request, sampling=structs.replace(request.sampling, thinking_tokens=None))
    return structs.replace(asked, chat=structs.replace(asked.chat, request=unlimited))


def rename_translated_field(refused: RequestRejected, asked: TranslatedRequest, api: TranslatedApi) -> RequestRejected:
    """Return a rejection of the request `asked`, with the name that the wrong field has in the request's own API."""
    names = asked.chat.names
    if refused.field.startswith("chat.messages["):
        # The messages of the chat have other indices than the messages of the request, because the system prompt and results of
        # tools become messages. So the error names the whole list.
        names = {**names, refused.field: names["chat.messages"]}
    return rename_field(rename_field(refused, names), api.names)


def named_event(event: Json) -> bytes:
    """Return a server-sent event with the field ``event``, whose value is the event's type."""
    return b"event: %s\n%s" % (event["type"].encode(), sse_event(msgspec.json.encode(event)))
