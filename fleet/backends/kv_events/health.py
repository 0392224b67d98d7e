"""KV event health: whether an engine's KV events can be relied on, and which alert says what is wrong.

Rules:

1. An engine that computes new blocks of a prompt has to publish them. One that has served `ENOUGH` such prompts and
   publishes nothing for `patience` after the first of them is silent. (A prompt that is new here may have been served
   by the engine before, but not that many.)
2. If an engine publishes only blocks of another size than requests are cut into, its events are of no use, because
   their names are never looked up.
3. If it publishes only events of layers that do not keep whole chains, they are refused (rule 4 of
   `fleet.backends.kv_events.translator`).
4. An unreadable batch voids what is known. The alert stays until a block is followed again.
"""

from collections.abc import Mapping
from enum import StrEnum

from fleet.backends.kv_events.stream import EventStreamCounters
from fleet.backends.kv_events.translator import KvEventTranslator, SkipReason
from fleet.core.clock import Nanos


class KvEventAlert(StrEnum):
    """Why a server is placed as if it cached nothing. Public and stable: a metric label."""

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
"""Advice for each alert of an external backend: `kv_events` and `block_tokens` are its settings in the router."""

REFUSED_ATTENTION = (
    SkipReason.SLIDING_WINDOW,
    SkipReason.CHUNKED_ATTENTION,
    SkipReason.MAMBA,
    SkipReason.OTHER_ATTENTION,
)

ENOUGH = 3  # prompts (rule 1)
NEVER = Nanos(1 << 62)  # the patience for engines whose silence is noticed elsewhere


class EventHealth:
    """Health of one engine's events since it joined."""

    def __init__(self, books: KvEventTranslator, heard: EventStreamCounters, patience: Nanos) -> None:
        self._books = books
        self._heard = heard
        self._patience = patience
        self._owed = 0  # prompts with new blocks since the latest batch
        self._owed_since = Nanos(0)
        self._batches_then = 0

    def filled(self, now: Nanos) -> None:
        """Note that a prompt with a new block has been computed."""
        if self._heard.batches != self._batches_then:
            self._owed, self._batches_then = 0, self._heard.batches
        if not self._owed:
            self._owed_since = now
        self._owed += 1

    def alert(self, now: Nanos) -> KvEventAlert | None:
        """Return what is wrong now."""
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
