"""Differences between received and expected answers."""

from collections.abc import Sequence
from difflib import SequenceMatcher

from msgspec import Struct


class AnswerDifference(Struct, frozen=True):
    """Difference between a received and an expected answer."""

    lost: int = 0  # number of expected tokens that did not come
    repeated: int = 0  # number of tokens that came although they were not expected


SAME = AnswerDifference()


def difference(expected: Sequence[object], received: Sequence[object], *, whole: bool) -> AnswerDifference:
    """Compare an answer with the expected one. If `whole` is False, a missing end of the answer is no difference."""
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
