"""The engine's KV memory as the blocks of the store, and the threads that move them.

Rules:

1. Everything here runs in the engine's worker process, between two steps of the model. An exception would end the
   engine, so whatever goes wrong becomes a block that was not loaded or not kept, and a log line.
2. Loads run in one thread of their own; the engine goes on computing for other requests meanwhile. The destination
   belongs to nobody else until the load is reported as ended, and every load is.
3. Urgent blocks are written before the step returns. Deferred ones are copied to a fixed staging area and written by
   one thread; when the area is full they are dropped, since a store is only a cache.
4. A write costs milliseconds on both ends, however few its blocks, and steps beside it take longer. So deferred blocks
   wait for a pause of the engine, at most `LONGEST_WAIT_SECONDS` or until half of the area is taken, and those of one
   request that have gathered meanwhile are written together.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvstore.block import ChainHash
from kvstore.client import WRITE_BATCH, StoreClient
from kvstore.messages import LeaseId
from workers.engines.vllm_planning import Load, Save, StoreWork

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20  # 500 blocks of a tiny model, 6 of a large one
MIN_STAGED_BLOCKS = 16  # a decode step of 16 requests may complete this many
IDLE_WAIT_SECONDS = 0.001  # how long a step without computation waits for a load instead of spinning
PAUSE_SECONDS = 0.02  # without a step beginning or ending: nothing runs, or one long step, which hardly notices
LONGEST_WAIT_SECONDS = 0.25  # what other engines cannot find yet, they compute
CLOSE_SECONDS = 5.0  # for what is staged, when the engine stops

Bytes = NDArray[np.uint8]


class EngineBlocks(Protocol):
    """KV memory of one engine, by block number."""

    block_bytes: int

    def load(self, client: StoreClient, load: Load) -> list[bool]:
        """Fill the blocks of `load`; says for each whether its bytes arrived whole."""
        ...

    def save(self, client: StoreClient, save: Save) -> None:
        """Write those blocks to the store that it does not have."""
        ...

    def copy_out(self, block_id: int, into: Bytes) -> None:
        """Copy one block to host memory, in the layout of the store."""
        ...


class HostBlocks:
    """KV memory that the CPU can address: blocks are read and written in place, without staging."""

    def __init__(self, layers: "Sequence[torch.Tensor]"):
        """Share memory with the engine.

        Args:
            layers: One contiguous tensor a layer, [blocks, heads, tokens, elements].
        """
        import torch  # noqa: PLC0415 - heavy; only the engine's processes have it

        # [blocks, bytes of one layer's block]
        self._layers: list[Bytes] = [layer.view(len(layer), -1).view(torch.uint8).numpy() for layer in layers]
        self._layer_bytes: int = self._layers[0].shape[1]
        self.block_bytes = self._layer_bytes * len(self._layers)

    def load(self, client: StoreClient, load: Load) -> list[bool]:
        destinations = [self._pieces(block_id) for block_id in load.block_ids]
        return client.read(load.match, range(load.first, load.first + len(destinations)), destinations)

    def save(self, client: StoreClient, save: Save) -> None:
        client.write(save.names, lambda index: self._pieces(save.block_ids[index]), tenant=save.tenant)

    def copy_out(self, block_id: int, into: Bytes) -> None:
        for index, layer in enumerate(self._layers):
            into[index * self._layer_bytes : (index + 1) * self._layer_bytes] = layer[block_id]

    def _pieces(self, block_id: int) -> list[Bytes]:
        return [layer[block_id] for layer in self._layers]


class DeviceBlocks:
    """KV memory of an accelerator: blocks pass through pinned host buffers, a batch at a time."""

    def __init__(self, layers: "Sequence[torch.Tensor]"):
        """Allocate two host buffers, one a direction, since loads and saves run in different threads.

        Args:
            layers: One tensor a layer, logically [blocks, heads, tokens, elements] in whatever physical order.
        """
        import torch  # noqa: PLC0415 - heavy; only the engine's processes have it

        self._torch = torch
        self._layers = layers
        one = layers[0][0]
        self._layer_bytes: int = one.numel() * one.element_size()
        self.block_bytes = self._layer_bytes * len(layers)
        pinned = layers[0].device.type != "cpu"
        self._incoming, self._outgoing = (
            torch.empty((WRITE_BATCH, self.block_bytes), dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        )

    def load(self, client: StoreClient, load: Load) -> list[bool]:
        whole: list[bool] = []
        for start in range(0, len(load.block_ids), WRITE_BATCH):
            ids = load.block_ids[start : start + WRITE_BATCH]
            rows = self._incoming[: len(ids)]
            first = load.first + start
            arrived = client.read(load.match, range(first, first + len(ids)), [row.numpy() for row in rows])
            for row, block_id, good in zip(rows, ids, arrived, strict=True):
                if good:
                    for host, device in self._layer_pairs(row, block_id):
                        device.copy_(host)
            whole += arrived
        return whole

    def save(self, client: StoreClient, save: Save) -> None:
        asked = 0

        def source(index: int) -> Bytes:
            """The client asks for one batch, and writes it, before it asks for the next."""
            nonlocal asked
            row: Bytes = self._outgoing[asked % WRITE_BATCH].numpy()
            asked += 1
            self.copy_out(save.block_ids[index], row)
            return row

        client.write(save.names, source, tenant=save.tenant)

    def copy_out(self, block_id: int, into: Bytes) -> None:
        """Copy one block to host memory; waits for the step that may still be writing it."""
        for host, device in self._layer_pairs(self._torch.from_numpy(into), block_id):
            host.copy_(device)

    def _layer_pairs(self, row: "torch.Tensor", block_id: int) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """Each layer's piece of a host block, and its place on the device, as equal shapes."""
        pieces = row.view(len(self._layers), self._layer_bytes)
        return [
            (piece.view(layer.dtype).view(layer[block_id].shape), layer[block_id])
            for piece, layer in zip(pieces, self._layers, strict=True)
        ]


