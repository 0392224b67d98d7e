"""Blocks between the engine's KV memory and the store: loads, and the orders of the scheduler side.

Rules:

1. Everything here runs in the engine's worker process, between two steps of the model. An exception would end the
   engine, so whatever goes wrong becomes a block that was not loaded, and a log line (of saves, see `vllm_saves`).
2. Loads run in one thread of their own; the engine goes on computing for other requests meanwhile. The destination
   belongs to nobody else until the load is reported as ended, and every load is.
3. Where an engine has several ranks, each loads its share. vLLM takes a load as ended when all have reported it, and a
   block as bad when one has; its lease is given back by the scheduler side then, and not by whoever is through first.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore.client.store_client import StoreClient
from kvstore.messages import LeaseId
from workers.engines.vllm.block_memory import BlockReader, EngineBlocks, ShareReader
from workers.engines.vllm.rank_writes import FollowerRank, LeaderRank
from workers.engines.vllm.saves import BlockSaverThread, FollowingSaver, LeaderRankStore, LeadingSaver, SingleRankStore
from workers.engines.vllm.store_planner import BlockLoad, StoreWork

log = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.001  # how long a step without computation waits for a load instead of spinning


class BlockMover:
    """Performs the orders of the scheduler side. All but the private methods are called by the engine's thread."""

    def __init__(self, client: StoreClient, blocks: EngineBlocks, end: LeaderRank | FollowerRank | None = None):
        """Starts its threads.

        Args:
            client: Of the store.
            blocks: Of this rank.
            end: Of the lanes between the ranks of the engine, this rank's; None: it is the only one.
        """
        self._client = client
        self._blocks = blocks
        self._end = end
        self._reader: BlockReader = client if end is None else ShareReader(client, end.seat.share)
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-kv-load")
        self._ended = threading.Condition()
        self._loading = 0
        self._results: list[tuple[BlockLoad, list[bool]]] = []
        self._keeper = _keeper(client, blocks, end)

    def start(self, work: StoreWork) -> None:
        """Begin the loads of a step."""
        self._keeper.stepped()
        for load in work.loads:
            with self._ended:
                self._loading += 1
            self._loader.submit(self._load, load)
        if work.releases and not isinstance(self._end, FollowerRank):
            self._loader.submit(self._release, work.releases)

    def save(self, work: StoreWork) -> None:
        """Keep the blocks that became full in a step."""
        self._keeper.keep(work)

    def collect(self, *, idle: bool) -> list[tuple[BlockLoad, list[bool]]]:
        """Loads that have ended since the last call, with what is good of them."""
        with self._ended:
            if idle and self._loading and not self._results:
                self._ended.wait(IDLE_WAIT_SECONDS)
            results, self._results = self._results, []
        return results

    def close(self) -> None:
        """End all threads; what is staged is written first."""
        self._keeper.close()
        self._loader.shutdown(cancel_futures=True)
        if isinstance(self._end, LeaderRank):
            self._end.close()

    def _load(self, load: BlockLoad) -> None:
        whole = [False] * len(load.block_ids)
        try:
            whole = self._blocks.load(self._reader, load)
            if self._end is None:
                self._client.release(load.match.lease_id)
        except Exception:  # supervisor: a load ends, whatever happens; the request computes its blocks instead
            log.exception("load from the KV store failed", extra={"request": load.request_id})
        if not all(whole):
            log.warning(
                "blocks of the KV store could not be loaded and are computed",
                extra={"request": load.request_id, "blocks": whole.count(False)},
            )
        with self._ended:
            self._loading -= 1
            self._results.append((load, whole))
            self._ended.notify()

    def _release(self, lease_ids: Sequence[LeaseId]) -> None:
        self._client.release(*lease_ids)


def _keeper(client: StoreClient, blocks: EngineBlocks, end: LeaderRank | FollowerRank | None) -> BlockSaverThread:
    match end:
        case None:
            return LeadingSaver(SingleRankStore(client), blocks)
        case LeaderRank():
            return LeadingSaver(LeaderRankStore(end), blocks)
        case FollowerRank():
            return FollowingSaver(end, blocks)
