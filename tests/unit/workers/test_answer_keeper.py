"""Answer keeper: tests of the rules of `workers.answer_keeper`."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.core.clock import SECOND, Nanos
from tests.support.builders import token_bytes
from workers.answer_keeper import ENTRY_BYTES, AnswerKeeper, KeptTokens

NOW = Nanos(5 * SECOND)
A, B, C = 7, 8, 9


def a_keeper(max_bytes: int = 1 << 20) -> AnswerKeeper:
    return AnswerKeeper(max_bytes, 60)


def began(keeper: AnswerKeeper, key: int, *token_ids: int, now: Nanos = NOW) -> KeptTokens:
    """Begin to keep an answer, and add these tokens to it."""
    answer = keeper.begin(key, token_bytes([1, 2, 3]), 0, now)
    assert answer is not None
    keeper.add(answer, token_ids, now)
    return answer


def test_answer_begins_with_the_tokens_of_other_workers():
    keeper = a_keeper()
    answer = keeper.begin(A, token_bytes([1, 2, 3, 40, 50]), 2, NOW)
    assert answer is not None
    keeper.add(answer, (60,), NOW)

    assert keeper.find(A, 10, NOW) == token_bytes([40, 50, 60])
    assert keeper.find(A, 2, NOW) == token_bytes([40, 50])
    assert keeper.find(B, 10, NOW) == b""


def test_answer_is_forgotten_a_time_after_its_end_and_not_before():
    keeper = a_keeper()
    answer = began(keeper, A, 1)
    assert keeper.find(A, 9, Nanos(NOW + 1000 * SECOND))
    ended = Nanos(NOW + 1000 * SECOND)
    keeper.end(answer, ended)

    assert keeper.find(A, 9, Nanos(ended + 60 * SECOND))
    assert not keeper.find(A, 9, Nanos(ended + 60 * SECOND + 1))
    assert keeper.held_bytes == 0


def test_full_memory_costs_the_earliest_ended_answers_first():
    keeper = a_keeper(3 * ENTRY_BYTES + 4 * 5)
    running, late, early = began(keeper, A, 1), began(keeper, B, 1), began(keeper, C, 1)
    keeper.end(early, NOW)
    keeper.end(late, Nanos(NOW + 1))

    keeper.add(running, (2, 3, 4), NOW)
    assert [len(keeper.find(key, 9, NOW)) // 4 for key in (A, B, C)] == [4, 1, 0]
    began(keeper, C, 1, 2, 3, 4)
    began(keeper, 10, 1)
    assert [len(keeper.find(key, 9, NOW)) // 4 for key in (A, B, C, 10)] == [0, 0, 4, 1], "then the earliest begun"


def test_later_attempt_with_the_key_replaces_the_tokens():
    keeper = a_keeper()
    earlier = began(keeper, A, 1)
    later = keeper.begin(A, token_bytes([9, 1]), 1, NOW)
    assert later is not None

    keeper.add(earlier, (5,), NOW)
    keeper.end(earlier, NOW)
    keeper.add(later, (2,), NOW)

    assert keeper.find(A, 9, NOW) == token_bytes([1, 2])


def test_nothing_is_kept_without_key_or_memory():
    assert a_keeper().begin(0, token_bytes([1]), 0, NOW) is None
    assert a_keeper(0).begin(A, token_bytes([1]), 0, NOW) is None


def test_answer_longer_than_the_memory_is_forgotten():
    keeper = a_keeper(ENTRY_BYTES + 40)
    answer = began(keeper, A, *range(10))
    assert keeper.find(A, 99, NOW)

    keeper.add(answer, (1,), NOW)

    assert (keeper.find(A, 99, NOW), keeper.held_bytes) == (b"", 0)
    keeper.add(answer, (1,), NOW)
    keeper.end(answer, NOW)
    assert keeper.held_bytes == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "add", "end", "find"]), st.integers(1, 4), st.integers(0, 9), st.integers(0, 40)
        )
    )
)
def test_kept_memory_is_counted_and_limited(steps):
    keeper, answers, now = AnswerKeeper(3 * ENTRY_BYTES + 80, 60), {}, NOW
    for action, key, count, seconds in steps:
        now = Nanos(now + seconds * SECOND)
        if action == "begin":
            answers[key] = keeper.begin(key, token_bytes([*range(10)]), count, now)
        elif action == "add" and key in answers:
            keeper.add(answers[key], range(count), now)
        elif action == "end" and key in answers:
            keeper.end(answers[key], now)
        else:
            keeper.find(key, count, now)
        keeper.check()
