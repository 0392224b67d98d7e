"""NIXL connector with checksums: vLLM's own connector, which in addition verifies the blocks that it pulls.

vLLM imports this module by its path. The class has the name of vLLM's class, because vLLM recognises NIXL by this name
in its settings. The decisions are in `workers.engines.vllm.blocks.handoff_checksums`; this module only translates
between them and vLLM's hooks.

Blocks are checked only if `is_checkable` allows it for the engine. The blocks of other engines are moved without a check, and
count as unverified.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from fleet.core.work import NOTHING_PULLED, PulledBlocks
from kvstore.buffers import crc32c, pieces
from workers.engines.vllm.blocks.block_memory import DeviceBlocks, EngineBlocks, HostBlocks
from workers.engines.vllm.blocks.handoff_checksums import (
    HandedChecksums,
    HandoffChecksums,
    PulledChecks,
    checksums_in,
    encoded,
)
from workers.engines.vllm.blocks.pull_counts import PullCounter, pull_file
from workers.engines.vllm.launch import SCRATCH

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ChecksumOrders(NixlConnectorMetadata):  # type: ignore[misc]  # vLLM's types are not read
    """Orders of one step for all ranks: those of vLLM's connector, and the checksums that have to be computed or compared."""

    def __init__(self, orders: NixlConnectorMetadata, handed: dict[str, list[int]]):
        self.__dict__.update(vars(orders))
        self.handed = handed  # by request: numbers of the blocks that are handed over after this step
        # The checksums in the handoffs of the requests whose pulls begin in this step (vLLM's `reqs_to_recv`), by request.
        self.pulled: dict[str, HandoffChecksums | None] = {}


@dataclass
class RankChecksums(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's types are not read
    """Report about a step by one rank, or by several ranks together."""

    # Checksums of the blocks that are handed over, by request and rank, in the form that `encoded` returns.
    handed: dict[str, dict[int, str]] = field(default_factory=dict)
    pulled: PulledBlocks = field(default_factory=PulledBlocks)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "RankChecksums":
        assert isinstance(other, RankChecksums)
        requests = self.handed.keys() | other.handed.keys()
        handed = {each: {**self.handed.get(each, {}), **other.handed.get(each, {})} for each in requests}
        return RankChecksums(handed, self.pulled + other.pulled)


class NixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM's types are not read
    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._rank, self._ranks = parallel.rank, parallel.tensor_parallel_size
        self._block_tokens = vllm_config.cache_config.block_size
        self._is_checkable = is_checkable(vllm_config, kv_cache_config)
        self._handed = HandedChecksums(block_tokens=self._block_tokens, ranks=self._ranks)
        # By request that has not begun to pull: the checksums in its handoff; None if the handoff has none.
        self._arrived: dict[str, HandoffChecksums | None] = {}
        self._counter: PullCounter | None = None
        if role is KVConnectorRole.SCHEDULER:
            scratch = Path(self.kv_transfer_config.kv_connector_extra_config[SCRATCH])
            self._counter = PullCounter(pull_file(scratch, parallel.data_parallel_index))
        self._blocks: EngineBlocks | None = None
        self._checks = PulledChecks(None)

    # vLLM calls the following hooks in the process of its scheduler.
    def on_new_request(self, request: "Request") -> None:
        super().on_new_request(request)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._arrived[request.request_id] = checksums_in(params)
        elif self._is_checkable:
            self._handed.arrived(request)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ChecksumOrders:
        state = scheduler_output.kv_connector_block_state
        handed = self._handed.planned(
            scheduler_output.num_scheduled_tokens, lambda request_id: state.resolve_block_ids(request_id)[0]
        )
        orders = ChecksumOrders(super().build_connector_meta(scheduler_output), handed)
        orders.pulled = {request_id: self._arrived.pop(request_id, None) for request_id in orders.reqs_to_recv}
        return orders

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        assert self._counter is not None
        results = connector_output.kv_connector_worker_meta or RankChecksums()
        assert isinstance(results, RankChecksums)
        self._handed.computed(results.handed)
        self._counter.add(results.pulled)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._arrived.pop(request.request_id, None)
        lends, params = super().request_finished_all_groups(request, block_ids)
        self._handed.finished(request.request_id, params)
        return lends, params

    # vLLM calls the following hooks in the process of the model, on each rank.
    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        super().register_kv_caches(kv_caches)
        if self._is_checkable and all(len(layer) == self._kv_cache_config.num_blocks for layer in kv_caches.values()):
            layers = [kv_caches[name] for name in sorted(kv_caches)]  # sorted, so that all engines have the same order
            on_host = all(layer.device.type == "cpu" and layer.is_contiguous() for layer in layers)
            self._blocks = blocks = HostBlocks(layers) if on_host else DeviceBlocks(layers)
            self._checks = PulledChecks(lambda block_ids: checksums_of(blocks, block_ids))

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        for request_id, handoff in self._orders().pulled.items():
            pull = self._orders().reqs_to_recv[request_id]
            if any(pull.local_block_ids):
                self._checks.began(
                    request_id,
                    pull.local_block_ids[0],
                    first=pull.local_num_computed_blocks[0],
                    checksums=[]
                    if handoff is None
                    else handoff.of_rank(self._rank, ranks=self._ranks, block_tokens=self._block_tokens),
                )
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose transfers have ended. The next two hooks report their corrupt blocks and their counts."""
        results = super().get_transfer_results(finished_req_ids)
        self._checks.ended(results.finished_recving, failed=results.failed_recving)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed: set[int] = super().get_block_ids_with_load_errors()
        return failed | self._checks.take_corrupt()

    def build_connector_worker_meta(self) -> RankChecksums | None:
        """Return this rank's report about a step; None if there is nothing to report.

        It has the checksums of the blocks that are handed over, and the counts of the pulled blocks by the result of their check.
        """
        pulled = self._checks.take_counts()
        computed = {}
        if self._blocks is not None:
            for request_id, block_ids in self._orders().handed.items():
                computed[request_id] = {self._rank: encoded(checksums_of(self._blocks, block_ids))}
        return RankChecksums(computed, pulled) if computed or pulled != NOTHING_PULLED else None

    def _orders(self) -> ChecksumOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, ChecksumOrders)
        return orders


def checksums_of(blocks: EngineBlocks, block_ids: Sequence[int]) -> list[int]:
    """Return the CRC-32C of each of these blocks; it is the same for equal blocks in host memory and on a device."""
    source = blocks.source(block_ids)
    return [crc32c(pieces(source(index))) for index in range(len(block_ids))]


def is_checkable(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Return whether the checksums of an engine's blocks can be compared with those of another engine.

    All layers must have full attention (not MLA), and ranks may split a block by heads only. Nothing may change a block
    after the prefill. An engine with a draft model is therefore excluded, because a draft model may still write its
    layers of a block after the prefill has ended.
    """
    parallel, groups = config.parallel_config, kv_cache_config.kv_cache_groups
    is_split = max(
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
    )
    if len(groups) != 1 or is_split > 1 or config.speculative_config is not None:
        return False
    spec = groups[0].kv_cache_spec
    return isinstance(spec, FullAttentionSpec) and not isinstance(spec, MLAAttentionSpec)
