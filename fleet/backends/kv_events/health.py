"""Whether an engine's KV events can be relied on: what is wrong with them, by name.

Rules:

1. Whoever serves a prompt of which a block was new has to say so. One that has served `ENOUGH` of them and says nothing for
   `patience` after the first is silent. (A prompt that is new here may have been asked for elsewhere, before; not so many.)
2. Blocks of another size than requests are cut by, and of no other, are no use: no name of theirs is ever asked for.
3. Events of layers that keep no whole chain, and of no other, are refused (rule 4 of `fleet.backends.kv_events.translator`).
4. What could not be read voids what is known, and is told until something is followed again.
"""

from collections.abc import Mapping
from enum import StrEnum

from fleet.backends.kv_events.stream import EventStreamCounters
from fleet.backends.kv_events.translator import KvEventTranslator, SkipReason
from fleet.core.clock import Nanos


class KvEventAlert(StrEnum):
    """Why a server is placed as if it held nothing. Public and stable: a metric label."""

    SILENT = "silent"
    OTHER_BLOCK_SIZE = "other_block_size"
    ATTENTION_REFUSED = "attention_refused"
    UNREADABLE = "unreadable"


ADVICE: Mapping[KvEventAlert, str] = {
    KvEventAlert.SILENT: "it serves requests and publishes no KV events: switch them on there, or take kv_events out here",
    KvEventAlert.OTHER_BLOCK_SIZE: "its KV events are of blocks of another size: set block_tokens to it",
    KvEventAlert.ATTENTION_REFUSED: "its layers keep no whole prompts (sliding windows, Mamba): take kv_events out here",
    KvEventAlert.UNREADABLE: "its KV events cannot be read: its version may be too new",
}
"""One line each on what to do, for a foreign server: `kv_events` and `block_tokens` are of its settings in the router."""

REFUSED_ATTENTION = (
    SkipReason.SLIDING_WINDOW,
    SkipReason.CHUNKED_ATTENTION,
    SkipReason.MAMBA,
    SkipReason.OTHER_ATTENTION,
)

ENOUGH = 3  # prompts; see rule 1
NEVER = Nanos(1 << 62)  # a patience for engines whose silence is noticed by others


class EventHealth:
    """Of one engine, from when it joined."""

    def __init__(self, books: KvEventTranslator, heard: EventStreamCounters, patience: Nanos) -> None:
        self._books = books
        self._heard = heard
        self._patience = patience
        self._owed = 0  # prompts since the latest batch
        self._owed_since = Nanos(0)
        self._batches_then = 0

    def filled(self, now: Nanos) -> None:
        """A prompt of which a block was new has been computed."""
        if self._heard.batches != self._batches_then:
            self._owed, self._batches_then = 0, self._heard.batches
        if not self._owed:
            self._owed_since = now
        self._owed += 1

    def alert(self, now: Nanos) -> KvEventAlert | None:
        """What is wrong now."""
        books, heard = self._books, self._heard
        if heard.unreadable and not len(books):
            return KvEventAlert.UNREADABLE
        if not books.followed:
            if books.passed_over[SkipReason.OTHER_BLOCK_SIZE]:
                return KvEventAlert.OTHER_BLOCK_SIZE
            if any(books.passed_over[why] for why in REFUSED_ATTENTION):
                return KvEventAlert.ATTENTION_REFUSED
        silent = self._owed >= ENOUGH and heard.batches == self._batches_then
        return KvEventAlert.SILENT if silent and now - self._owed_since >= self._patience else None
