"""KV event health: decides whether an engine's KV events can be trusted, and which alert describes the problem.

Rules:

1. An engine that computes new blocks of a prompt must publish them. An engine is silent if it has served `ENOUGH`
   prompts with new blocks, and has published nothing for the time `patience` after the first of them. (One prompt that is
   new to the router may be in the engine's cache already, but this is unlikely for several such prompts in a row.)
2. If an engine publishes only blocks of another size than the router uses, its events are useless, because the router
   never looks up the hashes of such blocks.
3. If an engine publishes only events of layers that do not keep whole chains, the events are skipped (rule 4 of
   `fleet.backends.kv_events.translator`).
4. After an unreadable batch, the router drops everything that it knows about the cache. The alert stays until the
   translator knows a cached block again.
"""

from collections.abc import Mapping
from enum import StrEnum

from fleet.backends.kv_events.stream import EventStreamCounters
from fleet.backends.kv_events.translator import KvEventTranslator, SkipReason
from fleet.core.clock import Nanos


class KvEventAlert(StrEnum):
    """Reasons why the router cannot rely on a server's KV events.

    The values are public and stable, because a metric has them as a label.
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
"""Advice to administrators for each alert of an external backend. `kv_events` and `block_tokens` are router
settings."""

REFUSED_ATTENTION = (
    SkipReason.SLIDING_WINDOW,
    SkipReason.CHUNKED_ATTENTION,
    SkipReason.MAMBA,
    SkipReason.OTHER_ATTENTION,
)

# An engine that has published nothing is silent only after it has served this many prompts with new blocks (rule 1).
ENOUGH = 3
NEVER = Nanos(1 << 62)  # a value of `patience` so long that an engine never counts as silent


class EventHealth:
    """Decides which alert applies to one engine, from the KV events that it has published since it joined."""

    def __init__(self, books: KvEventTranslator, counters: EventStreamCounters, patience: Nanos) -> None:
        self._books = books
        self._counters = counters
        self._patience = patience
        self._owed = 0  # number of prompts with new blocks that were served since the latest batch of events
        self._owed_since = Nanos(0)
        self._batches_then = 0

    def filled(self, now: Nanos) -> None:
        """Record that the engine has computed a prompt with a new block, which it must publish."""
        if self._counters.batches != self._batches_then:
            self._owed, self._batches_then = 0, self._counters.batches
        if not self._owed:
            self._owed_since = now
        self._owed += 1

    def alert(self, now: Nanos) -> KvEventAlert | None:
        """Return the alert that applies now; None: no problem is known."""
        books, counters = self._books, self._counters
        if counters.unreadable and not len(books):
            return KvEventAlert.UNREADABLE
        if not books.followed:
            if books.passed_over[SkipReason.OTHER_BLOCK_SIZE]:
                return KvEventAlert.OTHER_BLOCK_SIZE
            if any(books.passed_over[why] for why in REFUSED_ATTENTION):
                return KvEventAlert.ATTENTION_REFUSED
        silent = self._owed >= ENOUGH and counters.batches == self._batches_then
        return KvEventAlert.SILENT if silent and now - self._owed_since >= self._patience else None
