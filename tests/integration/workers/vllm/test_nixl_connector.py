"""Tests of the parts of the NIXL connector that need vLLM's types, but neither an engine nor NIXL."""

from copy import deepcopy
from types import SimpleNamespace

import google_crc32c
import pytest

from fleet.core.work import PulledBlocks
from workers.engines.vllm.blocks.block_memory import DeviceBlocks, HostBlocks
from workers.engines.vllm.launch import direct_available

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # warnings of vLLM itself
    pytest.mark.skipif(direct_available() is not None, reason=direct_available() or ""),
]


@pytest.fixture(scope="module")
def module():
    from workers.engines.vllm.blocks import nixl_connector

    return nixl_connector


@pytest.mark.parametrize("memory", [HostBlocks, DeviceBlocks])
def test_checksum_covers_all_layers_of_a_block_in_order(module, memory):
    layers = [torch.rand(6, 2, 32, 64) for _ in range(3)]

    found = module.checksums_of(memory(layers), [4, 1])

    assert found == [
        google_crc32c.value(b"".join(layer[block].numpy().tobytes() for layer in layers)) for block in (4, 1)
    ]


def a_config(**changes) -> SimpleNamespace:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    parallel = dict.fromkeys((*sizes, "decode_context_parallel_size"), 1)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | {name: changes[name] for name in parallel if name in changes})),
        speculative_config=changes.get("speculative_config"),
    )


def groups_of(*names: str) -> SimpleNamespace:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    shape = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    specs = {
        "full": lambda: FullAttentionSpec(**shape),
        "mla": lambda: MLAAttentionSpec(**(shape | {"num_kv_heads": 1})),
        "window": lambda: SlidingWindowSpec(**shape, sliding_window=64),
    }
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=specs[name]()) for name in names])


def test_engine_with_whole_blocks_of_some_heads_is_checked(module):
    assert module.is_checkable(a_config(), groups_of("full"))
    assert module.is_checkable(a_config(tensor_parallel_size=2), groups_of("full"))


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        ({"pipeline_parallel_size": 2}, ("full",)),
        ({"prefill_context_parallel_size": 2}, ("full",)),
        ({"decode_context_parallel_size": 2}, ("full",)),
        ({"speculative_config": object()}, ("full",)),
        ({}, ("mla",)),
        ({}, ("window",)),
        ({}, ("full", "full")),
    ],
)
def test_engine_with_blocks_divided_otherwise_is_not_checked(module, config, groups):
    assert not module.is_checkable(a_config(**config), groups_of(*groups))


def test_reports_of_ranks_are_merged(module):
    first = module.RankChecksums({"a": {0: "01"}, "b": {0: "02"}}, PulledBlocks(verified=3))
    second = module.RankChecksums({"a": {1: "03"}}, PulledBlocks(verified=2, corrupt=1))

    merged = deepcopy(first.aggregate(second))  # copied as on its way between processes

    assert merged.handed == {"a": {0: "01", 1: "03"}, "b": {0: "02"}}
    assert merged.pulled == PulledBlocks(verified=5, corrupt=1)


def test_orders_keep_those_of_vllm(module):
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

    orders = NixlConnectorMetadata()
    orders.reqs_to_send["r"] = 5.0

    extended = deepcopy(module.ChecksumOrders(orders, {"s": [1, 2]}))

    assert isinstance(extended, NixlConnectorMetadata)
    assert (extended.reqs_to_send, extended.handed, extended.pulled) == ({"r": 5.0}, {"s": [1, 2]}, {})
