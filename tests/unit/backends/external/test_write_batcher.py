"""Write batcher: what happens at the end of a turn of the event loop, and in which order."""

import asyncio

import pytest

from fleet.backends.external.write_batcher import MAX_BATCHED_MESSAGES, WriteBatcher
from tests.support.waiting import turns


@pytest.fixture
def done():
    return []


@pytest.fixture
async def turn_end():
    """Return a write batcher whose last turn had several messages."""
    turn_end = WriteBatcher()
    for _ in range(2):
        turn_end.send(lambda: None)
    await turns()
    return turn_end


async def test_a_message_goes_at_once_where_turns_have_but_one(done):
    turn_end = WriteBatcher()
    for number in range(3):
        turn_end.send(lambda number=number: done.append(number))
        assert done[-1] == number
        await turns()


async def test_messages_after_the_first_one_wait_and_so_does_next_turn(done):
    turn_end = WriteBatcher()
    for number in range(3):
        turn_end.send(lambda number=number: done.append(number))
    assert done == [0]
    await turns()
    assert done == [0, 1, 2]

    turn_end.send(lambda: done.append(3))
    assert done == [0, 1, 2]
    await turns()
    assert done == [0, 1, 2, 3]

    turn_end.send(lambda: done.append(4))
    assert done == [0, 1, 2, 3, 4]


async def test_a_turn_without_messages_says_nothing_of_the_next(done, turn_end):
    turn_end.afterwards(lambda: None)
    await turns()

    turn_end.send(lambda: done.append("a message"))

    assert done == []


async def test_everything_is_sent_before_books_are_kept(done, turn_end):
    turn_end.afterwards(lambda: done.append("a book"))
    turn_end.send(lambda: done.append("a message"))
    turn_end.send(lambda: done.append("another"))

    assert done == []
    await turns()
    assert done == ["a message", "another", "a book"]


async def test_messages_of_a_callback_are_sent_before_the_next_one(done, turn_end):
    turn_end.afterwards(lambda: turn_end.send(lambda: done.append("a message")))
    turn_end.afterwards(lambda: done.append("a book"))

    await turns()

    assert done == ["a message", "a book"]


async def test_a_long_turn_does_not_hold_back_more_than_a_few_messages(done, turn_end):
    for number in range(MAX_BATCHED_MESSAGES + 1):
        turn_end.send(lambda number=number: done.append(number))

    assert done == list(range(MAX_BATCHED_MESSAGES))
    await turns()
    assert done == list(range(MAX_BATCHED_MESSAGES + 1))


async def test_one_that_fails_is_reported_and_the_others_go_on(done, turn_end):
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
    failure = ValueError("a bug")

    def fail():
        raise failure

    turn_end.send(fail)
    turn_end.send(lambda: done.append("a message"))
    turn_end.afterwards(fail)
    turn_end.afterwards(lambda: done.append("a book"))
    await turns(3)

    assert reported == [failure, failure]
    assert done == ["a message", "a book"]


async def test_every_turn_has_an_end(done, turn_end):
    for number in range(3):
        turn_end.send(lambda number=number: done.append(number))
        await turns()

    assert done == [0, 1, 2]
