"""Parallelism of a vLLM engine over nodes: its arguments and refusals."""

import msgspec
import pytest

from fleet.core.errors import ConfigurationRefused
from workers.engines.vllm import parallelism as vllm_spread
from workers.settings import WorkerSettings

GROUP = {"nodes": 2, "rank": 1, "leader": "10.0.0.1:7000", "engine_ports": [6001, 6002]}


def a_worker(extra=None, **fields):
    told = {"worker_id": "w", "model": "m", "group": GROUP, "vllm": {"extra_args": extra or {}}} | fields
    return msgspec.convert(told, WorkerSettings)


def test_node_gets_its_rank_and_the_meeting_address():
    assert vllm_spread.arguments(a_worker({"tensor_parallel_size": 2})) == {
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 6001,
        "data_parallel_rpc_port": 6002,
        "distributed_executor_backend": "mp",
    }


def test_engine_on_one_node_gets_no_group_arguments():
    assert vllm_spread.arguments(a_worker(group=None)) == {}


@pytest.mark.parametrize(
    ("nodes", "tensor", "pipeline", "data"),
    [(2, 2, 1, 1), (2, 1, 2, 1), (2, 8, 2, 1), (2, 1, 1, 16), (4, 4, 1, 2), (3, 1, 1, 3)],
)
def test_whole_engines_to_a_node_or_whole_nodes_to_an_engine(nodes, tensor, pipeline, data):
    extra = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "data_parallel_size": data}

    vllm_spread.check(a_worker(extra, group=GROUP | {"nodes": nodes}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "group.nodes: 1 engines .* of 1 ranks each cannot be shared out evenly among 2 nodes"),
        ({"extra": {"tensor_parallel_size": 3}}, "group.nodes: 1 engines"),
        ({"extra": {"data_parallel_size": 3, "tensor_parallel_size": 2}}, "group.nodes: 3 engines"),
        ({"extra": {"nnodes": 2, "tensor_parallel_size": 2}}, "vllm.extra_args.nnodes: is set by `group`"),
        ({"extra": {"data_parallel_rank": 1}}, "vllm.extra_args.data_parallel_rank: is set by `group`"),
        (
            {"extra": {"distributed_executor_backend": "ray"}},
            "vllm.extra_args.distributed_executor_backend: must be mp",
        ),
        (
            {"extra": {"tensor_parallel_size": 2}, "store": "h:1"},
            "group: a KV store takes blocks of engines on one node",
        ),
        ({"extra": {"nnodes": 2}, "group": None}, "vllm.extra_args.nnodes: .* is described by `group`"),
        ({"extra": {"data_parallel_size": True}}, "vllm.extra_args.data_parallel_size: must be at least 1, not True"),
    ],
)
def test_impossible_spread_is_refused_by_name(fields, said):
    with pytest.raises(ConfigurationRefused, match=f"^{said}"):
        vllm_spread.check(a_worker(**fields))