class Staged(Struct, frozen=True):
    """Blocks of one request in the staging area, in the order of their chain."""

    request_id: str
    names: list[ChainHash]
    slots: list[int]
    tenant: bytes = b""


def by_request(gathered: Sequence[Staged]) -> list[Staged]:
    """As one item a request: what a chain was staged in, step by step, becomes one write."""
    merged: dict[str, Staged] = {}
    for staged in gathered:
        whole = merged.setdefault(staged.request_id, Staged(staged.request_id, [], [], staged.tenant))
        whole.names.extend(staged.names)
        whole.slots.extend(staged.slots)
    return list(merged.values())


class BlockMover:
    """Performs the orders of the scheduler side. All but the private methods are called by the engine's thread."""

    def __init__(self, client: StoreClient, blocks: EngineBlocks):
        self._client = client
        self._blocks = blocks
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fleet-kv-load")
        self._ended = threading.Condition()
        self._loading = 0
        self._results: list[tuple[Load, list[bool]]] = []

        slots = max(MIN_STAGED_BLOCKS, STAGING_BYTES // blocks.block_bytes)
        # Filled, since the first touch of a page is thirty times slower than a copy.
        self._staging: Bytes = np.full((slots, blocks.block_bytes), 1, dtype=np.uint8)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)
        self._slots = slots
        self._full = False
        self._turns = 0  # steps begun and ended
        self._closing = threading.Event()
        self._staged: queue.SimpleQueue[Staged | None] = queue.SimpleQueue()  # None: the end
        self._writer = threading.Thread(target=self._write_staged, name="fleet-kv-write", daemon=True)
        self._writer.start()

    def start(self, work: StoreWork) -> None:
        """Begin the loads of a step."""
        self._turns += 1
        for load in work.loads:
            with self._ended:
                self._loading += 1
            self._loader.submit(self._load, load)
        if work.releases:
            self._loader.submit(self._release, work.releases)

    def save(self, work: StoreWork) -> None:
        """Keep the blocks that became full in a step."""
        self._turns += 1
        for save in work.urgent:
            try:
                self._blocks.save(self._client, save)
            except Exception:  # supervisor: a block that is not kept is a later miss
                log.exception("blocks could not be written to the KV store")
        for save in work.deferred:
            self._stage(save)

    def collect(self, *, idle: bool) -> list[tuple[Load, list[bool]]]:
        """Loads that have ended since the last call, with what is good of them."""
        with self._ended:
            if idle and self._loading and not self._results:
                self._ended.wait(IDLE_WAIT_SECONDS)
            results, self._results = self._results, []
        return results

    def close(self) -> None:
        """End both threads; what is staged is written first."""
        self._closing.set()
        self._staged.put(None)
        self._loader.shutdown(cancel_futures=True)
        self._writer.join(timeout=CLOSE_SECONDS)

    def _load(self, load: Load) -> None:
        whole = [False] * len(load.block_ids)
        try:
            whole = self._blocks.load(self._client, load)
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

    def _stage(self, save: Save) -> None:
        slots: list[int] = []
        for block_id in save.block_ids:
            try:
                slot = self._free.get_nowait()
            except queue.Empty:
                break
            self._blocks.copy_out(block_id, self._staging[slot])
            slots.append(slot)
        if slots:
            self._staged.put(Staged(save.request_id, save.names[: len(slots)], slots, save.tenant))
        if (full := len(slots) < len(save.block_ids)) and not self._full:
            log.warning("the KV store is slower than the engine; blocks are not kept")
        self._full = full

    def _write_staged(self) -> None:
        gathered: list[Staged | None] = []
        while None not in gathered:
            gathered = [self._staged.get()]
            self._await_pause()
            while not self._staged.empty():
                gathered.append(self._staged.get())
            for staged in by_request([one for one in gathered if one is not None]):
                self._write(staged)

    def _await_pause(self) -> None:
        """Wait as rule 4 says."""
        for _ in range(round(LONGEST_WAIT_SECONDS / PAUSE_SECONDS)):
            turns = self._turns
            closing = self._closing.wait(PAUSE_SECONDS)
            if closing or self._turns == turns or 2 * self._free.qsize() < self._slots:
                return

    def _write(self, staged: Staged) -> None:
        try:
            self._client.write(staged.names, [self._staging[slot] for slot in staged.slots], tenant=staged.tenant)
        except Exception:  # supervisor: a block that is not kept is a later miss
            log.exception("blocks could not be written to the KV store")
        for slot in staged.slots:
            self._free.put(slot)
