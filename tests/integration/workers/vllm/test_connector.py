"""Tests of the connector hooks that vLLM calls, on real tensors and a real store node, without an engine."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from fleet.core.roles import KvPath
from fleet.local.tiny_model import build_tiny_model
from kvstore.client.store_client import StoreClient
from kvstore.errors import LayoutMismatch
from kvstore.namespace import KvNamespace
from tests.support.kvstore.builders import NodeProcess, a_block, a_chain, a_node, a_store_client
from tests.support.waiting import eventually
from tests.support.workers.vllm_engines import tiny_namespace, vllm_worker
from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm.namespace import check_groups, weights_revision
from workers.engines.vllm.store_planner import BlockLoad, StoreWork

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
]

BLOCKS = 8  # of the engine
NO_FORWARD = None


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def namespace(model_dir: Path) -> KvNamespace:
    return tiny_namespace(model_dir)


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with a_node(capacity_bytes=4 << 20) as node:
        yield node


@pytest.fixture
def client(node: NodeProcess, namespace: KvNamespace) -> Iterator[StoreClient]:
    with a_store_client(node.address, namespace) as client:
        yield client


@pytest.fixture
def layers(namespace: KvNamespace) -> dict:
    """Return an engine's KV memory by layer."""
    shape = (BLOCKS, namespace.kv_heads, namespace.block_tokens, namespace.head_dim)
    return {f"layer.{index}": torch.zeros(shape) for index in range(namespace.layers)}


@pytest.fixture
def connector(node: NodeProcess, model_dir: Path, layers: dict, tmp_path: Path) -> Iterator:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from workers.engines.vllm.connector import FleetConnector

    settings = structs.replace(vllm_worker(model_dir, store=node.address), kv_paths=(KvPath.STORE,))
    vllm_launch.prepare_environment(settings, tmp_path)
    args = vllm_launch.engine_args(settings, revision=weights_revision(model_dir), scratch=tmp_path)
    config = args.create_engine_config()
    vllm_launch.check_model(config)
    connector = FleetConnector(config, KVConnectorRole.WORKER, groups_of(a_full_attention()))
    connector.register_kv_caches(layers)
    yield connector
    connector.shutdown()


def a_full_attention():
    """Return vLLM's description of the KV of the tiny model's layers."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)


def groups_of(*specs) -> SimpleNamespace:
    """Return the fields of a KV cache configuration that the connector reads."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs], num_blocks=BLOCKS)


def begin(connector, *loads: BlockLoad) -> None:
    """Run a step up to its forward pass."""
    from workers.engines.vllm.connector import StepOrders

    connector.bind_connector_metadata(
        StepOrders(StoreWork(loads=list(loads), urgent=[], deferred=[], releases=[], idle=False))
    )


def a_load(client: StoreClient, namespace: KvNamespace, blocks: int) -> BlockLoad:
    """Build a load of stored blocks into the engine's blocks from 1 on."""
    names = a_chain(blocks)
    client.write(names, [a_block(seed, namespace.block_bytes) for seed in range(blocks)])
    return BlockLoad("r", client.match(names, lease_seconds=10), 0, list(range(1, blocks + 1)))


def ended(connector) -> set[str]:
    _, loaded = connector.get_finished(set())
    return loaded or set()


def test_load_runs_beside_the_forward_pass_of_its_step(connector, client, namespace, layers):
    load = a_load(client, namespace, 3)

    begin(connector, load)

    eventually(lambda: client.stats().pinned == 0)  # the load is over before vLLM has called its hook
    block = torch.cat([layer[2].reshape(-1) for layer in layers.values()])
    assert block.view(torch.uint8).numpy().tobytes() == a_block(1, namespace.block_bytes).tobytes()
    connector.start_load_kv(NO_FORWARD)
    assert ended(connector) == {"r"}
    assert connector.get_block_ids_with_load_errors() == set()
    assert connector.build_connector_worker_meta().loaded == {"r": 3}


def test_a_load_is_performed_once(connector, client, namespace):
    load = a_load(client, namespace, 2)
    begin(connector, load)
    connector.start_load_kv(NO_FORWARD)
    eventually(lambda: ended(connector) == {"r"})

    begin(connector)
    connector.start_load_kv(NO_FORWARD)

    connector.mover.loader.submit(lambda: None).result(60)  # all earlier transfers are done
    assert ended(connector) == set()
    assert connector.client.counters().bytes_read == 2 * namespace.block_bytes


def test_corrupt_block_is_named_and_its_prefix_counts(connector, client, namespace, node):
    load = a_load(client, namespace, 3)
    with a_store_client(node.address, namespace, prefer=("shm",)) as vandal:
        vandal.connection.session.transport.mapping.bytes[load.match.slots[1].offset + 70_000] ^= 0x10

    begin(connector, load)

    eventually(lambda: ended(connector) == {"r"})
    assert connector.get_block_ids_with_load_errors() == {2}
    assert connector.build_connector_worker_meta().loaded == {"r": 1}


def test_blocks_dropped_from_the_middle_are_rejected():
    """Use layers that see only a window, for which vLLM puts one and the same block in place of those outside."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64)

    check_groups(groups_of(a_full_attention()))
    with pytest.raises(LayoutMismatch, match="KV blocks of SlidingWindowSpec; the store holds those of full attention"):
        check_groups(groups_of(window))
    with pytest.raises(LayoutMismatch, match="FullAttentionSpec, SlidingWindowSpec"):
        check_groups(groups_of(a_full_attention(), window))


def test_layers_of_another_shape_are_rejected_by_field(connector, layers):
    shape = (BLOCKS, 1, 32, 128)
    with pytest.raises(LayoutMismatch, match=r"layer.0: KV blocks of \(1, 32, 128\) on this rank, not \(2, 32, 128\)"):
        connector.register_kv_caches({name: torch.zeros(shape) for name in layers})
    with pytest.raises(LayoutMismatch, match="blocks of 98304 bytes on this rank, not 131072"):
        connector.register_kv_caches(dict(list(layers.items())[1:]))


def test_load_ends_with_the_last_rank_and_the_worst_result():
    """Report the ranks in one step, which vLLM merges, and in several steps, which arrive separately."""
    from workers.engines.vllm.connector import StepResults, _AllRanks

    ranks = _AllRanks()
    ranks.add({"a": 3, "b": 5})
    assert ranks.ended(set()) == {}
    ranks.add(StepResults({"a": 7, "c": 1}).aggregate(StepResults({"b": 2, "c": 4})).loaded)

    assert ranks.ended({"a", "c", "of another connector"}) == {"a": 3, "c": 1}
    assert ranks.ended({"a", "b"}) == {"b": 2}
