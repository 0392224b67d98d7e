"""Answer journal: the tokens of resumable answers whose clients keep no tokens.

Rules:

1. The journal only notes answers over server-sent events, whose clients come back with the header `Last-Event-ID`.
   Fleet's own client library needs no journal, because it keeps the tokens itself.
2. The router that serves an answer notes the tokens before the client gets them, and sends them to its peer routers
   (`fleet.peers`). So the peers still have them if that router is killed. The tokens that arrive in one turn of the event
   loop are sent together. They are noted before the tasks of their answers wake up, so these tasks need not wait. If
   sending fails, the event loop logs the error, and the clients get their tokens.
3. An answer is forgotten a set time after its end at this router, or after its last tokens from a peer. If the journal
   exceeds its memory limit, the answers that have ended or got no tokens for the longest time are forgotten first, and the
   streams of this router last. A router that lacks the tokens generates them again, where that gives the same tokens
   (`ResumedAnswer`).
4. Tokens of a peer that would leave a gap after the known tokens of an answer are not noted.
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
    """Consecutive tokens of one answer, as routers send them to each other."""

    key: AnswerKey
    turn: int  # how often the answer had been resumed when these tokens came
    position: int  # number of the answer's tokens before `token_ids`
    token_ids: Sequence[int]


class _Answer(Struct):
    tokens: "array[int]"
    turn: int
    # When the last tokens came. While the answer is streamed here: when it began, or when `_forget` last met it.
    at: Nanos
    # True while a `JournaledStream` of this router adds tokens, which does not set `at`.
    streamed_here: bool = False


class JournaledStream:
    """Notes the tokens of one stream of this router; `AnswerJournal.begin` returns it.

    `note` is called for each step of the engine, so it leaves out what can wait, such as the order of the answers.
    """

    def __init__(self, journal: "AnswerJournal", key: AnswerKey, answer: _Answer) -> None:
        self._key = key
        self._answer = answer
        self._journal = journal
        self._tokens = answer.tokens
        self._first = (
            0  # number of the answer's tokens before `_tokens`; above 0 only after the journal has forgotten it
        )
        self._told = 0  # number of tokens that the peer routers have been sent
        self.is_untold = False
        """True if the peer routers lack tokens; `told` waits until they have been sent them."""

    def note(self, token_ids: Sequence[int]) -> None:
        """Note the next tokens. The peer routers are sent them at the beginning of the next turn of the event loop."""
        self._tokens.extend(token_ids)
        if self._answer.streamed_here:
            self._journal.grow(TOKEN_BYTES * len(token_ids))
        if self._journal.tell is not None:
            if not self.is_untold:
                self.is_untold = True
                self._journal.tell_soon(self)
        else:
            self._drop_unkept()

    async def told(self) -> None:
        """Wait until the peer routers have been sent all noted tokens.

        One turn is enough: the event loop calls its callbacks in their order, and `note` has scheduled the sending before.
        """
        await asyncio.sleep(0)

    def end(self) -> None:
        """Note that no more tokens follow, so that the time for which they are kept begins."""
        self._journal.ended(self._key, self._answer)

    def news(self) -> JournalEntry:
        """Return the tokens that the peer routers have not been sent, and count them as sent."""
        entry = JournalEntry(self._key, self._answer.turn, self._told, self._tokens[self._told - self._first :])
        self._told, self.is_untold = self._first + len(self._tokens), False
        self._drop_unkept()
        return entry

    def _drop_unkept(self) -> None:
        """Drop the tokens, which the peer routers have been sent, unless the journal keeps them."""
        if not self._answer.streamed_here and not self._journal.keeps(self._key, self._answer):
            self._first += len(self._tokens)
            del self._tokens[:]


class AnswerJournal:
    """Keeps the tokens of answers that this router process or its peer routers serve."""

    def __init__(self, max_bytes: int, seconds: float, clock: Clock) -> None:
        """Create an empty journal.

        Args:
            max_bytes: Memory limit; with 0 the journal keeps nothing.
            seconds: Time for which an answer without new tokens is kept.
            clock: Clock that measures this time.
        """
        self.tell: Callable[[Sequence[JournalEntry]], None] | None = None
        """Sends new tokens of this router's answers to the peer routers; None if there are no peers."""

        self._max_bytes = max_bytes
        self._keep = int(seconds * SECOND)
        self._clock = clock
        # The answers in the order of `_Answer.at`, oldest first.
        self._answers: OrderedDict[AnswerKey, _Answer] = OrderedDict()
        self.held_bytes = 0
        self._untold: list[JournaledStream] = []  # the streams whose new tokens are sent in the next turn

    def begin(self, key: AnswerKey, turn: int, token_ids: Sequence[int] = ()) -> JournaledStream:
        """Return an object that notes the tokens of a stream of this router. The caller calls its `end` after the last token.

        Args:
            key: A new key.
            turn: How often the answer was resumed before this stream.
            token_ids: Known tokens of a resumed answer.
        """
        now = self._clock.now()
        answer = _Answer(array("I", token_ids), turn, now)
        if self._max_bytes:
            answer.streamed_here = True
            self._answers[key] = answer
            self.held_bytes += ENTRY_BYTES + TOKEN_BYTES * len(token_ids)
            self._forget(now)
        stream = JournaledStream(self, key, answer)
        if token_ids:
            stream.note(())  # the peers need the known tokens, too
        return stream

    def ended(self, key: AnswerKey, answer: _Answer) -> None:
        """Keep the tokens of a stream that has ended for the set time; forget a stream that got none."""
        if not answer.streamed_here:
            return
        answer.streamed_here, answer.at = False, self._clock.now()
        self._answers.move_to_end(key)
        if not answer.tokens:
            self._remove(key, answer)

    def keeps(self, key: AnswerKey, answer: _Answer) -> bool:
        """Return whether the journal still has the tokens of a stream of this router."""
        return self._answers.get(key) is answer

    def tell_soon(self, stream: JournaledStream) -> None:
        """Send the new tokens of a stream to the peer routers in the next turn of the event loop."""
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.append(stream)

    def _tell(self) -> None:
        assert self.tell is not None, "`tell_soon` is only called if there are peers"
        untold, self._untold = self._untold, []
        self.tell([stream.news() for stream in untold])

    def grow(self, num_bytes: int) -> None:
        """Count memory for new tokens, and forget old answers if the journal exceeds its limit."""
        self.held_bytes += num_bytes
        if self.held_bytes > self._max_bytes:
            self._forget(self._clock.now())

    def heard(self, entry: JournalEntry) -> None:
        """Note tokens of an answer that a peer router serves."""
        begin, count = entry.position, len(entry.token_ids)
        answer = self._answers.get(entry.key)
        held = 0 if answer is None else len(answer.tokens)
        if begin > held or not self._max_bytes:
            return
        now = self._clock.now()
        if answer is None:
            answer = self._answers[entry.key] = _Answer(array("I"), entry.turn, now)
            self.held_bytes += ENTRY_BYTES
        # In the same turn, tokens are only added: a peer that connects again sends all that it knows, also an old state of what
        # it has heard from this router.
        elif entry.turn < answer.turn or (
            entry.turn == answer.turn and (answer.streamed_here or begin + count <= held)
        ):
            return
        elif answer.streamed_here:  # a later turn: a router has resumed the answer under the same key (rule 6)
            answer.streamed_here = False
            answer = self._answers[entry.key] = _Answer(answer.tokens[:], entry.turn, now)
        self._answers.move_to_end(entry.key)
        answer.turn, answer.at = entry.turn, now
        answer.tokens[begin:] = array("I", entry.token_ids)
        self.held_bytes += TOKEN_BYTES * (begin + count - held)
        self._forget(now)

    def tokens(self, key: AnswerKey) -> tuple[int, ...]:
        """Return the known tokens of an answer, from the first one on; empty if the answer is unknown."""
        self._forget(self._clock.now())
        answer = self._answers.get(key)
        return () if answer is None else tuple(answer.tokens)

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
            if oldest.streamed_here and oldest.at < now:  # it is not as old as `at` says
                oldest.at = now
                self._answers.move_to_end(key)
            else:
                self._remove(key, oldest)

    def _remove(self, key: AnswerKey, answer: _Answer) -> None:
        answer.streamed_here = False
        del self._answers[key]
        self.held_bytes -= TOKEN_BYTES * len(answer.tokens) + ENTRY_BYTES
