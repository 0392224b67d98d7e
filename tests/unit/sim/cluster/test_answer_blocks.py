"""Which blocks of a next turn are those of the answer before it."""

from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.sim.cluster.answer_blocks import OURS, AnswerBlockNames
from fleet.sim.run import simulate
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.worlds import BLOCK, a_plan

NOW = Nanos(0)


def test_a_next_turn_has_the_blocks_of_the_answer_before_it():
    answers = AnswerBlockNames(BLOCK)
    # 40 tokens and 30: blocks 3 and 4 are full with the answer, but for the last token, which is not computed.
    assert answers.named(TraceRequest(NOW, 40, (1, 2, 91), 30)) == ((1, 2), (OURS, OURS + 1))
    assert answers.named(TraceRequest(NOW, 90, (1, 2, 3, 4, 5, 92), 8)) == ((1, 2, OURS, OURS + 1, 5), (OURS + 2,))
    third, _ = answers.named(TraceRequest(NOW, 130, (1, 2, 3, 4, 5, 6, 7, 8), 8))
    assert third == (1, 2, OURS, OURS + 1, 5, OURS + 2, 7, 8)


def test_prompts_that_share_a_system_prompt_are_no_turns_of_one_conversation():
    answers = AnswerBlockNames(BLOCK)
    answers.named(TraceRequest(NOW, 64, (1, 2, 3, 4), 8))
    answers.named(TraceRequest(NOW, 40, (1, 2, 91), 60))
    other, _ = answers.named(TraceRequest(NOW, 160, (1, 2, 13, 14, 15, 16, 17, 18, 19, 20), 8))
    assert other == (1, 2, 13, 14, 15, 16, 17, 18, 19, 20)


def test_a_prompt_too_short_for_the_answer_or_of_another_session_continues_nothing():
    answers = AnswerBlockNames(BLOCK)
    answers.named(TraceRequest(NOW, 32, (1, 2), 60, 7))
    assert answers.named(TraceRequest(NOW, 80, (1, 2, 3, 4, 5), 4, 7))[0] == (1, 2, 3, 4, 5)
    answers.named(TraceRequest(NOW, 32, (11, 12), 20, 7))
    assert answers.named(TraceRequest(NOW, 80, (11, 12, 13, 14, 15), 4, 8))[0] == (11, 12, 13, 14, 15)


def test_no_more_turns_are_remembered_than_asked_for():
    answers = AnswerBlockNames(BLOCK, remembered=10)
    for number in range(100):
        answers.named(TraceRequest(NOW, 32, (2 * number, 2 * number + 1), 40))
    assert len(answers._turns) == len(answers._seen) == 10


def test_hit_rates_are_higher_where_answers_are_repeated():
    turns = []
    for turn in range(6):  # each adds 4 blocks: one of the user's, three of the answer
        chain = tuple(range(4 * turn + 2))
        turns.append(TraceRequest(Nanos(turn * 10 * SECOND), len(chain) * BLOCK, chain, 3 * BLOCK))
    plan = a_plan()
    edited = simulate(plan, iter(turns)).outcome
    verbatim = simulate(structs.replace(plan, verbatim_answers=True), iter(turns)).outcome
    assert verbatim.hit_rate > edited.hit_rate + 0.1
