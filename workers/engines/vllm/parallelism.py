"""Parallelism of a vLLM engine over several nodes: checks the settings, and makes vLLM's arguments (vLLM 0.32)."""

from typing import Any

from fleet.core.errors import ConfigurationRefused
from kvstore.net.addresses import host_port
from workers.settings import GroupSettings, WorkerSettings

SAID_BY_GROUP = (
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_size_local",
)
NOT_IN_A_GROUP = (
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
)
"""Options by which each node would serve its own clients; in a worker group, the first node serves all clients."""


def degree(settings: WorkerSettings, name: str) -> int:
    """Return the value of a parallelism setting such as `tensor_parallel_size`; 1 if it is not set.

    Raises:
        ConfigurationRefused: The value is not a number of at least 1.
    """
    size = settings.vllm.extra_args.get(name, 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationRefused(f"vllm.extra_args.{name}: must be at least 1, not {size!r}")
    return size


def engines(settings: WorkerSettings) -> int:
    """Return the number of vLLM's engines that run side by side and divide the requests among them (data parallelism)."""
    return degree(settings, "data_parallel_size")


def ranks(settings: WorkerSettings) -> int:
    """Return the number of ranks, each a process, in each of vLLM's engines."""
    names = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    size = 1
    for name in names:
        size *= degree(settings, name)
    return size


def check(settings: WorkerSettings) -> None:
    """Refuse settings that vLLM cannot spread over nodes.

    Raises:
        ConfigurationRefused: A setting cannot be used in a group, or needs a group and there is none; the message names
            it.
    """
    group, extra = settings.group, settings.vllm.extra_args
    if group is None:
        if extra.get("nnodes", 1) != 1:
            raise ConfigurationRefused(
                "vllm.extra_args.nnodes: an engine over several nodes is described by `group`, since each needs a worker"
            )
        return
    for name in (*SAID_BY_GROUP, *NOT_IN_A_GROUP):
        if name in extra:
            raise ConfigurationRefused(f"vllm.extra_args.{name}: is set by `group`; leave it out")
    if (backend := extra.get("distributed_executor_backend", "mp")) != "mp":
        raise ConfigurationRefused(
            f"vllm.extra_args.distributed_executor_backend: must be mp with `group`, not {backend}"
        )
    if settings.store or settings.embedded_store is not None:
        raise ConfigurationRefused(
            "group: a KV store takes blocks of engines on one node; leave `store` and `embedded_store` out"
        )
    _check_shares(group, engines(settings), ranks(settings))


def _check_shares(group: GroupSettings, of_data: int, of_each: int) -> None:
    """Check that every node runs whole engines, or that every engine has whole nodes; refuse any other group.

    vLLM supports no other division.
    """
    whole_engines = of_data % group.nodes == 0
    whole_nodes = group.nodes % of_data == 0 and of_each % (group.nodes // of_data) == 0
    if not whole_engines and not whole_nodes:
        raise ConfigurationRefused(
            f"group.nodes: {of_data} engines (data_parallel_size) of {of_each} ranks each cannot be shared out evenly among"
            f" {group.nodes} nodes, whole engines to a node or whole nodes to an engine"
        )


def arguments(settings: WorkerSettings) -> dict[str, Any]:
    """Return vLLM's arguments for this node's part of the engine; empty if there is no group.

    Args:
        settings: Settings that `check` has accepted. If they have a group, it has formed (`rank_rendezvous.engine_group`).
    """
    group = settings.group
    if group is None:
        return {}
    address, _ = host_port(group.leader)
    collective, schedulers = group.engine_ports
    return {
        "nnodes": group.nodes,
        "node_rank": group.rank,
        "master_addr": address,
        "master_port": collective,
        "data_parallel_rpc_port": schedulers,
        "distributed_executor_backend": "mp",
    }
