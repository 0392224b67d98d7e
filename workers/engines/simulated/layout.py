"""Layout of the simulated engine's KV in memory.

The model computes a block's values by layer, head, token and element. The engine stores them like a real engine with
several ranks: each rank has its share of the heads, and within a layer heads come before tokens (HND) or tokens before
heads (NHD). A block is one buffer here: first the bytes of rank 0, then those of rank 1, and so on.

This code deliberately shares nothing with `kvstore.layouts.repack`. If that module puts the bytes of a block into a wrong
order, the engine therefore computes wrong tokens, which reveal the error.
"""

import numpy as np
from msgspec import Struct

from workers.ports import KvLayout


class EngineLayout(Struct, frozen=True, kw_only=True):
    """Converts blocks between the model's order of bytes and the order in the memory of an engine with these sizes."""

    layers: int
    kv_heads: int  # number of KV heads of all ranks together, a multiple of `tensor_parallel`
    block_tokens: int
    head_bytes: int  # number of KV bytes of one head for one token in one layer
    tensor_parallel: int
    kv_layout: KvLayout

    @property
    def axes(self) -> str:
        """The order of the axes in one rank's part of a block, in the letters of `kvstore.namespace`."""
        return f"L{self.kv_layout}"

    def lay_out(self, values: bytes) -> bytes:
        """Return a block in the engine's layout; `values` has the order layers, heads, tokens, elements."""
        share = self.kv_heads // self.tensor_parallel
        return self._swapped(values, (self.layers, self.tensor_parallel, share, self.block_tokens, self.head_bytes))

    def values(self, held: bytes | bytearray) -> bytes:
        """Return the values of the block `held`, converted from the engine's layout to the order that `lay_out` takes."""
        share = self.kv_heads // self.tensor_parallel
        inner = (share, self.block_tokens) if self.kv_layout == "HND" else (self.block_tokens, share)
        return self._swapped(held, (self.tensor_parallel, self.layers, *inner, self.head_bytes))

    def _swapped(self, block: bytes | bytearray, shape: tuple[int, ...]) -> bytes:
        """Return the block after swapping the axes of layers and ranks, and for NHD also the axes of heads and tokens."""
        axes = (1, 0, 2, 3, 4) if self.kv_layout == "HND" else (1, 0, 3, 2, 4)
        return np.frombuffer(block, np.uint8).reshape(shape).transpose(axes).tobytes()
