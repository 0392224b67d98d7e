"""KV memory of a vLLM engine: reads and writes blocks, or one rank's shards of them, in the store's layout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kvstore.buffers import ByteArray, MutableBlock
from kvstore.client.store_client import StoreClient, batch_blocks
from kvstore.layouts.rank_shards import RankShard
from kvstore.messages import Match
from workers.engines.vllm.store_planner import BlockLoad

if TYPE_CHECKING:
    import torch

# Maximum number of bytes of one gather on the device, unless one block is larger. The temporary copies take more memory
# at their peak: a load has this number of bytes, and a save has twice as many, first in pieces and then stacked. The
# stacks of earlier gathers of a save also remain until they are copied to the host (rule 3 of `DeviceBlocks`).
GATHER_BYTES = 32 << 20

Source: TypeAlias = Callable[[int], ByteArray | list[ByteArray]]
"""A function that returns the block at an index, in one piece or in several. The returned block stays valid until the
function was called for as many other blocks as `kvstore.client.store_client.batch_blocks` returns."""


class BlockReader(Protocol):
    """Reads blocks, or one rank's shards of them, from the store: a `StoreClient`, or a `ShareReader`."""

    def read(self, match: Match, indices: Sequence[int], destinations: Sequence[MutableBlock]) -> list[bool]:
        """Read the blocks at `indices` of a match into the destinations; return for each block whether it arrived correctly."""
        ...


class ShareReader:
    """Reads this rank's shards of blocks from the store, in an engine with several ranks."""

    def __init__(self, client: StoreClient, share: RankShard):
        self._client = client
        self._share = share

    def read(self, match: Match, indices: Sequence[int], destinations: Sequence[MutableBlock]) -> list[bool]:
        return self._client.read_shard(match, indices, self._share, destinations)


Wait: TypeAlias = Callable[[], None]
"""A function that waits until an operation that was begun on the device has ended."""


class EngineBlocks(Protocol):
    """KV memory of one rank, addressed by block numbers; it contains whole blocks, or this rank's shards of them."""

    block_bytes: int

    def fence(self) -> Wait:
        """Return a fence that makes a `load` wait for the work that the engine's thread has launched until now.

        Only the engine's thread may call this.
        """
        ...

    def load(self, reader: BlockReader, load: BlockLoad, fence: Wait) -> list[bool]:
        """Read the blocks of `load` from the store into the engine's memory. Call `fence` before this memory is changed.

        Return for each block whether its bytes arrived correctly.
        """
        ...

    def source(self, block_ids: Sequence[int]) -> Source:
        """Return a function that returns the bytes of these blocks by index, for a write to the store.

        Only one such function may be used at a time.
        """
        ...

    def host_rows(self, count: int) -> ByteArray:
        """Return host memory for `count` blocks, of shape [count, block_bytes].

        Copies between the engine's blocks and this memory are fast (pinned memory, if there is a device).
        """
        ...

    def copy_out(self, block_ids: Sequence[int], rows: Sequence[ByteArray]) -> Wait:
        """Copy blocks to host memory, in the store's layout; each row is one of `host_rows`.

        The engine's thread calls this method. After it returns, that thread may already launch work that overwrites the
        blocks. The rows are complete once the returned function has been called and has returned; any thread may call
        it.
        """
        ...


def _done() -> None:
    """Do nothing, because there is nothing to wait for: without a device, all work is complete when a call returns."""


class HostBlocks:
    """KV memory that the CPU can address. Blocks are read and written in place, without a copy in between."""

    def __init__(self, layers: "Sequence[torch.Tensor]"):
        """Keep the engine's own tensors, so that blocks are read and written in place.

        Args:
            layers: One contiguous tensor for each layer, of shape [blocks, heads, tokens, elements].
        """
        import torch  # noqa: PLC0415 - heavy; only the engine's processes have it

        # one array of shape [blocks, bytes of a block in one layer] for each layer
        self.layers: list[ByteArray] = [layer.view(len(layer), -1).view(torch.uint8).numpy() for layer in layers]
        self._layer_bytes: int = self.layers[0].shape[1]
        self.block_bytes = self._layer_bytes * len(self.layers)

    def fence(self) -> Wait:
        return _done

    def load(self, reader: BlockReader, load: BlockLoad, fence: Wait) -> list[bool]:
        fence()
        destinations = [self._pieces(block_id) for block_id in load.block_ids]
        return reader.read(load.match, range(load.first, load.first + len(destinations)), destinations)

    def source(self, block_ids: Sequence[int]) -> Source:
        return lambda index: self._pieces(block_ids[index])

    def host_rows(self, count: int) -> ByteArray:
        # The memory is written once in advance, because the first access to a page of memory is thirty times slower than a copy.
        return np.full((count, self.block_bytes), 1, dtype=np.uint8)

    def copy_out(self, block_ids: Sequence[int], rows: Sequence[ByteArray]) -> Wait:
        size = self._layer_bytes
        for block_id, row in zip(block_ids, rows, strict=True):
            for index, layer in enumerate(self.layers):
                row[index * size : (index + 1) * size] = layer[block_id]
        return _done

    def _pieces(self, block_id: int) -> list[ByteArray]:
        return [layer[block_id] for layer in self.layers]


