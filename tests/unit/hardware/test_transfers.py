"""Transfers alone, and on a link that others use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.clock import MILLISECOND, SECOND, Nanos
from fleet.hardware.gpus import Link, gpu
from fleet.hardware.transfers import REACHED, SharedLink, kv_bytes_per_link, link_between, transfer_time
from tests.model_shapes import DEEPSEEK_V3, a_placement

GIGABYTE = Link(bandwidth=1e9 / REACHED, latency_us=0)


def test_a_transfer_takes_its_latency_and_its_bytes():
    nic = gpu("h100").between_nodes

    assert transfer_time(400_000_000, nic) == 10_000 + 10 * MILLISECOND


def test_two_on_a_link_take_twice_as_long():
    assert transfer_time(1e9, GIGABYTE, sharers=2) == 2 * transfer_time(1e9, GIGABYTE)


def test_nothing_takes_no_time():
    assert transfer_time(0, gpu("h100").in_node) == 0


def test_nodes_are_joined_by_slower_links():
    assert link_between(gpu("b200"), same_node=True).bandwidth > link_between(gpu("b200"), same_node=False).bandwidth


def test_gpus_send_their_shares_side_by_side():
    assert kv_bytes_per_link(a_placement(tp=8), a_placement(tp=8), 1000) == 327_680_000 / 8
    assert kv_bytes_per_link(a_placement(tp=8), a_placement(tp=4), 1000) == 327_680_000 / 4


def test_ranks_share_out_the_latent_vectors_that_all_of_them_hold():
    placement = a_placement(DEEPSEEK_V3, on="h200", tp=8)

    assert kv_bytes_per_link(placement, placement, 1000) == pytest.approx(61 * 576 * 2 * 1000 / 8)


def test_one_alone_on_a_shared_link_is_as_fast_as_if_it_were_not():
    link = SharedLink(GIGABYTE)
    link.begin(1, 1e9, Nanos(0))

    assert link.next_end() == SECOND
    assert link.ended(SECOND) == [1]
    assert link.next_end() is None


def test_one_that_comes_in_between_slows_the_first_down():
    """The first has half its bytes when the second comes, and the other half at half the pace."""
    link = SharedLink(GIGABYTE)
    link.begin(1, 1e9, Nanos(0))
    link.begin(2, 1e9, Nanos(SECOND // 2))

    assert link.next_end() == pytest.approx(1.5 * SECOND, abs=2)
    assert link.ended(Nanos(int(1.6 * SECOND))) == [1]
    assert link.next_end() == pytest.approx(2 * SECOND, abs=2)


def test_those_that_end_together_end_in_the_order_in_which_they_began():
    link = SharedLink(GIGABYTE)
    for key in (7, 3, 5):
        link.begin(key, 1e6, Nanos(0))

    assert link.ended(SECOND) == [7, 3, 5]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**9)), min_size=1, max_size=20))
def test_a_busy_link_carries_as_much_as_it_can_and_no_more(transfers):
    """Whoever shares it: all bytes through a link that never idles take what they would take one after the other."""
    link = SharedLink(GIGABYTE)
    start = max(at for at, _ in transfers)
    for key, (_, num_bytes) in enumerate(transfers):
        link.begin(key, num_bytes, Nanos(start))

    last = start
    while (end := link.next_end()) is not None:
        assert end >= last
        last = end
        assert link.ended(end)

    assert last - start == pytest.approx(sum(num_bytes for _, num_bytes in transfers), abs=4 * len(transfers), rel=1e-9)
