"""Expected answers of the simulated engine, computed without an engine, and their differences from received ones."""

from collections.abc import Sequence
from difflib import SequenceMatcher

from msgspec import Struct

from fleet.core.requests import TOKEN_BYTES, Sampling, TokenBytes
from workers.engines.simulated.model import SimulatedModel


class AnswerDifference(Struct, frozen=True):
    """Difference between a received and an expected answer."""

    lost: int = 0  # expected tokens that did not come
    repeated: int = 0  # tokens that came and were not expected


SAME = AnswerDifference()


class AnswerOracle:
    """Computes answers by the rules of the simulated model, without an engine, a cache or a transfer."""

    def __init__(self, model: SimulatedModel, block_tokens: int):
        self._model = model
        self._block_bytes = block_tokens * TOKEN_BYTES

    def answer(self, prompt: TokenBytes, sampling: Sampling) -> tuple[int, ...]:
        """Return all `max_tokens` tokens; the sampling parameters must ignore the end of sequence."""
        assert sampling.ignore_eos
        model, size = self._model, self._block_bytes
        digest, tail = model.beginning, bytearray()
        found: list[int] = []
        text = bytearray(prompt)
        while True:
            while len(text) >= size:
                digest = model.read(digest, model.compute(digest, bytes(text[:size])))
                del text[:size]
            tail = text
            if len(found) == sampling.max_tokens:
                return tuple(found)
            token = model.draw(digest, tail, sampling, may_end=False).token
            found.append(token)
            text += token.to_bytes(TOKEN_BYTES, "little")


def difference(expected: Sequence[object], received: Sequence[object], *, whole: bool) -> AnswerDifference:
    """Compare an answer; if it need not be `whole`, its end may be missing."""
    if whole and received == expected:
        return SAME
    if not whole and received == expected[: len(received)]:
        return SAME
    lost = repeated = 0
    for kind, begin, end, first, last in SequenceMatcher(None, expected, received, autojunk=False).get_opcodes():
        if kind == "equal" or (not whole and kind == "delete" and end == len(expected)):
            continue
        lost += end - begin
        repeated += last - first
    return AnswerDifference(lost, repeated)
