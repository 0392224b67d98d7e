"""Layout of the simulated engine's KV in memory.

The model computes a block's values by layer, head, token and element. The engine stores them like a real engine with
several ranks: each rank has its share of the heads, and within a layer heads come before tokens (HND) or tokens
before heads (NHD). Here the objects of all ranks follow each other in one buffer.

This code is deliberately separate from `kvstore.layouts.repack` and written in other terms, so that wrong tokens reveal an
error in what that module does to a block's bytes.
"""

import numpy as np
from msgspec import Struct

from workers.ports import KvLayout


class EngineLayout(Struct, frozen=True, kw_only=True):
    """Sizes of the axes of a whole-model block, and its layout."""

    layers: int
    kv_heads: int  # number of heads, a multiple of `tensor_parallel`
    block_tokens: int
    head_bytes: int  # number of bytes of one head for one token
    tensor_parallel: int
    kv_layout: KvLayout

    @property
    def axes(self) -> str:
        """Layout of one rank's object, in the letters of `kvstore.namespace`."""
        return f"L{self.kv_layout}"

    def lay_out(self, values: bytes) -> bytes:
        """Convert values in the order layers, heads, tokens, elements to the engine's layout."""
        share = self.kv_heads // self.tensor_parallel
        return self._swapped(values, (self.layers, self.tensor_parallel, share, self.block_tokens, self.head_bytes))

    def values(self, held: bytes | bytearray) -> bytes:
        """Convert a block in the engine's layout back to values."""
        share = self.kv_heads // self.tensor_parallel
        inner = (share, self.block_tokens) if self.kv_layout == "HND" else (self.block_tokens, share)
        return self._swapped(held, (self.tensor_parallel, self.layers, *inner, self.head_bytes))

    def _swapped(self, block: bytes | bytearray, shape: tuple[int, ...]) -> bytes:
        """Swap layers and ranks, and heads and tokens if tokens come first."""
        axes = (1, 0, 2, 3, 4) if self.kv_layout == "HND" else (1, 0, 3, 2, 4)
        return np.frombuffer(block, np.uint8).reshape(shape).transpose(axes).tobytes()
