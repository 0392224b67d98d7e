"""Resumable stream: ids of server-sent events. With an id in the header `Last-Event-ID`, a client continues a broken stream at any router.

Rules:

1. Only streams of requests that ask for it have ids (`fleet.resumable`, or the header `x-fleet-resumable`).
2. The id of an event has two parts, or three: the resume token, the number of tokens up to this event, and, for the last
   events of an answer, the number of this event among them. So a resumed stream goes on with exactly the events that an
   undisturbed stream would have sent. If the client already has some of the last events, but its new request lets the answer go
   on, for example by a larger `max_tokens`, the request is refused. Otherwise the client would get tokens after these events,
   and as many last events would be missing at the new end.
3. To go on, the client sends the same request with the id of the last event that it has. The answer keeps its `id` and
   `created`.
4. A stream can only be resumed if its events depend on nothing but the text and the tokens after an id. So requests for
   ids are refused if they also want several answers, echoed prompts, log probabilities of the prompt, token ids, the usage in
   each event, or log probabilities with offsets of text.
5. The id of the very last event of an answer ends in `z`. A client that names it has the whole answer. So only the signature of its
   resume token is checked, and the stream ends at once, without events (status 204).
6. The ids of the Responses and the Messages API have more parts (`fleet.frontend.openai.translated.answer_events`).
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from fleet.core.errors import RequestRejected, invalid
from fleet.core.requests import Resume

LAST_EVENT_ID = b"last-event-id"
MAX_EVENT_ID_CHARACTERS = 8192
_EVENT_ID = re.compile(
    r"([A-Za-z0-9_-]+)\.([0-9]{1,9})(?:\.([0-9]{1,2})|\.([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})\.([a-yA-Y]))?(z?)"
)
_EVENT_END = b"\n\n"

NAMES: Mapping[str, str] = {"resume.token": "last-event-id", "resume.token_ids": "last-event-id"}
"""Names for error messages: the values of these fields come from a header, so messages name the header."""


class SeenEvents(Struct, frozen=True):
    """States which events of an answer of a translated API the client has (`fleet.frontend.openai.translated.answer_events`)."""

    events: int = 0  # number of events that are not pieces of text
    characters: int = 0  # number of characters in all pieces of text
    pieces: int = 0  # number of pieces of text
    api: str = ""  # letter by which event ids name the translated API; always lower case here
    is_end: bool = False  # True if the last one of these events comes after the last token of the answer


class LastEventId(Struct, frozen=True):
    """The decoded header `Last-Event-ID`, which states which part of a resumed answer the client has."""

    resume: Resume
    last_events: int = 0  # number of the answer's last events that the client already has
    seen: SeenEvents | None = None  # None: the API is not a translated one
    is_whole: bool = False  # True if the client has the whole answer (rule 5)


def read_last_event_id(headers: Mapping[bytes, bytes]) -> LastEventId | None:
    """Return the content of the header `Last-Event-ID`; None without this header.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the header holds no event id of a resumable stream.
    """
    value = headers.get(LAST_EVENT_ID)
    if not value:
        return None
    found = _EVENT_ID.fullmatch(value.decode("latin-1")) if len(value) <= MAX_EVENT_ID_CHARACTERS else None
    if found is None:
        raise invalid("last-event-id", "is not the id of an event of a resumable stream")
    token, position, last_events, *counts, api, last = found.groups()
    if counts[0] is None:
        return LastEventId(Resume(token=token, position=int(position)), int(last_events or 0), is_whole=bool(last))
    resume = Resume(token=token, position=int(position), from_start=True)
    events, characters, pieces = map(int, counts)
    return LastEventId(
        resume, seen=SeenEvents(events, characters, pieces, api.lower(), api.isupper()), is_whole=bool(last)
    )


def mark_last(events: bytes) -> bytes:
    """Mark the id of the last one of these events as that of the very last event of an answer (rule 5). Do nothing if they have no ids."""
    begin = events.rfind(b"\nid: ") + 1
    if not events.startswith(b"id: ", begin):
        return events
    end = events.index(b"\n", begin)
    return b"%bz%b" % (events[:end], events[end:])


def foreign_id_error() -> RequestRejected:
    """Return the error for the id of an event of another API."""
    return invalid(
        LAST_EVENT_ID.decode(),
        "is the id of an event of another API; send it to the API that gave it",
    )


def ended_id_error() -> RequestRejected:
    """Return the error for an answer that goes on, although the client has events of its end."""
    return invalid(
        LAST_EVENT_ID.decode(),
        "is of the end of the answer, but with these fields the answer goes on; send the fields of the first request, or the id of"
        " an event before the end",
    )


def other_answer_error() -> RequestRejected:
    """Return the error for an answer that lacks events or text that the client has."""
    return invalid(
        LAST_EVENT_ID.decode(),
        "is of another answer than the one that these fields give; send the fields of the first request",
    )


class EventIds:
    """Adds ids to the events of one answer. The caller itself adds the ids of events with tokens, because a call for each token would cost time."""

    def __init__(self, seen: LastEventId | None) -> None:
        """Start after the last event that the client has. `seen` is None if the answer is new.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the id is of an event of a translated API.
        """
        if seen is not None and seen.seen is not None:
            raise foreign_id_error()
        self.beginning = b""
        """The beginning of the line with an id: ``id: ``, the resume token and a dot; empty until `begin` is called."""

        self._last_events = 0 if seen is None else seen.last_events

    def begin(self, resume_token: str) -> None:
        """Use this resume token in the ids of the next events."""
        self.beginning = b"id: %b." % resume_token.encode()

    def check_goes_on(self) -> None:
        """Check, before further tokens are sent, that the client has none of the answer's last events.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the client has some of these events.
        """
        if self._last_events:
            raise ended_id_error()

    def numbered(self, event: bytes, position: int) -> bytes:
        """Return the event with its id before it. `position` is the number of tokens up to this event."""
        return b"%b%d\n%b" % (self.beginning, position, event)

    def numbered_last(self, events: bytes, position: int) -> bytes:
        """Return the events that end an answer of `position` tokens, with ids, except the events that the client already has."""
        start = b"%b%d." % (self.beginning, position)
        numbered = b"".join(
            [
                b"%b%d\n%b\n\n" % (start, number, event)
                for number, event in enumerate(events.removesuffix(_EVENT_END).split(_EVENT_END), 1)
                if event and number > self._last_events
            ]
        )
        return mark_last(numbered)
