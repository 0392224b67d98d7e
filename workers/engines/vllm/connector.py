"""KV connector: Fleet's plug-in inside vLLM, which moves blocks from and to the KV store.

vLLM imports this module by its path.

vLLM makes several connectors in different processes: one beside the scheduler, which decides
(`workers.engines.vllm.store_planner`), and one beside the model on each rank, which moves bytes
(`workers.engines.vllm.blocks.block_mover`). This module only translates between these two modules and vLLM's hooks.
Loads are asynchronous in vLLM's sense: a request whose blocks are being loaded waits, while other requests go on. The
loaded blocks enter the engine's prefix cache only after they were verified.

vLLM tells the scheduler side that a load has ended when every rank has ended it. It reports a block as bad as soon as
one rank has reported the block as bad. vLLM merges only the reports of the same step. If ranks end a load in different
steps, this module merges their reports (`_AllRanks`).

The connector also runs without a store. It counts where the blocks of a prompt came from, and counts the engine's steps
for the watchdog (`workers.engines.vllm.step_counter`). It also ends vLLM's processes when the worker process has ended,
which vLLM itself does not do.
"""

# ruff: noqa: ARG002, ARG003 - the hooks' signatures are vLLM's

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstore.block import BlockHash
from kvstore.client.store_client import StoreClient
from kvstore.errors import LayoutMismatch
from kvstore.messages import Match
from kvstore.namespace import KvNamespace
from kvstore.security.credentials import Credentials
from kvstore.system_clock import MonotonicClock
from workers.engines.vllm import continuation as vllm_continuation
from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm.blocks.block_memory import DeviceBlocks, HostBlocks
from workers.engines.vllm.blocks.block_mover import BlockMover
from workers.engines.vllm.blocks.rank_writes import FollowerRank, LeaderRank, RankPosition
from workers.engines.vllm.namespace import check_groups, namespace_of
from workers.engines.vllm.step_counter import StepCounter, step_file
from workers.engines.vllm.store_planner import COUNTS, LEASE_SECONDS, StorePlanner, StoreWork

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

CALL_SECONDS = {
    # Time limit of a call to the store node. It is short here, because every request of the engine waits for a match, which usually
    # takes 0.5 ms.
    KVConnectorRole.SCHEDULER: 0.25,
    KVConnectorRole.WORKER: 1.0,
}
# Maximum wait for the store node when vLLM starts. If the node answers later, the client joins it in the background.
STORE_SECONDS = 2.0
ORPHAN_GRACE_SECONDS = 5.0  # time between SIGTERM and SIGKILL for a vLLM process whose worker process has ended
# The planner remembers the names of this many offered blocks for each block that fits into the engine's memory. A block
# that the planner remembers is not offered to the store again, except for a handoff.
REMEMBERED_PER_BLOCK = 4


class KvConnectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the worker passes to the connector, in vLLM's `kv_connector_extra_config`."""

    model: str
    revision: str
    store: str  # address of the store node; empty: there is no store, so no blocks are loaded or saved
    store_credentials: Credentials
    scratch: str  # folder of the engine's sockets; `_end_with_parent` removes it after the worker process has ended

    def namespace(self, config: "VllmConfig") -> KvNamespace:
        return namespace_of(config, model=self.model, revision=self.revision)


@dataclass
class StepOrders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's types are not read
    work: StoreWork


