"""Answer events: counts the events of one answer of a translated API, gives them ids, and leaves out those that a client has.

Rules:

1. An answer is a sequence of pieces of text (of reasoning, texts and tool calls) with other events between the pieces. These other
   events depend only on the answer. How the text is cut into pieces also depends on the steps of the engine.
2. So the id of an event contains the resume token and the number of tokens up to the event. It also contains three counts of
   what the client has after this event: other events, characters, and pieces. The last part is the letter of the API, because
   the two translated APIs may turn requests into the same prompt, but they write different events.
3. A resumed answer is written again from its beginning (`Resume.from_start`). As many events and characters as the id names are left
   out. So the client gets exactly what it lacks, even if its stream was cut between two events of one step.
4. The letter is a capital one if the event comes after the last token of the answer. If the client has such an event, but its new
   request lets the answer go on, for example by a larger limit of tokens, the request is refused. The further events would not fit
   those that the client has, and text that was held back until the end may be parsed differently in a longer answer.
"""

from fleet.core.requests import Admitted, Delta
from fleet.frontend.openai.resumable_stream import (
    LastEventId,
    SeenEvents,
    ended_id_error,
    foreign_id_error,
    other_answer_error,
)


class AnswerEvents:
    """Counts the events of one answer, and says which events and which text the client lacks. Events get ids if there are resume tokens."""

    def __init__(self, last: LastEventId | None = None, *, api: str = "") -> None:
        """Start before the first event.

        Args:
            last: What the client of a resumed answer has; None if the answer is new.
            api: Letter of the API in the ids; not needed for an answer without resume tokens.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the id is of an event of another API.
        """
        if last is not None and (last.seen is None or last.seen.api != api):
            raise foreign_id_error()
        seen = SeenEvents() if last is None or last.seen is None else last.seen
        self._events, self._characters, self._pieces = seen.events, seen.characters, seen.pieces
        self._events_to_skip, self._characters_to_skip = seen.events, seen.characters
        self._seen_position = 0 if last is None else last.resume.position
        self._has_end = seen.is_end
        self._api = api
        self._ends = False  # True once the last token has come
        self._token = ""
        self._position = 0

    def follow(self, part: Admitted | Delta) -> None:
        """Count the tokens of the next part of the answer, and note a new resume token.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the answer goes on, although the client has events of its end (rule 4).
        """
        self._token = part.resume_token or self._token
        if isinstance(part, Delta):
            self._position += len(part.token_ids)
            if self._has_end and self._position > self._seen_position:
                raise ended_id_error()
            self._ends = self._ends or part.is_last

    def end(self) -> None:
        """Note that the next events come after the last token."""
        self._ends = True

    def is_new(self) -> bool:
        """Count an event that is no piece of text, and return whether the client lacks it.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the client has more text, or more events before the end, than this answer has.
        """
        if self._events_to_skip:
            if self._ends and not self._has_end:
                raise other_answer_error()
            self._events_to_skip -= 1
            return False
        if self._characters_to_skip:
            raise other_answer_error()
        self._events += 1
        return True

    def new_part(self, piece: str) -> str:
        """Count a piece of text, and return the part of it that the client lacks.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the client has later events, so this answer is not the one that it has.
        """
        known = min(self._characters_to_skip, len(piece))
        self._characters_to_skip -= known
        if part := piece[known:]:
            if self._events_to_skip:
                raise other_answer_error()
            self._characters += len(part)
            self._pieces += 1
        return part

    @property
    def sent(self) -> int:
        """The number of events that the client has, including the one that was counted last."""
        return self._events + self._pieces

    def id_line(self) -> bytes:
        """Return the line with the id of the latest event; empty if the client did not ask for ids."""
        if not self._token:
            return b""
        counts = (self._position, self._events, self._characters, self._pieces)
        api = self._api.upper() if self._ends else self._api
        return b"id: %b.%d.%d.%d.%d.%b\n" % (self._token.encode(), *counts, api.encode())
