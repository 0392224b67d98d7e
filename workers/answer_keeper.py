"""Answer keeper: keeps a worker's tokens of resumable answers whose clients keep no tokens, for routers that ask for them.

Rules:

1. If an answer can be resumed and its client keeps no tokens, the router gives the attempt an answer key
   (`Start.answer_key`). The worker keeps the tokens that other workers have generated (`Start.generated_tokens`), and
   each token that it generates itself, before it sends the token.
   So the worker has all tokens that a client can have, however suddenly the router ends. Any router of the cluster may
   ask for the tokens by the key.
2. An answer with at least one token is kept for a set time after its end. When the stream to its router ends, the
   answer gets no more tokens, and it ends when the engine has cancelled the attempt.
3. If the tokens exceed the memory limit, answers are forgotten: first those that have ended, in the order of their
   ends, then the running ones, in the order of their starts.
4. Routers use a key for one attempt only. If a key is used again nevertheless, the tokens of the new attempt replace
   those of the earlier one.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.requests import TOKEN_BYTES, TokenBytes

AnswerKey = int
"""Key of an answer, a random number of 64 bits. A router takes a new key when it replaces a lost attempt by another one.
The two attempts may generate different tokens, and the lost attempt's worker may keep tokens that the router never got.
Request ids do not serve as keys, because clients may use a request id twice."""

ENTRY_BYTES = 400  # bytes of memory that one kept answer takes besides its tokens, by estimate


class KeptTokens(Struct):
    """Tokens of one answer; `AnswerKeeper.begin` returns this object to the caller, which passes it to `add` and `end`."""

    key: AnswerKey
    tokens: "array[int]"
    ended_at: Nanos | None = None  # instant at which the answer ended (rule 2); None while the attempt runs


class AnswerKeeper:
    """Keeps the tokens of one worker's resumable answers, by the rules of this module."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        """Start empty.

        Args:
            max_bytes: Memory limit; 0: nothing is kept.
            seconds: Time for which an answer is kept after its end.
        """
        self._max_bytes = max_bytes
        self._keep = int(seconds * SECOND)
        # By answer key: `_running` has the running answers in the order of their starts, `_ended` the ended ones in the order of
        # their ends.
        self._running: dict[AnswerKey, KeptTokens] = {}
        self._ended: OrderedDict[AnswerKey, KeptTokens] = OrderedDict()
        self.held_bytes = 0

    def begin(self, key: AnswerKey, prompt: TokenBytes, generated: int, now: Nanos) -> KeptTokens | None:
        """Keep the tokens of an attempt from now on; return None if the answer has no key or `max_bytes` is 0.

        Args:
            key: The key of the answer; 0: it has none.
            prompt: The tokens of the attempt's prompt.
            generated: Number of tokens at the end of `prompt` that another worker generated as the answer's beginning.
            now: The present instant.
        """
        if not key or not self._max_bytes:
            return None
        self._remove(key)
        answer = KeptTokens(key, array("I", prompt[len(prompt) - TOKEN_BYTES * generated :]))
        self._running[key] = answer
        self.held_bytes += ENTRY_BYTES + TOKEN_BYTES * generated
        self._forget(now)
        return answer

    def add(self, answer: KeptTokens, token_ids: Sequence[int], now: Nanos) -> None:
        """Add the next tokens of an answer; do nothing if the answer was forgotten (rule 3) or replaced (rule 4)."""
        if self._running.get(answer.key) is answer:
            answer.tokens.extend(token_ids)
            self.held_bytes += TOKEN_BYTES * len(token_ids)
            if self.held_bytes > self._max_bytes:
                self._forget(now)

    def end(self, answer: KeptTokens, now: Nanos) -> None:
        """Record that an answer gets no more tokens. Its tokens are kept for the time of rule 2; without tokens, it is forgotten now."""
        if self._running.get(answer.key) is answer:
            answer.ended_at = now
            if answer.tokens:
                self._ended[answer.key] = self._running.pop(answer.key)
            else:
                self._remove(answer.key)
            self._forget(now)

    def find(self, key: AnswerKey, most: int, now: Nanos) -> TokenBytes:
        """Return the first tokens of an answer, at most `most` tokens; empty if none are kept under this key (any more)."""
        self._forget(now)
        answer = self._running.get(key) or self._ended.get(key)
        return b"" if answer is None else answer.tokens[:most].tobytes()

    def _forget(self, now: Nanos) -> None:
        while self._ended:
            key, earliest = next(iter(self._ended.items()))
            assert earliest.ended_at is not None
            if self.held_bytes <= self._max_bytes and now - earliest.ended_at <= self._keep:
                return
            self._remove(key)
        while self.held_bytes > self._max_bytes:
            self._remove(next(iter(self._running)))

    def _remove(self, key: AnswerKey) -> None:
        if (answer := self._running.pop(key, None) or self._ended.pop(key, None)) is not None:
            self.held_bytes -= ENTRY_BYTES + TOKEN_BYTES * len(answer.tokens)

    def check(self) -> None:
        """Assert that `held_bytes` is the memory of the kept answers; for tests."""
        kept = [*self._running.values(), *self._ended.values()]
        assert self.held_bytes == sum(ENTRY_BYTES + TOKEN_BYTES * len(each.tokens) for each in kept)
        assert self.held_bytes <= self._max_bytes
        assert all(each.ended_at is None for each in self._running.values())
