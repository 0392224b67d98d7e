import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.clock import SECOND
from fleet.frontend.answer_journal import ENTRY_BYTES, AnswerJournal, JournaledStream, JournalEntry
from fleet.peers.messages import decode_answer, encode_answers
from tests.support.kvstore.builders import ManualClock
from tests.support.waiting import turns

A, B, C = 1, 2, 2**64 - 1


def a_journal(max_bytes: int = 1 << 20, clock: ManualClock | None = None) -> AnswerJournal:
    return AnswerJournal(max_bytes, 60, clock or ManualClock())


def test_tokens_are_those_that_were_noted_in_order():
    journal = a_journal()
    journal.heard(JournalEntry(A, 0, 0, (1, 2)))
    journal.heard(JournalEntry(B, 0, 0, (9,)))
    journal.heard(JournalEntry(A, 0, 2, (3,)))
    assert journal.tokens(A) == (1, 2, 3)
    assert journal.tokens(B) == (9,)
    assert journal.tokens(C) == ()


def test_resumed_answer_replaces_what_its_client_never_got():
    journal = a_journal()
    journal.heard(JournalEntry(A, 0, 0, (1, 2, 3, 4)))
    journal.heard(JournalEntry(A, 1, 2, (7,)))
    assert journal.tokens(A) == (1, 2, 7)


def test_router_of_an_earlier_turn_changes_nothing():
    journal = a_journal()
    journal.heard(JournalEntry(A, 0, 0, (1, 2, 3)))
    journal.heard(JournalEntry(A, 1, 2, (7, 8)))
    journal.heard(JournalEntry(A, 0, 3, (4,)))
    assert journal.tokens(A) == (1, 2, 7, 8)


def test_tokens_after_a_gap_are_not_noted():
    journal = a_journal()
    journal.heard(JournalEntry(A, 0, 1, (5,)))
    journal.heard(JournalEntry(B, 0, 0, (1,)))
    journal.heard(JournalEntry(C, 0, 0, (1,)))
    journal.heard(JournalEntry(B, 0, 2, (3,)))
    assert (journal.tokens(A), journal.tokens(B)) == ((), (1,))


def test_memory_is_bounded_and_oldest_answer_goes_first():
    journal = a_journal(2 * ENTRY_BYTES + 4 * 6)
    journal.heard(JournalEntry(A, 0, 0, (1, 2)))
    journal.heard(JournalEntry(B, 0, 0, (1, 2)))
    journal.heard(JournalEntry(A, 0, 2, (3, 4)))
    journal.heard(JournalEntry(B, 0, 2, (3,)))  # over the limit: the last tokens of A are older

    assert (journal.tokens(A), journal.tokens(B)) == ((), (1, 2, 3))
    assert journal.held_bytes == ENTRY_BYTES + 4 * 3


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 5), st.lists(st.integers(0, 9), max_size=8))))
def test_held_bytes_agree_with_content_and_limit(notes):
    journal = a_journal(2 * ENTRY_BYTES + 40)
    for key, position, token_ids in notes:
        journal.heard(JournalEntry(key, 0, position, token_ids))
        assert journal.held_bytes <= 2 * ENTRY_BYTES + 40
    entries = list(journal.entries())
    empty = (journal.held_bytes - sum(ENTRY_BYTES + 4 * len(each.token_ids) for each in entries)) / ENTRY_BYTES
    assert empty in {0, 1, 2}


def test_answer_is_forgotten_its_time_after_the_last_token():
    clock = ManualClock()
    journal = a_journal(clock=clock)
    journal.heard(JournalEntry(A, 0, 0, (1,)))
    clock.move(40 * SECOND)
    journal.heard(JournalEntry(A, 0, 1, (2,)))
    clock.move(60 * SECOND)
    assert journal.tokens(A) == (1, 2)
    clock.move(1)
    assert journal.tokens(A) == ()
    assert journal.held_bytes == 0


def test_journal_of_no_bytes_notes_nothing():
    journal = a_journal(0)
    journal.heard(JournalEntry(A, 0, 0, (1,)))
    assert journal.tokens(A) == ()


async def note(stream: JournaledStream, *token_ids: int) -> None:
    """Note tokens as the router does, and wait until the peers have been sent them."""
    stream.note(token_ids)
    if stream.is_untold:
        await stream.told()


async def test_tokens_of_a_turn_reach_peers_together_before_clients():
    journal, log = a_journal(), []
    journal.tell = lambda entries: log.append([(entry.key, entry.position) for entry in entries])

    async def serve(key):
        stream = journal.begin(key, 0)
        for _ in range(2):
            await note(stream, 1)
            log.append(f"client of {key}")

    await asyncio.gather(serve(A), serve(B))

    clients = [f"client of {A}", f"client of {B}"]
    assert log == [[(A, 0), (B, 0)], *clients, [(A, 1), (B, 1)], *clients]


async def test_answer_that_is_cancelled_leaves_the_others_their_tokens():
    journal, told = a_journal(), []
    journal.tell = told.extend
    left, stays = (asyncio.create_task(note(journal.begin(key, 0), 1)) for key in (A, B))
    await turns(1)
    left.cancel()

    await stays

    assert [entry.key for entry in told] == [A, B]


