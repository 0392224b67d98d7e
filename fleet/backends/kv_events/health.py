"""KV event health: decides whether an engine's KV events can be trusted, and which alert describes the problem.

Rules:

1. An engine that computes new blocks of a prompt must publish them. An engine is silent if it has served `ENOUGH`
   prompts with new blocks and has published nothing for `patience` after the first of them. (The engine may have served
   a prompt that is new to the router before, but not several such prompts in a row.)
2. If an engine publishes only blocks of another size than the router uses, its events are useless, because their names
   are never looked up.
3. If an engine publishes only events of layers that do not keep whole chains, the events are skipped (rule 4 of
   `fleet.backends.kv_events.translator`).
4. After an unreadable batch, everything known about the cache is dropped. The alert stays until a block is followed
   again.
"""

from collections.abc import Mapping
from enum import StrEnum

from fleet.backends.kv_events.stream import EventStreamCounters
from fleet.backends.kv_events.translator import KvEventTranslator, SkipReason
from fleet.core.clock import Nanos


class KvEventAlert(StrEnum):
    """Why the router places requests as if a server cached nothing.

    The values are public and stable: a metric label.
    """

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

ENOUGH = 3  # number of prompts (rule 1)
NEVER = Nanos(1 << 62)  # the patience for engines whose silence is detected elsewhere


class EventHealth:
    """Checks one engine's KV events since the engine joined, and returns the alert that applies."""

    def __init__(self, books: KvEventTranslator, heard: EventStreamCounters, patience: Nanos) -> None:
        self._books = books
        self._heard = heard
        self._patience = patience
        self._owed = 0  # number of prompts with new blocks since the latest batch
        self._owed_since = Nanos(0)
        self._batches_then = 0

    def filled(self, now: Nanos) -> None:
        """Record that the engine has computed a prompt with a new block."""
        if self._heard.batches != self._batches_then:
            self._owed, self._batches_then = 0, self._heard.batches
        if not self._owed:
            self._owed_since = now
        self._owed += 1

    def alert(self, now: Nanos) -> KvEventAlert | None:
        """Return the alert that applies now; None: the events can be trusted."""
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