@dataclass
class StepResults(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's types are not read
    loaded: dict[str, int]  # by request whose load has ended: number of its leading blocks that arrived correctly

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepResults":
        assert isinstance(other, StepResults)
        return StepResults(_worst(self.loaded, other.loaded))


class _AllRanks:
    """Merges the reports of the ranks about the same loads, which may end in different steps on different ranks."""

    def __init__(self) -> None:
        self._good: dict[str, int] = {}

    def add(self, good: Mapping[str, int]) -> None:
        """Add the report of one rank, or the report that vLLM has merged from several ranks."""
        self._good = _worst(self._good, good)

    def ended(self, request_ids: Collection[str]) -> dict[str, int]:
        """Return the loads that all ranks have ended, each with the number of leading blocks that every rank has loaded."""
        return {request_id: self._good.pop(request_id) for request_id in request_ids if request_id in self._good}


class _ClientStore:
    """Gives the store planner access to the store, by a store client."""

    def __init__(self, client: StoreClient):
        self.client = client

    def match(self, names: Sequence[BlockHash], *, max_wait_seconds: float, tenant: bytes, trace: bytes = b"") -> Match:
        return self.client.match(
            names, lease_seconds=LEASE_SECONDS, max_wait_seconds=max_wait_seconds, tenant=tenant, trace=trace
        )

    def coming(self, names: Sequence[BlockHash]) -> bool:
        return self.client.match(names, lease_seconds=0).loading > 0

    def fetch(self, names: Sequence[BlockHash], *, max_wait_seconds: float, tenant: bytes) -> None:
        self.client.match(names, lease_seconds=0, max_wait_seconds=max_wait_seconds, tenant=tenant)


class FleetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM's types are not read
    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config, role, kv_cache_config)
        if multiprocessing.parent_process() is not None:
            vllm_launch.end_quickly()
        settings = msgspec.convert(self._kv_transfer_config.kv_connector_extra_config, KvConnectorSettings)
        self._namespace = settings.namespace(vllm_config)
        self.client = (
            StoreClient.join(
                settings.store,
                self._namespace,
                wait_seconds=STORE_SECONDS,
                call_timeout_seconds=CALL_SECONDS[role],
                credentials=settings.store_credentials,
                credentials_field="store_credentials",
            )
            if settings.store
            else None
        )
        if self.client is not None:
            check_groups(kv_cache_config)
        self._parallel = vllm_config.parallel_config
        self._lanes_path = Path(settings.scratch, f"ranks-{self._parallel.data_parallel_index}")
        self._planner: StorePlanner | None = None
        if role is KVConnectorRole.SCHEDULER:
            vllm_continuation.install_in_scheduler()
        else:
            vllm_continuation.install_in_batches(vllm_config)
            vllm_launch.loaded_mark(Path(settings.scratch)).touch()
        self.mover: BlockMover | None = None
        self._starts_early = False
        self._failed_blocks: set[int] = set()
        self._loaded: dict[str, int] = {}
        self._ranks = _AllRanks()
        self._steps: StepCounter | None = None
        if role is KVConnectorRole.SCHEDULER:
            threading.Thread(
                target=_end_with_parent, args=(settings.scratch,), name="fleet-orphan-guard", daemon=True
            ).start()
            self._steps = StepCounter(step_file(settings.scratch, self._parallel.data_parallel_index))
            client = self.client
            self._planner = StorePlanner(
                block_tokens=self._namespace.block_tokens,
                algorithm=self._namespace.hash_algorithm,
                store=None if client is None else _ClientStore(client),
                remember=REMEMBERED_PER_BLOCK * kv_cache_config.num_blocks,
                now=time.monotonic,  # noqa: TID251 - this code runs in vLLM's process, to which no clock can be passed
                ranks=self._parallel.tensor_parallel_size,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Return the layout of the store and NIXL: one block of one layer is contiguous, heads before tokens."""
        return "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        # The engine may free the blocks at once, because a block that is not saved only has to be computed again later.
        return False

    # vLLM calls the following hooks in the process of its scheduler.
    def on_new_request(self, request: "Request") -> None:
        assert self._planner is not None
        vllm_continuation.replay(request)
        if not _is_beyond_tokens(request):
            self._planner.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self._planner is not None
        if _is_beyond_tokens(request):
            return 0, False
        tokens = self._planner.look_up(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self._planner is not None
        if _is_beyond_tokens(request):
            return
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepOrders:
        assert self._planner is not None
        assert self._steps is not None
        self._steps.begin(scheduler_output.total_num_scheduled_tokens)
        state = scheduler_output.kv_connector_block_state
        return StepOrders(
            self._planner.plan(
                scheduler_output.num_scheduled_tokens, lambda request_id: state.resolve_block_ids(request_id)[0]
            )
        )

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self._planner is not None
        results = connector_output.kv_connector_worker_meta
        if results is not None:
            assert isinstance(results, StepResults)
            self._ranks.add(results.loaded)
        if connector_output.finished_recving:
            self._planner.loaded(self._ranks.ended(connector_output.finished_recving))
            self._planner.pulled(
                connector_output.finished_recving,
                connector_output.invalid_block_ids or set(),
                connector_output.failed_recving or set(),
            )
            self._correct_stats(connector_output.finished_recving)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._planner is not None
        counts = self._planner.finished(request)
        return False, None if counts is None else {COUNTS: msgspec.to_builtins(counts)}

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def _correct_stats(self, request_ids: Iterable[str]) -> None:
        """Correct the statistics that vLLM sends with a request's first output.

        vLLM counts blocks as cached while they are being loaded, even if they do not arrive.
        """
        assert self._planner is not None
        block_tokens = self._namespace.block_tokens
        for request, counts in self._planner.counts(request_ids):
            if (stats := request.prefill_stats) is not None:
                local = counts.engine * block_tokens
                cached = min(local + (counts.store + counts.direct) * block_tokens, request.num_prompt_tokens)
                stats.set(request.num_prompt_tokens, local, cached - local)
                # By this number, `workers.engines.vllm.requests.counts_at_start` distinguishes directly pulled blocks from stored ones.
                stats.num_external_cached_tokens = cached - local if counts.direct else 0

    # vLLM calls the following hooks in the process of the model, on each rank.
    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        if self.client is None:
            return
        layers = list(kv_caches.values())
        seat = RankPosition.of(self._namespace, rank=self._parallel.rank, ranks=self._parallel.tensor_parallel_size)
        heads = seat.share.bytes * self._namespace.kv_heads // self._namespace.block_bytes
        expected = (heads, self._namespace.block_tokens, self._namespace.head_dim)
        for name, layer in kv_caches.items():
            if (found := tuple(layer.shape[1:])) != expected:
                raise LayoutMismatch("kv_heads", f"{name}: KV blocks of {found} on this rank, not {expected}")
        on_host = all(layer.device.type == "cpu" and layer[0].is_contiguous() for layer in layers)
        blocks = HostBlocks(layers) if on_host else DeviceBlocks(layers)
        if blocks.block_bytes != seat.share.bytes:
            raise LayoutMismatch(
                "block_bytes", f"blocks of {blocks.block_bytes} bytes on this rank, not {seat.share.bytes}"
            )
        self.mover = BlockMover(self.client, blocks, self._join_ranks(self.client, seat))
        self._starts_early = on_host

    def _join_ranks(self, client: StoreClient, seat: RankPosition) -> LeaderRank | FollowerRank | None:
        """Return this rank's end of the channels between the ranks; None if there is only one rank.

        vLLM calls `register_kv_caches` on all ranks at the same time. On the first rank, this call waits until all other ranks have
        joined; on another rank, only until the first rank listens.
        """
        if seat.ranks == 1:
            return None
        if not seat.leads:
            return FollowerRank(client, seat, self._lanes_path, MonotonicClock())
        leader = LeaderRank(client, seat, self._lanes_path, MonotonicClock())
        leader.gather()
        return leader

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. If KV is in host memory, also begin the step's loads, so that they run during the forward pass.

        vLLM calls `start_load_kv` after it has launched the forward pass. On a CPU the pass has then already ended.
        """
        super().bind_connector_metadata(connector_metadata)
        if self.mover is not None and self._starts_early:
            self.mover.start(self._orders())

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self.mover is not None and not self._starts_early:
            self.mover.start(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # nothing to wait for: vLLM schedules a request only after all of its blocks have arrived (ADR 0011)

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        pass  # nothing to do for one layer: `wait_for_save` saves whole blocks

    def wait_for_save(self) -> None:
        if self.mover is not None:
            self.mover.save(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended. The next two hooks report which blocks of these loads did not arrive."""
        if self.mover is None:
            return None, None
        ended = self.mover.collect(idle=self._orders().idle)
        if not ended:
            return None, None
        for load, whole in ended:
            self._failed_blocks.update(b for b, good in zip(load.block_ids, whole, strict=True) if not good)
            self._loaded[load.request_id] = whole.index(False) if False in whole else len(whole)
        return None, {load.request_id for load, _ in ended}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> StepResults | None:
        if not self._loaded:
            return None
        loaded, self._loaded = self._loaded, {}
        return StepResults(loaded)

    def shutdown(self) -> None:
        if self.mover is not None:
            self.mover.close()
        if self.client is not None:
            self.client.close()

    def _orders(self) -> StoreWork:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders.work


def _worst(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Merge two reports: return for each request the number of leading blocks that all ranks have loaded correctly."""
    return {**one, **{request_id: min(good, one.get(request_id, good)) for request_id, good in other.items()}}


def _is_beyond_tokens(request: "Request") -> bool:
    """Return whether the request's blocks depend on inputs that their hashes do not cover; such blocks are not stored.

    LoRA adapters are covered by the salt (ADR 13), and workers refuse an adapter without a salt. Hashes could also
    cover images (rule 4 of `kvstore.block`), but the connector does not support such requests yet. Requests for vectors
    store no blocks either, because encoders have no KV cache.
    """
    if request.pooling_params is not None:
        return True
    nameless_adapter = request.lora_request is not None and not request.cache_salt
    return bool(request.mm_features) or nameless_adapter or request.prompt_embeds is not None


def _end_with_parent(scratch: str) -> None:
    """Wait until the worker process has ended. Then remove the folder `scratch`, and end this process.

    The other processes of vLLM end when this one does.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # the engine runs in the worker process itself, so there is no parent to watch
    parent.join()
    shutil.rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
