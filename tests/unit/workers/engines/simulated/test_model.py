"""The simulated model: tokens depend on every byte of every block."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.requests import Sampling
from tests.support.builders import a_prompt, token_bytes
from workers.engines.simulated.model import SimulatedModel

GREEDY = Sampling(temperature=0)
BLOCK_TOKENS = 8
BLOCK_BYTES = 64


def a_model(**fields) -> SimulatedModel:
    defaults = {"seed": 0, "vocab_size": 4096, "eos_token_ids": (2,), "eos_probability": 0.0}
    return SimulatedModel(block_bytes=BLOCK_BYTES, **{**defaults, **fields})


def some_blocks(model: SimulatedModel, count: int = 4) -> list[bytes]:
    blocks, digest = [], model.beginning
    for index in range(count):
        blocks.append(model.compute(digest, a_prompt(BLOCK_TOKENS, first=1 + index * BLOCK_TOKENS)))
        digest = model.read(digest, blocks[-1])
    return blocks


def next_tokens(model: SimulatedModel, blocks: list[bytes]) -> list[int]:
    """Return the next token of three prompt lengths: two contexts have the same three by chance only once in 7e10 times."""
    digest = model.beginning
    for block in blocks:
        digest = model.read(digest, block)
    return [model.draw(digest, a_prompt(length), GREEDY, may_end=True).token for length in (1, 2, 3)]


@given(block=st.integers(0, 3), byte=st.integers(0, BLOCK_BYTES - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_changes_what_follows(block, byte, bit):
    model = a_model()
    blocks = some_blocks(model)
    wrong = bytearray(blocks[block])
    wrong[byte] ^= 1 << bit

    assert next_tokens(model, [*blocks[:block], bytes(wrong), *blocks[block + 1 :]]) != next_tokens(model, blocks)


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_block_changes_what_follows(missing):
    model = a_model()
    blocks = some_blocks(model)

    assert next_tokens(model, blocks[:missing] + blocks[missing + 1 :]) != next_tokens(model, blocks)


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (0, 3)])
def test_two_swapped_blocks_change_what_follows(one, other):
    model = a_model()
    blocks = some_blocks(model)
    swapped = list(blocks)
    swapped[one], swapped[other] = blocks[other], blocks[one]

    assert next_tokens(model, swapped) != next_tokens(model, blocks)


def test_the_bytes_of_a_block_depend_on_the_bytes_before_it():
    model = a_model()
    tokens = a_prompt(BLOCK_TOKENS)

    after_one = model.compute(model.read(model.beginning, b"one"), tokens)

    assert after_one != model.compute(model.read(model.beginning, b"other"), tokens)
    assert len(after_one) == BLOCK_BYTES


def test_other_weights_compute_other_bytes_and_other_tokens():
    blocks = some_blocks(a_model())

    assert some_blocks(a_model(seed=1)) != blocks
    assert next_tokens(a_model(seed=1), blocks) != next_tokens(a_model(), blocks)


def test_bytes_and_tokens_are_the_same_in_every_process():
    model = a_model()

    assert model.compute(model.beginning, a_prompt(BLOCK_TOKENS))[:16].hex() == "2cdb3938ac335c585649687ff3e3d6c2"
    assert next_tokens(model, some_blocks(model)) == [426, 1096, 3333]


def test_a_seed_chooses_other_tokens_and_always_the_same():
    model = a_model()

    def drawn(**sampling) -> list[int]:
        return [model.draw(model.beginning, a_prompt(n), Sampling(**sampling), may_end=False).token for n in (1, 2, 3)]

    assert drawn(temperature=1.0, seed=1) == drawn(temperature=1.0, seed=1)
    assert drawn(temperature=1.0, seed=1) != drawn(temperature=1.0, seed=2)
    assert drawn(temperature=1.0, seed=0) != drawn(temperature=1.0)
    assert drawn(temperature=0.0, seed=1) == drawn(temperature=0.0, seed=2), "greedy is greedy"


def test_eos_comes_at_its_probability_and_only_where_allowed():
    model = a_model(eos_probability=0.25)
    tails = [random.Random(number).randbytes(8) for number in range(2000)]

    ends = sum(model.draw(model.beginning, tail, GREEDY, may_end=True).ends for tail in tails)

    assert 400 < ends < 600
    held_back = [model.draw(model.beginning, tail, GREEDY, may_end=False) for tail in tails]
    assert not any(draw.ends or draw.token == 2 for draw in held_back)


def test_logprobs_have_the_requested_number_and_fall():
    logprobs = a_model().logprobs(7, 3)

    assert logprobs.top_ids[0] == 7
    assert len(set(logprobs.top_ids)) == 3
    assert list(logprobs.top) == sorted(logprobs.top, reverse=True)
    assert logprobs.chosen == logprobs.top[0]


PROMPT, ANSWER = token_bytes([5, 6]), token_bytes([6, 7, 7])


@pytest.mark.parametrize(
    ("fields", "shifts"),
    [
        ({"presence_penalty": 0.5}, {6: -0.5, 7: -0.5}),
        ({"frequency_penalty": 0.25}, {6: -0.25, 7: -0.5}),
        ({"repetition_penalty": 2.0}, {5: -0.5, 6: -0.5, 7: -0.5}),  # the logit 1, divided by 2
        ({"repetition_penalty": 0.5, "presence_penalty": -0.25}, {5: 1.0, 6: 1.25, 7: 1.25}),
    ],
)
def test_penalties_shift_the_tokens_so_far(fields, shifts):
    found = a_model().penalty_shifts(Sampling(**fields), PROMPT, ANSWER)

    assert {token: found[token] for token in found.nonzero()[0].tolist()} == shifts


def test_without_penalties_nothing_is_computed():
    assert a_model().penalty_shifts(Sampling(seed=1), PROMPT, ANSWER) is None


def test_strong_penalty_makes_a_token_rare():
    model, sampling = a_model(), Sampling(seed=1, allowed_token_ids=(6, 8), presence_penalty=2.0)
    shifts = model.penalty_shifts(sampling, b"", ANSWER)

    def share(shifts) -> float:
        drawn = [
            model.draw(model.beginning, a_prompt(3, first=number), sampling, may_end=False, shifts=shifts).token
            for number in range(1, 401)
        ]
        return drawn.count(6) / len(drawn)

    assert 0.4 < share(None) < 0.6
    assert 0.05 < share(shifts) < 0.2  # the odds are e^-2 to 1
