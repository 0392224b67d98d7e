"""KV memory of a vLLM engine as blocks, or as one rank's shards of them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvstore.buffers import ByteArray, MutableBlock
from kvstore.client.store_client import StoreClient, batch_blocks
from kvstore.layouts.rank_shards import RankShard
from kvstore.messages import Match
from workers.engines.vllm.store_planner import BlockLoad

if TYPE_CHECKING:
    import torch

Source: TypeAlias = Callable[[int], ByteArray | list[ByteArray]]
"""Returns the block at an index, in one piece or in several; it stays valid until `kvstore.client.store_client.batch_blocks` more
were asked for."""


class BlockReader(Protocol):
    """Reads blocks from the store; a store client implements it."""

    def read(self, match: Match, indices: Sequence[int], destinations: Sequence[MutableBlock]) -> list[bool]:
        """Read blocks as `kvstore.client.StoreClient.read` does."""
        ...


class ShareReader:
    """Implements `BlockReader` for one rank among several."""

    def __init__(self, client: StoreClient, share: RankShard):
        self._client = client
        self._share = share

    def read(self, match: Match, indices: Sequence[int], destinations: Sequence[MutableBlock]) -> list[bool]:
        return self._client.read_shard(match, indices, self._share, destinations)


class EngineBlocks(Protocol):
    """KV memory of one rank by block number; it holds whole blocks, or this rank's shards."""

    block_bytes: int

    def load(self, reader: BlockReader, load: BlockLoad) -> list[bool]:
        """Fill the blocks of `load`; return for each whether its bytes arrived whole."""
        ...

    def source(self, block_ids: Sequence[int]) -> Source:
        """Return the source of these blocks' bytes for a write to the store. One source is in use at a time."""
        ...

    def copy_out(self, block_id: int, into: ByteArray) -> None:
        """Copy one block to host memory, in the store's layout."""
        ...


class HostBlocks:
    """KV memory that the CPU can address: blocks are read and written in place, without staging."""

    def __init__(self, layers: "Sequence[torch.Tensor]"):
        """Share memory with the engine.

        Args:
            layers: One contiguous tensor for each layer, [blocks, heads, tokens, elements].
        """
        import torch  # noqa: PLC0415 - heavy; only the engine's processes have it

        # [blocks, bytes of one layer's block]
        self.layers: list[ByteArray] = [layer.view(len(layer), -1).view(torch.uint8).numpy() for layer in layers]
        self._layer_bytes: int = self.layers[0].shape[1]
        self.block_bytes = self._layer_bytes * len(self.layers)

    def load(self, reader: BlockReader, load: BlockLoad) -> list[bool]:
        destinations = [self._pieces(block_id) for block_id in load.block_ids]
        return reader.read(load.match, range(load.first, load.first + len(destinations)), destinations)

    def source(self, block_ids: Sequence[int]) -> Source:
        return lambda index: self._pieces(block_ids[index])

    def copy_out(self, block_id: int, into: ByteArray) -> None:
        for index, layer in enumerate(self.layers):
            into[index * self._layer_bytes : (index + 1) * self._layer_bytes] = layer[block_id]

    def _pieces(self, block_id: int) -> list[ByteArray]:
        return [layer[block_id] for layer in self.layers]


class DeviceBlocks:
    """KV memory of an accelerator: blocks pass through pinned host buffers, a batch at a time."""

    def __init__(self, layers: "Sequence[torch.Tensor]"):
        """Allocate one host buffer for each direction, because loads and saves run in different threads.

        Args:
            layers: One tensor for each layer, logically [blocks, heads, tokens, elements] in any physical order.
        """
        import torch  # noqa: PLC0415 - heavy; only the engine's processes have it

        self._torch = torch
        self.layers = layers
        one = layers[0][0]
        self._layer_bytes: int = one.numel() * one.element_size()
        self.block_bytes = self._layer_bytes * len(layers)
        pinned = layers[0].device.type != "cpu"
        self._incoming, self._outgoing = (
            torch.empty((batch_blocks(self.block_bytes), self.block_bytes), dtype=torch.uint8, pin_memory=pinned)
            for _ in range(2)
        )

    def load(self, reader: BlockReader, load: BlockLoad) -> list[bool]:
        whole: list[bool] = []
        for start in range(0, len(load.block_ids), len(self._incoming)):
            ids = load.block_ids[start : start + len(self._incoming)]
            rows = self._incoming[: len(ids)]
            first = load.first + start
            arrived = reader.read(load.match, range(first, first + len(ids)), [row.numpy() for row in rows])
            for row, block_id, good in zip(rows, ids, arrived, strict=True):
                if good:
                    for host, device in self._layer_pairs(row, block_id):
                        device.copy_(host)
            whole += arrived
        return whole

    def source(self, block_ids: Sequence[int]) -> Source:
        asked = 0

        def block(index: int) -> ByteArray:
            nonlocal asked
            row: ByteArray = self._outgoing[asked % len(self._outgoing)].numpy()
            asked += 1
            self.copy_out(block_ids[index], row)
            return row

        return block

    def copy_out(self, block_id: int, into: ByteArray) -> None:
        """Copy one block to host memory; the copy waits for the step that may still be writing it."""
        for host, device in self._layer_pairs(self._torch.from_numpy(into), block_id):
            host.copy_(device)

    def _layer_pairs(self, row: "torch.Tensor", block_id: int) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """Return each layer's piece of a host block and its place on the device, in equal shapes."""
        pieces = row.view(len(self.layers), self._layer_bytes)
        return [
            (piece.view(layer.dtype).view(layer[block_id].shape), layer[block_id])
            for piece, layer in zip(pieces, self.layers, strict=True)
        ]
