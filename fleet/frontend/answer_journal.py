"""Answer journal: the tokens of resumable answers whose clients keep no tokens.

Rules:

1. Only answers over server-sent events are noted, for clients that send `Last-Event-ID` when they come back. Fleet's own
   client library keeps its tokens.
2. The router that serves an answer notes its tokens before the client gets them, and tells them to its peers
   (`fleet.peers`), so that a router that is killed leaves them behind.
3. An answer is forgotten a set time after its last tokens. Beyond a set memory, those that got none for the longest time
   are forgotten first. What is missing then is generated again, where that gives the same tokens (`ResumedAnswer`).
4. Tokens that do not follow on what is known are not noted: an answer has no gap.
5. Each resumption is a new turn of the answer. What a router still notes of an earlier turn, as one that hung does when it
   goes on, is ignored: its client has left.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec import Struct

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.requests import TOKEN_BYTES

AnswerKey = int
"""`ResumeClaims.answer`: 64 random bits. Request ids are the clients' own and may be used twice."""

ENTRY_BYTES = 400  # of an answer besides its tokens


class JournalEntry(Struct, frozen=True):
    """Some tokens of an answer."""

    key: AnswerKey
    turn: int  # how often the answer was resumed before
    position: int  # tokens of the answer before them
    token_ids: Sequence[int]


class _Answer(Struct):
    tokens: bytearray
    turn: int
    at: Nanos


class AnswerJournal:
    """The journal of one router process: its own answers, and those of its peers."""

    def __init__(self, max_bytes: int, seconds: float, clock: Clock) -> None:
        """Begin empty.

        Args:
            max_bytes: Limit of the memory; 0: nothing is noted.
            seconds: Time for which an answer without new tokens is kept.
            clock: For that time.
        """
        self.tell: Callable[[JournalEntry], None] | None = None
        """Tells peers of new tokens of this router's answers; None: there are no peers."""

        self._max_bytes = max_bytes
        self._keep = int(seconds * SECOND)
        self._clock = clock
        self._answers: OrderedDict[AnswerKey, _Answer] = OrderedDict()  # the one with the oldest tokens first
        self.held_bytes = 0

    def note(self, entry: JournalEntry) -> None:
        """Note tokens of an answer of this router, and tell the peers."""
        self.heard(entry)
        if self.tell is not None:
            self.tell(entry)

    def heard(self, entry: JournalEntry) -> None:
        """Note tokens of an answer of any router."""
        now, begin = self._clock.now(), entry.position * TOKEN_BYTES
        answer = self._answers.get(entry.key)
        held = 0 if answer is None else len(answer.tokens)
        if begin > held or not self._max_bytes or (answer is not None and entry.turn < answer.turn):
            return
        if answer is None:
            answer = self._answers[entry.key] = _Answer(bytearray(), entry.turn, now)
            self.held_bytes += ENTRY_BYTES
        else:
            self._answers.move_to_end(entry.key)
        answer.turn, answer.at = entry.turn, now
        answer.tokens[begin:] = np.asarray(entry.token_ids, "<u4").tobytes()
        self.held_bytes += len(answer.tokens) - held
        self._forget(now)

    def tokens(self, key: AnswerKey) -> tuple[int, ...]:
        """Return the known tokens of an answer, from the first one on."""
        self._forget(self._clock.now())
        answer = self._answers.get(key)
        return () if answer is None else tuple(memoryview(bytes(answer.tokens)).cast("I"))

    def entries(self) -> Iterator[JournalEntry]:
        """Yield all that is known, for a peer that is reached later."""
        for key, answer in list(self._answers.items()):
            if known := self.tokens(key):
                yield JournalEntry(key, answer.turn, 0, known)

    def _forget(self, now: Nanos) -> None:
        while self._answers:
            key, oldest = next(iter(self._answers.items()))
            if self.held_bytes <= self._max_bytes and now - oldest.at <= self._keep:
                return
            del self._answers[key]
            self.held_bytes -= len(oldest.tokens) + ENTRY_BYTES
