"""What a pair of sides with other layouts costs, known without running either."""

import pytest
from msgspec.structs import replace

from kvstore.fingerprint import Fingerprint, Incompatible, negotiate
from kvstore.pairs import PairCost, Speed, Way, pair_cost

SPEED = Speed(bytes_per_second=1e9, seconds_per_run=1e-6)


def a_side(layout: str = "LHND", tp: int = 1, **fields) -> Fingerprint:
    shape = {"dtype": "bfloat16", "element_bytes": 2, "block_tokens": 32, "layers": 4, "kv_heads": 8, "head_dim": 128}
    return Fingerprint(**{"model": "m", "revision": "r", "layout": layout, "tp": tp, **shape, **fields})


BLOCK = a_side().at_rest.block_bytes


def test_sides_that_keep_blocks_as_the_store_does_cost_nothing():
    assert pair_cost(writer=a_side(), reader=a_side()) == PairCost()
    assert pair_cost(writer=a_side("LNHD", 4), reader=a_side("LNHD", 4), way=Way.DIRECT) == PairCost()


def test_by_the_store_even_two_that_are_alike_convert_where_they_are_not_as_it_keeps_blocks():
    cost = pair_cost(writer=a_side("LNHD"), reader=a_side("LNHD"), speed=SPEED)

    runs = 4 * 32 * 8  # a layer, token and head each
    assert cost.bytes == 2 * BLOCK
    assert cost.writer_seconds == cost.reader_seconds == pytest.approx(BLOCK / 1e9 + runs * 1e-6)


def test_only_the_side_that_differs_pays():
    written = pair_cost(writer=a_side("LNHD"), reader=a_side(), speed=SPEED)
    read = pair_cost(writer=a_side(), reader=a_side("LNHD"), speed=SPEED)

    assert (written.reader_seconds, read.writer_seconds) == (0, 0)
    assert written.writer_seconds == read.reader_seconds > 0
    assert written.bytes == read.bytes == BLOCK


def test_ranks_share_the_work_and_those_with_the_same_heads_write_them_once():
    costs = [pair_cost(writer=a_side("LNHD", tp), reader=a_side(), speed=SPEED) for tp in (1, 4, 8, 16)]
    read = pair_cost(writer=a_side(), reader=a_side("LNHD", 16), speed=SPEED)

    one, four, eight, sixteen = costs
    assert four.writer_seconds == pytest.approx(one.writer_seconds / 4)
    assert sixteen.writer_seconds == eight.writer_seconds < four.writer_seconds, "there are eight heads"
    assert {cost.bytes for cost in costs} == {BLOCK}
    assert read.bytes == 2 * BLOCK, "each of the sixteen reads one head"


def test_directly_the_reader_pays_what_the_handshake_says():
    writer, reader = a_side("LNHD", 2), a_side("HLND", 4)

    cost = pair_cost(writer=writer, reader=reader, way=Way.DIRECT, speed=SPEED)

    agreed = negotiate(writer=writer, reader=reader).cost
    assert cost.writer_seconds == 0
    assert cost.reader_seconds == agreed.seconds(bytes_per_second=1e9, seconds_per_run=1e-6)
    assert cost.bytes == agreed.bytes


def test_what_blocks_cost_is_so_many_times_what_one_does():
    one = pair_cost(writer=a_side("LNHD"), reader=a_side("LKNHD", 2), speed=SPEED)

    assert one.times(94).seconds == pytest.approx(94 * one.seconds)
    assert one.times(94).bytes == 94 * one.bytes
    assert one.times(0) == PairCost()


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize(
    ("field", "reader"),
    [
        ("model", a_side(model="another")),
        ("dtype", a_side(dtype="float16")),
        ("tp", a_side(tp=3)),
        ("layout", a_side("LHN")),
        ("version", replace(a_side(), version=2)),
    ],
)
def test_what_cannot_pass_is_refused_by_the_field(way, field, reader):
    refused = pair_cost(writer=a_side("LNHD"), reader=reader, way=way)

    assert isinstance(refused, Incompatible)
    assert refused.field == field
