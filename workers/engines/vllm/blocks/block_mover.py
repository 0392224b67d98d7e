"""Block mover: loads an engine's blocks from the store and saves them, as the connector's scheduler side orders.

Rules:

1. The engine's thread calls this module in vLLM's worker process, between two steps of the model. An exception there
   would end the engine. A failure is therefore logged, and its blocks count as not loaded (for saves, see
   `workers.engines.vllm.blocks.saves`).
2. Loads run in a separate thread, while the engine computes for other requests. No request uses the blocks that a load
   fills until the load is reported as ended, and every load is reported.
3. If an engine has several ranks, each loads its own shards. vLLM counts a load as ended when all ranks have reported
   its end, and a block as bad when one rank has reported it as bad. The scheduler side returns the lease of the blocks
   when the last rank has read them, because a rank cannot know whether other ranks still read.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore.client.store_client import StoreClient
from kvstore.messages import LeaseId
from workers.engines.vllm.blocks.block_memory import BlockReader, EngineBlocks, ShareReader, Wait
from workers.engines.vllm.blocks.rank_writes import FollowerRank, LeaderRank
from workers.engines.vllm.blocks.saves import (
    BlockSaverThread,
    FollowingSaver,
    LeaderRankStore,
    LeadingSaver,
    SingleRankStore,
)
from workers.engines.vllm.store_planner import BlockLoad, StoreWork

log = logging.getLogger(__name__)

# Maximum time that a step which computes nothing waits for a load to end. Without this wait, vLLM would run one empty
# step after the other and occupy a core.
IDLE_WAIT_SECONDS = 0.001


class BlockMover:
    """Performs the orders of the connector's scheduler side. The engine's thread calls all public methods."""

    def __init__(self, client: StoreClient, blocks: EngineBlocks, end: LeaderRank | FollowerRank | None = None):
        """Start the threads.

        Args:
            client: Client of the store.
            blocks: The KV blocks of this rank.
            end: This rank's side of the channels between the engine's ranks; None: the engine has only one rank.
        """
        self.client = client
        self.blocks = blocks
        self.ranks = end
        self._reader: BlockReader = client if end is None else ShareReader(client, end.seat.share)
        self.loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-kv-load")
        self._ended = threading.Condition()
        self._loading = 0
        self._results: list[tuple[BlockLoad, list[bool]]] = []
        self.saver = _open_saver(client, blocks, end)

    def start(self, work: StoreWork) -> None:
        """Perform the orders of a step: begin the loads, and return the leases in `work.releases` (on the only or the first rank)."""
        self.saver.stepped()
        for load in work.loads:
            with self._ended:
                self._loading += 1
            self.loader.submit(self._load, load, self.blocks.fence())
        if work.releases and not isinstance(self.ranks, FollowerRank):
            self.loader.submit(self._release, work.releases)

    def save(self, work: StoreWork) -> None:
        """Save the blocks that have become full in the step of these orders; the engine's thread calls this after the step."""
        self.saver.keep(work)

    def collect(self, *, idle: bool) -> list[tuple[BlockLoad, list[bool]]]:
        """Return the loads that have ended since the last call, each with a flag per block: True if the block arrived correctly.

        `idle` is True if the step computes nothing; then wait a moment for the first load to end (`IDLE_WAIT_SECONDS`).
        """
        with self._ended:
            if idle and self._loading and not self._results:
                self._ended.wait(IDLE_WAIT_SECONDS)
            results, self._results = self._results, []
        return results

    def close(self) -> None:
        """End all threads, after the blocks of the staging area were written or `saves.CLOSE_SECONDS` have passed."""
        self.saver.close()
        self.loader.shutdown(cancel_futures=True)
        if isinstance(self.ranks, LeaderRank):
            self.ranks.close()

    def _load(self, load: BlockLoad, fence: Wait) -> None:
        whole = [False] * len(load.block_ids)
        try:
            whole = self.blocks.load(self._reader, load, fence)
            if self.ranks is None:
                self.client.release(load.match.lease_id)
        except Exception:  # supervisor: every load has to be reported; if it has failed, the engine computes its blocks
            log.exception("kv block load failed", extra={"request": load.request_id})
        if not all(whole):
            log.warning(
                "kv blocks not loaded, computing them",
                extra={"request": load.request_id, "blocks": whole.count(False)},
            )
        with self._ended:
            self._loading -= 1
            self._results.append((load, whole))
            self._ended.notify()

    def _release(self, lease_ids: Sequence[LeaseId]) -> None:
        self.client.release(*lease_ids)


def _open_saver(client: StoreClient, blocks: EngineBlocks, end: LeaderRank | FollowerRank | None) -> BlockSaverThread:
    match end:
        case None:
            return LeadingSaver(SingleRankStore(client), blocks)
        case LeaderRank():
            return LeadingSaver(LeaderRankStore(end), blocks)
        case FollowerRank():
            return FollowingSaver(end, blocks)
