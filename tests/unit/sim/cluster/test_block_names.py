"""Names of answer blocks in the next prompt of a conversation."""

from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.sim.cluster.block_names import FIRST_OWN_NAME, AnswerBlockNames
from fleet.sim.run import simulate
from kvstore.eviction.trace_replay import TraceRequest
from tests.support.sim.worlds import BLOCK, a_plan

NOW = Nanos(0)


def test_next_turn_has_blocks_of_previous_answer():
    answers = AnswerBlockNames(BLOCK)
    # 40 + 30 tokens: the answer fills blocks 3 and 4. Its last token has no KV.
    assert answers.named(TraceRequest(NOW, 40, (1, 2, 91), 30)) == ((1, 2), (FIRST_OWN_NAME, FIRST_OWN_NAME + 1))
    assert answers.named(TraceRequest(NOW, 90, (1, 2, 3, 4, 5, 92), 8)) == (
        (1, 2, FIRST_OWN_NAME, FIRST_OWN_NAME + 1, 5),
        (FIRST_OWN_NAME + 2,),
    )
    third, _ = answers.named(TraceRequest(NOW, 130, (1, 2, 3, 4, 5, 6, 7, 8), 8))
    assert third == (1, 2, FIRST_OWN_NAME, FIRST_OWN_NAME + 1, 5, FIRST_OWN_NAME + 2, 7, 8)


def test_shared_system_prompt_makes_no_conversation():
    answers = AnswerBlockNames(BLOCK)
    answers.named(TraceRequest(NOW, 64, (1, 2, 3, 4), 8))
    answers.named(TraceRequest(NOW, 40, (1, 2, 91), 60))
    other, _ = answers.named(TraceRequest(NOW, 160, (1, 2, 13, 14, 15, 16, 17, 18, 19, 20), 8))
    assert other == (1, 2, 13, 14, 15, 16, 17, 18, 19, 20)


def test_short_or_other_session_prompt_continues_nothing():
    answers = AnswerBlockNames(BLOCK)
    answers.named(TraceRequest(NOW, 32, (1, 2), 60, 7))
    assert answers.named(TraceRequest(NOW, 80, (1, 2, 3, 4, 5), 4, 7))[0] == (1, 2, 3, 4, 5)
    answers.named(TraceRequest(NOW, 32, (11, 12), 20, 7))
    assert answers.named(TraceRequest(NOW, 80, (11, 12, 13, 14, 15), 4, 8))[0] == (11, 12, 13, 14, 15)


def test_oldest_conversations_are_forgotten():
    answers = AnswerBlockNames(BLOCK, remembered=10)
    for number in range(100):
        answers.named(TraceRequest(NOW, 32, (2 * number, 2 * number + 1), 40))
    forgotten, _ = answers.named(TraceRequest(NOW, 80, (0, 1, 900, 901, 902), 4))
    remembered, _ = answers.named(TraceRequest(NOW, 80, (198, 199, 903, 904, 905), 4))
    assert forgotten == (0, 1, 900, 901, 902)
    assert remembered[2] >= FIRST_OWN_NAME


def test_repeated_answers_raise_hit_rate():
    turns = []
    for turn in range(6):  # each adds 4 blocks: one of the user's, three of the answer
        chain = tuple(range(4 * turn + 2))
        turns.append(TraceRequest(Nanos(turn * 10 * SECOND), len(chain) * BLOCK, chain, 3 * BLOCK))
    plan = a_plan()
    edited = simulate(plan, iter(turns)).outcome
    verbatim = simulate(structs.replace(plan, verbatim_answers=True), iter(turns)).outcome
    assert verbatim.hit_rate > edited.hit_rate + 0.1