class DeviceBlocks:
    """KV memory of an accelerator: blocks are gathered on the device, then copied to pinned host memory together.

    Rules:

    1. Reading blocks (`copy_out`, `source`) begins with a gather on the engine's own CUDA stream. The gather therefore
       sees the results of all work that was launched before it, and of no later work. The gathered bytes are then
       copied to the host on a stream for saves, while the engine goes on.
    2. Loads have a stream of their own. On the engine's stream, each copy of a load would wait for the steps that the
       engine has launched. The fence of a load (`fence`) makes the load wait only for the work that may still use the
       blocks that the load fills.
    3. A gather has at most `GATHER_BYTES`, or one block, because the engine has taken nearly all memory of the device. Loads
       wait for the end of each gather before they begin the next one. Saves do not wait between their gathers, because
       they begin in the engine's thread. While the device is busy, the bytes of several gathers of a save therefore remain
       in its memory. They are at most as many as the rows that the save copies to: for deferred saves, those of the
       staging area (`workers.engines.vllm.blocks.saves.STAGING_BYTES`).
    """

    def __init__(self, layers: "Sequence[torch.Tensor]"):
        """Allocate host buffers for each direction, because loads and saves run in different threads.

        Args:
            layers: One tensor for each layer, of shape [blocks, heads, tokens, elements], in any order in memory.
        """
        import torch  # noqa: PLC0415 - heavy; only the engine's processes have it

        self._torch = torch
        self.layers = layers
        one = layers[0][0]
        self._shape = one.shape
        self.block_bytes = one.numel() * one.element_size() * len(layers)
        self._device = layers[0].device
        self._streams = _Streams(torch, self._device) if self._device.type != "cpu" else None
        self._gathered_blocks = max(1, GATHER_BYTES // self.block_bytes)
        self._batch = batch_blocks(self.block_bytes)
        self._incoming = self._host_tensor(self._batch)
        self._outgoing = self._host_tensor(2 * self._batch).numpy()

    def fence(self) -> Wait:
        return _done if self._streams is None else self._streams.loads_wait()

    def load(self, reader: BlockReader, load: BlockLoad, fence: Wait) -> list[bool]:
        whole: list[bool] = []
        for start in range(0, len(load.block_ids), self._batch):
            ids = load.block_ids[start : start + self._batch]
            first = load.first + start
            rows = [row.numpy() for row in self._incoming[: len(ids)]]
            arrived = reader.read(load.match, range(first, first + len(ids)), rows)
            if not start:
                fence()
            self._copy_in([(row, block_id) for row, block_id in enumerate(ids) if arrived[row]])
            whole += arrived
        return whole

    def source(self, block_ids: Sequence[int]) -> Source:
        """Return a function that returns the bytes of these blocks by index.

        Indices are usually requested in order, so the source copies the next blocks in advance, a batch at a time. Once
        an index is skipped, the source copies single blocks. In both cases a returned block stays valid until
        `batch_blocks` other blocks were requested.
        """
        rows: dict[int, ByteArray] = {}  # blocks that were copied ahead, by index
        used, expected, ahead = 0, -1, self._batch

        def block(index: int) -> ByteArray:
            nonlocal used, expected, rows, ahead
            if expected not in (-1, index):
                ahead = 1
            expected = index + 1
            if index not in rows:
                ids = block_ids[index : index + ahead]
                places = [self._outgoing[(used + at) % len(self._outgoing)] for at in range(len(ids))]
                used += len(ids)
                self.copy_out(ids, places)()
                rows = dict(enumerate(places, index))
            return rows[index]

        return block

    def host_rows(self, count: int) -> ByteArray:
        rows: ByteArray = self._host_tensor(count).numpy()
        return rows

    def copy_out(self, block_ids: Sequence[int], rows: Sequence[ByteArray]) -> Wait:
        wait: Wait = _done
        for start in range(0, len(block_ids), self._gathered_blocks):
            some = slice(start, start + self._gathered_blocks)
            ids = self._indices(block_ids[some])
            # The shape is [blocks, layers, heads, tokens, elements], as blocks are in the store.
            gathered = self._torch.stack([layer.index_select(0, ids) for layer in self.layers], dim=1)
            flat = gathered.view(len(ids), -1).view(self._torch.uint8)
            if self._streams is None:
                self._fill(rows[some], flat)
            else:
                with self._streams.saving(flat) as wait:
                    self._fill(rows[some], flat)
        return wait

    def _fill(self, rows: Sequence[ByteArray], flat: "torch.Tensor") -> None:
        for row, content in zip(rows, flat, strict=True):
            self._torch.from_numpy(row).copy_(content, non_blocking=True)

    def _copy_in(self, places: Sequence[tuple[int, int]]) -> None:
        """Copy rows of the host buffer for loads to blocks on the device, and wait for the copies.

        Each entry of `places` has the number of a row and the number of the block to which the row is copied.
        """
        for start in range(0, len(places), self._gathered_blocks):
            rows, block_ids = zip(*places[start : start + self._gathered_blocks], strict=True)
            with nullcontext() if self._streams is None else self._streams.loading():
                gathered = self._torch.empty(
                    (len(rows), self.block_bytes), dtype=self._torch.uint8, device=self._device
                )
                if rows[-1] - rows[0] == len(rows) - 1:
                    gathered.copy_(self._incoming[rows[0] : rows[-1] + 1], non_blocking=True)
                else:
                    for content, row in zip(gathered, rows, strict=True):
                        content.copy_(self._incoming[row], non_blocking=True)
                pieces = gathered.view(self.layers[0].dtype).view(len(rows), len(self.layers), *self._shape)
                ids = self._indices(block_ids)
                for index, layer in enumerate(self.layers):
                    layer.index_copy_(0, ids, pieces[:, index])

    def _indices(self, block_ids: Sequence[int]) -> "torch.Tensor":
        """Return these block numbers as a tensor on the device.

        The tensor is copied from pinned memory, because a copy from other memory would make the thread wait.
        """
        pinned = self._torch.tensor(block_ids, dtype=self._torch.int64, pin_memory=self._streams is not None)
        return pinned.to(self._device, non_blocking=True)

    def _host_tensor(self, count: int) -> "torch.Tensor":
        """Return host memory for `count` blocks.

        It is filled once here, because the first access to each page is slow.
        """
        pinned = self._streams is not None
        return self._torch.ones((count, self.block_bytes), dtype=self._torch.uint8, pin_memory=pinned)


class _Streams:
    """The streams of one device for loads and for saves; the engine's own work uses other streams."""

    def __init__(self, torch: Any, device: "torch.device"):
        self._cuda = torch.cuda  # torch uses this name for AMD's devices (ROCm) as well
        self._device = device
        # The stream for loads has high priority, so that a small copy need not wait for the engine's large kernels. The
        # copies hardly delay these kernels.
        self._loads = torch.cuda.Stream(device, priority=-1)
        self._saves = torch.cuda.Stream(device)

    def loads_wait(self) -> Wait:
        """Return a function that makes later loads wait for the work that is on the calling thread's stream now."""
        launched = self._cuda.current_stream(self._device).record_event()
        return lambda: self._loads.wait_event(launched)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Run the GPU work of the `with` statement on the CUDA stream for loads, and wait for it at the end."""
        with self._cuda.stream(self._loads):
            yield
        self._loads.synchronize()

    @contextmanager
    def saving(self, gathered: "torch.Tensor") -> Iterator[Wait]:
        """Run the GPU work of the `with` statement on the CUDA stream for saves, after all work of the current stream.

        Args:
            gathered: The tensor that this work reads. Its memory is not reused before the work has ended.

        Yields:
            A function that waits until this work has ended.
        """
        self._saves.wait_stream(self._cuda.current_stream(self._device))
        copied = self._cuda.Event()
        with self._cuda.stream(self._saves):
            yield copied.synchronize
            copied.record()
        gathered.record_stream(self._saves)
