"""Search for the last stored block of a chain, with as few requests as possible."""

import pytest

from kvstore.tiers.s3.sightings import leading


@pytest.mark.parametrize("width", [1, 2, 3, 16, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 17, 100])
def test_end_of_any_prefix_is_found_in_few_rounds(count, width):
    for held in range(count + 1):
        rounds = []

        def are_there(indices, held=held, rounds=rounds):
            rounds.append(len(indices))
            assert len(set(indices)) == len(indices) <= width
            return [index < held for index in indices]

        assert leading(count, width, are_there) == held
        most = 1
        while width > 1 and width**most < count:
            most += 1
        assert len(rounds) <= (most + 1 if width > 1 else count)


def test_complete_chain_takes_one_round():
    rounds = []

    assert leading(4096, 16, lambda indices: rounds.append(1) or [True] * len(indices)) == 4096

    assert len(rounds) == 1


def test_missing_block_in_a_short_chain_is_found():
    there = [True, True, False, True]

    assert leading(4, 16, lambda indices: [there[index] for index in indices]) == 2