async def test_peer_gets_each_entry_and_a_late_one_all_of_them():
    first, second, late = a_journal(4 << 20), a_journal(4 << 20), a_journal(4 << 20)

    def tell(entries, to):
        for message in encode_answers(entries):
            for answer in type(message).FromString(message.SerializeToString()).answers.answers:
                to.heard(decode_answer(answer))

    first.tell = lambda entries: tell(entries, second)
    stream = first.begin(A, 0)
    await note(stream, 1, 2)
    await note(stream, 2**32 - 1)
    await first.begin(B, 3, tuple(np.arange(300_000).tolist())).told()
    tell(first.entries(), late)

    assert first.tokens(A) == (1, 2, 2**32 - 1)
    assert len(first.tokens(B)) == 300_000
    for key in (A, B):
        assert first.tokens(key) == second.tokens(key) == late.tokens(key)


def test_stream_without_peers_is_noted_at_once():
    journal = a_journal()
    stream = journal.begin(A, 0, (1, 2))
    stream.note((3,))
    assert not stream.is_untold
    assert journal.tokens(A) == (1, 2, 3)
    assert journal.held_bytes == ENTRY_BYTES + 4 * 3


def test_streamed_answer_is_kept_its_time_after_its_end():
    clock = ManualClock()
    journal = a_journal(clock=clock)
    stream = journal.begin(A, 0)
    stream.note((1,))
    clock.move(1000 * SECOND)
    assert journal.tokens(A) == (1,)
    stream.note((2,))
    stream.end()
    clock.move(60 * SECOND)
    assert journal.tokens(A) == (1, 2)
    clock.move(1)
    assert journal.tokens(A) == ()
    assert journal.held_bytes == 0


def test_answer_that_ended_goes_before_older_one_that_streams():
    clock = ManualClock()
    journal = a_journal(2 * ENTRY_BYTES + 4 * 3, clock)
    streamed = journal.begin(A, 0)
    clock.move(1)
    ended = journal.begin(B, 0, (1, 2))
    ended.end()
    clock.move(1)
    streamed.note((1, 2))

    assert (journal.tokens(A), journal.tokens(B)) == ((1, 2), ())
    assert journal.held_bytes == ENTRY_BYTES + 4 * 2


def test_streams_that_exceed_the_limit_are_forgotten():
    journal = a_journal(ENTRY_BYTES + 4 * 2)
    first, second = journal.begin(A, 0), journal.begin(B, 0)
    for _ in range(3):
        first.note((1,))
        second.note((1,))
    first.end()
    second.end()

    assert (journal.tokens(A), journal.tokens(B)) == ((), ())
    assert journal.held_bytes == 0


@pytest.mark.parametrize("known", [1, 3])
@pytest.mark.parametrize("ended", [False, True])
def test_echo_of_a_stream_by_a_peer_changes_nothing(known, ended):
    journal = a_journal()
    stream = journal.begin(A, 0)
    stream.note((1, 2, 3))
    if ended:
        stream.end()
    journal.heard(JournalEntry(A, 0, 0, (1, 2, 3)[:known]))
    if not ended:
        stream.note((4,))

    assert journal.tokens(A) == ((1, 2, 3) if ended else (1, 2, 3, 4))
    assert journal.held_bytes == ENTRY_BYTES + 4 * len(journal.tokens(A))


def test_stream_without_tokens_leaves_nothing_behind():
    journal = a_journal()
    journal.begin(A, 0).end()
    assert journal.held_bytes == 0


async def test_forgotten_stream_keeps_only_what_peers_lack():
    journal, told = a_journal(ENTRY_BYTES + 4 * 2), []
    journal.tell = told.extend
    forgotten, kept = journal.begin(A, 0), journal.begin(B, 0)
    for token in range(100):
        forgotten.note((token,))
        await forgotten.told()
    kept.end()

    assert [(entry.position, list(entry.token_ids)) for entry in told] == [(token, [token]) for token in range(100)]
    assert journal.tokens(A) == ()


async def test_tokens_that_peers_lack_at_the_end_are_sent_and_kept():
    journal, told = a_journal(), []
    journal.tell = told.extend
    stream = journal.begin(A, 0)
    stream.note((1, 2))
    stream.end()
    await stream.told()

    assert [list(entry.token_ids) for entry in told] == [[1, 2]]
    assert journal.tokens(A) == (1, 2)


def test_stream_changes_no_answer_that_a_router_took_over():
    journal = a_journal()
    stream = journal.begin(A, 0)
    stream.note((1, 2, 3))
    journal.heard(JournalEntry(A, 1, 2, (7,)))
    stream.note((4,))
    stream.end()

    assert journal.tokens(A) == (1, 2, 7)
    assert journal.held_bytes == ENTRY_BYTES + 4 * 3


def test_large_journal_is_told_in_several_messages():
    entries = [JournalEntry(number, 0, 0, (1,) * 150_000) for number in range(4)]
    assert [len(message.answers.answers) for message in encode_answers(entries)] == [2, 2]
