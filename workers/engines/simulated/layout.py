"""How the simulated engine's KV lies in its memory.

The model gives the values of a block, by layer, head, token and element. The engine keeps them as a real one with several
ranks does: each rank has the heads that are its share, and within a layer heads come before tokens (HND) or tokens before
heads (NHD). Here the objects of all ranks follow each other in one buffer.

This is written apart from `kvstore.layouts.repack`, and on purpose in other terms: what that does to the bytes of a block is judged by
the tokens that come of them.
"""

import numpy as np
from msgspec import Struct

from workers.kv_layout import KvLayout


class EngineLayout(Struct, frozen=True, kw_only=True):
    """Sizes of the axes of a whole-model block, and what becomes of them."""

    layers: int
    kv_heads: int  # a multiple of `tensor_parallel`
    block_tokens: int
    head_bytes: int  # a head and token
    tensor_parallel: int
    kv_layout: KvLayout

    @property
    def axes(self) -> str:
        """Of one rank's object, in the letters of `kvstore.namespace`."""
        return f"L{self.kv_layout}"

    def lay_out(self, values: bytes) -> bytes:
        """Values in the order layers, heads, tokens, elements, as they lie in the engine."""
        share = self.kv_heads // self.tensor_parallel
        return self._swapped(values, (self.layers, self.tensor_parallel, share, self.block_tokens, self.head_bytes))

    def values(self, held: bytes | memoryview) -> bytes:
        """The other way round."""
        share = self.kv_heads // self.tensor_parallel
        inner = (share, self.block_tokens) if self.kv_layout == "HND" else (self.block_tokens, share)
        return self._swapped(held, (self.tensor_parallel, self.layers, *inner, self.head_bytes))

    def _swapped(self, block: bytes | memoryview, shape: tuple[int, ...]) -> bytes:
        """Layers for ranks, and heads for tokens where these come first."""
        axes = (1, 0, 2, 3, 4) if self.kv_layout == "HND" else (1, 0, 3, 2, 4)
        return np.frombuffer(block, np.uint8).reshape(shape).transpose(axes).tobytes()
