"""Answer journal: the tokens of resumable answers whose clients keep no tokens.

Rules:

1. The journal only notes answers over server-sent events, whose clients come back with the header `Last-Event-ID`.
   Fleet's own client library needs no journal, because it keeps the tokens itself.
2. The router that serves an answer notes the tokens before the client gets them, and sends them to its peer routers
   (`fleet.peers`). So the peers still have them if that router is killed. The tokens that all answers get in one turn of
   the event loop are sent together. If sending fails, the event loop logs the error, and the clients get their tokens.
3. An answer is forgotten a set time after its last tokens. If the journal exceeds its memory limit, the answers without new
   tokens for the longest time are forgotten first. A router that lacks the tokens generates them again, where that gives
   the same tokens (`ResumedAnswer`).
4. Tokens that would leave a gap after the known tokens of an answer are not noted.
5. Each stream has an entry of its own: an answer that is resumed begins a new one with its known tokens. Otherwise, two
   streams of one answer at random would mix their tokens. Two streams run, for example, if a router hung and goes on
   although its client now reads from another router.
6. Routers of earlier versions note a resumed answer under the key of its first stream. Their `turn` counts how often it was
   resumed, and tokens of an earlier turn than the known one are ignored.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.requests import TOKEN_BYTES

AnswerKey = int
"""Key of an answer as one stream has it: `ResumeClaims.stream`, 64 random bits. Request ids do not serve as keys, because clients may use one twice."""

ENTRY_BYTES = 400  # memory for an answer besides its tokens


class JournalEntry(Struct, frozen=True):
    """Consecutive tokens of one answer, as routers note them and send them to each other."""

    key: AnswerKey
    turn: int  # how often the answer had been resumed when these tokens came
    position: int  # number of the answer's tokens before `token_ids`
    token_ids: Sequence[int]


class _Answer(Struct):
    tokens: bytearray
    turn: int
    at: Nanos


class AnswerJournal:
    """Keeps the tokens of answers that this router process or its peer routers serve."""

    def __init__(self, max_bytes: int, seconds: float, clock: Clock) -> None:
        """Create an empty journal.

        Args:
            max_bytes: Memory limit; with 0 the journal notes nothing.
            seconds: Time for which an answer without new tokens is kept.
            clock: Clock that measures this time.
        """
        self.tell: Callable[[Sequence[JournalEntry]], None] | None = None
        """Sends new tokens of this router's answers to the peer routers; None if there are no peers."""

        self._max_bytes = max_bytes
        self._keep = int(seconds * SECOND)
        self._clock = clock
        # The answers in the order of their latest tokens, oldest first.
        self._answers: OrderedDict[AnswerKey, _Answer] = OrderedDict()
        self.held_bytes = 0
        self._untold: list[JournalEntry] = []  # what the peer routers get at the end of this turn

    async def note(self, entry: JournalEntry) -> None:
        """Note tokens of an answer of this router, and wait until they have been sent to the peer routers."""
        self.heard(entry)
        if self.tell is not None:
            if not self._untold:
                asyncio.get_running_loop().call_soon(self._tell)
            self._untold.append(entry)
            await asyncio.sleep(0)  # the event loop calls `_tell` first, because callbacks run in their order

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        if self.tell is not None:
            self.tell(untold)

    def heard(self, entry: JournalEntry) -> None:
        """Note tokens of an answer that this router or a peer router serves."""
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
        answer.tokens[begin:] = array("I", entry.token_ids).tobytes()
        self.held_bytes += len(answer.tokens) - held
        self._forget(now)

    def tokens(self, key: AnswerKey) -> tuple[int, ...]:
        """Return the known tokens of an answer, from the first one on; empty if the answer is unknown."""
        self._forget(self._clock.now())
        answer = self._answers.get(key)
        return () if answer is None else tuple(memoryview(bytes(answer.tokens)).cast("I"))

    def entries(self) -> Iterator[JournalEntry]:
        """Yield all known tokens, one entry for each answer, for a peer that has just been connected."""
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
