from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fleet.core.requests import Logprobs
from fleet.frontend.text.codec import AnswerText


class Letters:
    """Decoder whose tokens are letters, a=0; a capital letter is half of a character that the next token completes."""

    def __init__(self) -> None:
        self._half = ""

    def add(self, token_id: int) -> str:
        letter = self._half + chr(ord("a") + token_id % 26)
        self._half = letter if token_id >= 26 else ""
        return "" if self._half else letter

    def flush(self) -> str:
        half, self._half = self._half, ""
        return half and "\ufffd"


def an_answer(stop: Sequence[str] = (), ends: Sequence[int] = (), min_tokens: int = 0) -> AnswerText:
    return AnswerText(Letters(), stop=stop, end_token_ids=frozenset(ends), min_tokens=min_tokens)


def test_tokens_after_a_stop_string_are_not_counted():
    answer = an_answer(stop=["bc"])

    delta = answer.add((0, 1, 2, 3), [Logprobs(-1.0)] * 4)

    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("a", (0, 1, 2), 3)
    assert (answer.stopped, answer.num_tokens, answer.finish()) == (True, 3, "")


def test_stop_string_split_over_steps_is_never_emitted():
    answer = an_answer(stop=["bc"])

    deltas = [answer.add((token,), ()) for token in (0, 1, 2)]

    assert [delta.text for delta in deltas] == ["a", "", ""]
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)]
    assert answer.stopped


def test_held_back_text_comes_with_the_end():
    answer = an_answer(stop=["bc"])

    assert answer.add((0, 1), ()).text == "a"
    assert (answer.finish(), answer.stopped) == ("b", False)


def test_end_token_counts_without_text():
    answer = an_answer(ends=[3])

    delta = answer.add((0, 3), ())

    assert (delta.text, delta.token_ids, answer.num_tokens, answer.stopped) == ("a", (0, 3), 2, False)


def test_stop_strings_are_ignored_before_min_tokens():
    answer = an_answer(stop=["a"], min_tokens=2)

    assert answer.add((0, 0, 1, 0, 2), ()).text == "aab"
    assert (answer.stopped, answer.num_tokens) == (True, 4)


def test_incomplete_last_character_is_replaced():
    answer = an_answer()

    assert answer.add((0, 27), ()).text == "a"
    assert answer.finish() == "\ufffd"


@given(
    tokens=st.lists(st.integers(0, 5), max_size=30), stop=st.text("abc", min_size=1, max_size=3), step=st.integers(1, 7)
)
def test_text_does_not_depend_on_tokens_per_step(tokens, stop, step):
    def run(size: int) -> tuple[str, int, bool]:
        answer, text = an_answer(stop=[stop], ends=[5]), ""
        for begin in range(0, len(tokens), size):
            text += answer.add(tokens[begin : begin + size], ()).text
            if answer.stopped:
                break
        return text + answer.finish(), answer.num_tokens, answer.stopped

    assert run(step) == run(1)
