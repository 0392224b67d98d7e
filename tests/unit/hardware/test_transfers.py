"""Transfer times of single transfers and on shared links."""

import pytest

from fleet.core.clock import MILLISECOND
from fleet.hardware.gpus import GpuLink, gpu
from fleet.hardware.transfers import REACHED, kv_bytes_per_link, link_between, transfer_time
from tests.support.sim.model_configs import DEEPSEEK_V3, a_placement

GIGABYTE = GpuLink(bandwidth=1e9 / REACHED, latency_us=0)


def test_transfer_takes_latency_and_bytes():
    nic = gpu("h100").between_nodes

    assert transfer_time(400_000_000, nic) == 10_000 + 10 * MILLISECOND


def test_two_transfers_on_a_link_take_twice_as_long():
    assert transfer_time(1e9, GIGABYTE, sharers=2) == 2 * transfer_time(1e9, GIGABYTE)


def test_empty_transfer_takes_no_time():
    assert transfer_time(0, gpu("h100").in_node) == 0


def test_links_between_nodes_are_slower():
    assert link_between(gpu("b200"), same_node=True).bandwidth > link_between(gpu("b200"), same_node=False).bandwidth


def test_gpus_send_their_parts_in_parallel():
    assert kv_bytes_per_link(a_placement(tp=8), a_placement(tp=8), 1000) == 327_680_000 / 8
    assert kv_bytes_per_link(a_placement(tp=8), a_placement(tp=4), 1000) == 327_680_000 / 4


def test_ranks_divide_copied_latent_vectors():
    placement = a_placement(DEEPSEEK_V3, on="h200", tp=8)

    assert kv_bytes_per_link(placement, placement, 1000) == pytest.approx(61 * 576 * 2 * 1000 / 8)
