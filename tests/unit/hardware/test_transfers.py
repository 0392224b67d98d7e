"""KV transfers between workers: which links of the GPUs they use, and how many bytes go over each link."""

import pytest

from fleet.hardware.gpus import gpu
from fleet.hardware.transfers import kv_bytes_per_link, link_between
from tests.support.sim.model_configs import DEEPSEEK_V3, a_placement


def test_links_between_nodes_are_slower():
    assert link_between(gpu("b200"), same_node=True).bandwidth > link_between(gpu("b200"), same_node=False).bandwidth


def test_gpus_send_their_parts_in_parallel():
    assert kv_bytes_per_link(a_placement(tp=8), a_placement(tp=8), 1000) == 327_680_000 / 8
    assert kv_bytes_per_link(a_placement(tp=8), a_placement(tp=4), 1000) == 327_680_000 / 4


def test_ranks_divide_copied_latent_vectors():
    placement = a_placement(DEEPSEEK_V3, on="h200", tp=8)

    assert kv_bytes_per_link(placement, placement, 1000) == pytest.approx(61 * 576 * 2 * 1000 / 8)
