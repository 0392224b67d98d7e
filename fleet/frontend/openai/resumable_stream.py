"""Resumable stream: ids of server-sent events, with which a client goes on by `Last-Event-ID` at any router.

Rules:

1. Only streams of requests that ask for it have ids (`fleet.resumable`, or the header `x-fleet-resumable`).
2. An id is the resume token, the number of tokens that the client has with this event, and for the last events of an
   answer their number among them. So the events after an id are those that an undisturbed stream would have sent.
3. The client sends the same request with the id of the last event that it has. The answer keeps its `id` and `created`.
4. Streams whose events depend on more than the text and the tokens after an id cannot be resumed: those with several
   answers, echoed prompts, token ids, or log probabilities with offsets of text. They are refused.
"""

import re
from collections.abc import Mapping

from msgspec import Struct

from fleet.core.errors import invalid
from fleet.core.requests import Admitted, Delta, Resume

LAST_EVENT_ID = b"last-event-id"
MAX_EVENT_ID_CHARACTERS = 8192
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]+)\.([0-9]{1,9})(?:\.([0-9]{1,2}))?")
_EVENT_END = b"\n\n"

NAMES: Mapping[str, str] = {"resume.token": "last-event-id", "resume.token_ids": "last-event-id"}
"""The header's name for fields of the public protocol."""


class LastEventId(Struct, frozen=True):
    """A `Last-Event-ID` that was read."""

    resume: Resume
    last_events: int  # how many of the answer's last events the client has


def read_last_event_id(headers: Mapping[bytes, bytes]) -> LastEventId | None:
    """Return what the header says; None without the header.

    Raises:
        RequestRejected: INVALID_ARGUMENT; it is no id of a resumable stream.
    """
    value = headers.get(LAST_EVENT_ID)
    if not value:
        return None
    found = _EVENT_ID.fullmatch(value.decode("latin-1")) if len(value) <= MAX_EVENT_ID_CHARACTERS else None
    if found is None:
        raise invalid("last-event-id", "is not the id of an event of a resumable stream")
    token, position, last_events = found.groups()
    return LastEventId(Resume(token=token, position=int(position)), int(last_events or 0))


class EventIds:
    """Ids of the events of one answer."""

    def __init__(self, seen: LastEventId | None) -> None:
        self._token = ""
        self._position = 0 if seen is None else seen.resume.position
        self._last_events = 0 if seen is None else seen.last_events

    def follow(self, event: Admitted | Delta) -> None:
        """Note what the next event adds to the answer."""
        self._token = event.resume_token or self._token
        if isinstance(event, Delta):
            self._position += len(event.token_ids)

    def numbered(self, event: bytes) -> bytes:
        """Return an event with its id."""
        return b"id: %b.%d\n%b" % (self._token.encode(), self._position, event)

    def numbered_last(self, events: bytes) -> bytes:
        """Return the last events with their ids, without those that the client has."""
        token = self._token.encode()
        each = [event + _EVENT_END for event in events.split(_EVENT_END) if event]
        return b"".join(
            b"id: %b.%d.%d\n%b" % (token, self._position, number, event)
            for number, event in enumerate(each, 1)
            if number > self._last_events
        )
