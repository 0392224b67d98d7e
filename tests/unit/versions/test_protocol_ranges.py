"""Tests of protocol ranges: both ends find the same version, and a refusal names what to upgrade."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.range_messages import agree_with_server, parse_range, range_message
from kvstore.protocol.versions import UNSTATED, NoCommonProtocol, ProtocolRange, agree, own_protocols
from kvstore.v1 import blocks_pb2, protocol_pb2

ranges = st.builds(lambda low, more: ProtocolRange(low, low + more), st.integers(1, 12), st.integers(0, 6))


def agreed(own, peer):
    try:
        return agree(own, peer, own_name="this end", peer_name="that end")
    except NoCommonProtocol as refused:
        said, _, older = str(refused).rpartition("; upgrade ")
    assert said == f"this end speaks {own}, and that end speaks {peer}"
    return older


@given(ranges, ranges)
def test_both_ends_agree_on_the_highest_common_version(one, other):
    common = set(range(one.lowest, one.highest + 1)) & set(range(other.lowest, other.highest + 1))
    here, there = agreed(one, other), agreed(other, one)
    if common:
        assert here == there == max(common)
    else:
        assert (here, there) == (("this end", "that end") if one.highest < other.lowest else ("that end", "this end"))


def test_this_version_speaks_with_the_previous_one():
    assert agree(own_protocols(), UNSTATED, own_name="this", peer_name="that") == 1
    assert own_protocols().lowest < own_protocols().highest


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.text(max_size=200))
def test_any_stated_range_is_read(lowest, highest, product):
    if not product.isascii():
        product = product.encode("ascii", "ignore").decode()
    told = parse_range(
        blocks_pb2.HelloRequest(protocols=protocol_pb2.ProtocolRange(lowest=lowest, highest=highest, product=product))
    )
    assert 1 <= told.lowest <= told.highest
    assert told.product.isprintable()
    assert len(told.product) <= 64


def test_statement_of_a_range_survives_the_wire():
    assert parse_range(blocks_pb2.HelloRequest(protocols=range_message())) == own_protocols()
    assert parse_range(blocks_pb2.HelloRequest()) == UNSTATED
    assert agree_with_server(blocks_pb2.HelloResponse(), "a node") == 1
