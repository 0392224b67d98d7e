from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from fleet.frontend.text.codec import StopStrings

TEXTS = st.text("abc", max_size=40)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text up to the first stop string, and whether there is one; a simple reference implementation."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=8))
@example(text="xaby", stops=["ab", "xaby"], cuts=[])
@example(text="aab", stops=["ab"], cuts=[1, 2])
def test_pieces_do_not_change_the_text_before_a_stop_string(text, stops, cuts):
    search = StopStrings(stops)
    borders = [0, *sorted(min(border, len(text)) for border in cuts), len(text)]
    given_out, stopped = "", False

    for begin, end in pairwise(borders):
        piece, stopped = search.add(text[begin:end])
        given_out += piece
        assert (
            (given_out, stopped) == cut(text[:end], stops)
            if stopped
            else cut(text[:end], stops)[0].startswith(given_out)
        )
        if stopped:
            break
    if not stopped:
        given_out += search.flush()

    assert (given_out, stopped) == cut(text, stops)


@given(text=TEXTS, stops=STOPS)
def test_held_text_is_the_longest_possible_beginning(text, stops):
    search = StopStrings(stops)

    piece, stopped = search.add(text)

    if not stopped:
        assert piece + search.held == text
        beginnings = [stop[:size] for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        assert search.held == max(beginnings, key=len, default="")


def test_text_without_stop_beginning_is_emitted_at_once():
    search = StopStrings(["\n\n", "END"])

    assert search.add("a line") == ("a line", False)
    assert search.add("\nE") == ("\n", False)
    assert search.add("NERGY") == ("ENERGY", False)
