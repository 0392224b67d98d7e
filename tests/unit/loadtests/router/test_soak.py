"""Parts of the soak test: the expected answers, and how growth of memory is found."""

import random

import pytest

from fleet.core.requests import TOKEN_BYTES, Sampling
from fleet.core.roles import Phase
from fleet.core.work import Start
from loadtests.router.soak.answers import AnswerDifference, difference
from loadtests.router.soak.requests import ANSWER_TOKENS, soak_requests
from loadtests.router.soak.trend import FLAT_MB_PER_HOUR, MEBIBYTE, TrendSample, grows, slope_mb_per_hour
from workers.engines.simulated.answer_oracle import AnswerOracle
from workers.engines.simulated.layout import EngineLayout
from workers.engines.simulated.model import SimulatedModel
from workers.engines.simulated.sequence import Sequence, SequenceContext

BLOCK_TOKENS, BLOCK_BYTES = 8, 512
MODEL = SimulatedModel(seed=3, vocab_size=4096, eos_token_ids=(2,), eos_probability=0.0, block_bytes=BLOCK_BYTES)


def computed(prompt: bytes, sampling: Sampling) -> tuple[int, ...]:
    """Return the answer that the simulated engine itself computes, block by block."""
    layout = EngineLayout(
        layers=2, kv_heads=4, block_tokens=BLOCK_TOKENS, head_bytes=8, tensor_parallel=2, kv_layout="NHD"
    )
    shape = SequenceContext(
        model=MODEL,
        layout=layout,
        block_tokens=BLOCK_TOKENS,
        max_model_len=4096,
    )
    sequence = Sequence(Start(request_id="r", phase=Phase.AGGREGATED, tokens=prompt, sampling=sampling), shape)
    sequence.begin([])
    sequence.compute(sequence.prompt_tokens)
    found = [sequence.sample().token]
    while len(found) < sampling.max_tokens:
        sequence.compute(1)
        found.append(sequence.sample().token)
    return tuple(found)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 100])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=40, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=40, temperature=0.75, top_p=0.875, ignore_eos=True),
        Sampling(max_tokens=40, temperature=0.75, seed=5, ignore_eos=True),
    ],
)
def test_expected_answer_equals_engine_answer(tokens, sampling):
    prompt = b"".join(
        number.to_bytes(TOKEN_BYTES, "little") for number in random.Random(tokens).choices(range(4096), k=tokens)
    )

    assert AnswerOracle(MODEL, BLOCK_TOKENS).answer(prompt, sampling) == computed(prompt, sampling)


@pytest.mark.parametrize(
    ("received", "whole", "found"),
    [
        ((1, 2, 3, 4), True, AnswerDifference()),
        ((1, 2), False, AnswerDifference()),
        ((), False, AnswerDifference()),
        ((1, 2), True, AnswerDifference(lost=2)),
        ((1, 3, 4), True, AnswerDifference(lost=1)),
        ((1, 3), False, AnswerDifference(lost=1)),
        ((1, 2, 2, 3, 4), True, AnswerDifference(repeated=1)),
        ((1, 2, 1, 2, 3), False, AnswerDifference(repeated=2)),
        ((1, 2, 3, 9), True, AnswerDifference(lost=1, repeated=1)),
    ],
)
def test_missing_and_extra_tokens_are_counted_separately(received, whole, found):
    assert difference((1, 2, 3, 4), received, whole=whole) == found


def test_requests_are_of_all_kinds_and_reproducible():
    def some() -> list:
        source = soak_requests(random.Random(7), AnswerOracle(MODEL, BLOCK_TOKENS))
        return [next(source) for _ in range(200)]

    found = some()

    assert found == some()
    assert {wish.over_http for wish in found} == {True, False}
    assert {wish.sampling.stateless for wish in found} == {True, False}
    assert 0 < sum(wish.leaves_after is not None for wish in found) < 20
    assert all(ANSWER_TOKENS[0] <= len(wish.expected) <= ANSWER_TOKENS[1] for wish in found)


def samples(*megabytes: float, every_seconds: float = 300.0) -> list[TrendSample]:
    return [
        TrendSample(seconds=number * every_seconds, rss_bytes=int(each * MEBIBYTE), files=1, threads=1)
        for number, each in enumerate(megabytes)
    ]


def test_growth_is_that_of_second_half():
    warming_up = samples(50, 100, 150, 150, 150, 150)
    leaking = samples(50, 60, 70, 80, 90, 100)

    assert slope_mb_per_hour(warming_up) == 0
    assert grows(warming_up, slope_mb_per_hour(warming_up)) == ""
    assert slope_mb_per_hour(leaking) == pytest.approx(120)
    assert grows(leaking, slope_mb_per_hour(leaking)) == (
        f"memory grows by 120 MB an hour, more than {FLAT_MB_PER_HOUR:.0f}"
    )


def test_short_run_reports_no_growth():
    assert grows(samples(50, 60, 70, 80, every_seconds=10), 1e6) == ""
