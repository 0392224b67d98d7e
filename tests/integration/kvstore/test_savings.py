"""Test of eviction by value: clients tell the node the compute time of their blocks."""

import pytest

from kvstore.client.store_client import StoreClient
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, a_chain, a_namespace, a_node, a_store_client
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration

BLOCKS = 64


def write(client: StoreClient, chain, max_wait_seconds: float) -> None:
    """Match, compute and write, like an engine."""
    client.release(client.match(chain, lease_seconds=1, max_wait_seconds=max_wait_seconds).lease_id)
    eventually(lambda: client.write(chain, [a_block(1) for _ in chain]))


@pytest.mark.parametrize("dear", ["small", "large"])
def test_expensive_blocks_outlive_cheap_ones(dear):
    """Use a compute time; without it all blocks are worth the same and the oldest go."""
    with (
        a_node(capacity_bytes=BLOCKS * BLOCK_BYTES, eviction="hazard") as node,
        a_store_client(node.address, a_namespace(model="small")) as small,
        a_store_client(node.address, a_namespace(model="large")) as large,
    ):
        max_wait = {small: 0.02, large: 0.02, {"small": small, "large": large}[dear]: 20.0}
        dear_client = max(max_wait, key=max_wait.__getitem__)
        cheap_client = min(max_wait, key=max_wait.__getitem__)
        first, second, third = (a_chain(BLOCKS // 2, of) for of in "abc")

        write(dear_client, first, max_wait[dear_client])  # the oldest
        write(cheap_client, second, max_wait[cheap_client])
        write(cheap_client, third, max_wait[cheap_client])

        assert len(eventually(lambda: dear_client.match(first, lease_seconds=0))) == BLOCKS // 2
        assert len(cheap_client.match(second, lease_seconds=0)) == 0
