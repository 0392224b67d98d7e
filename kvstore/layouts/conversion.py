"""Layout conversion: between the blocks of one engine and the same blocks at rest in a store.

Rules:

1. A store keeps whole-model blocks in one layout, `kvstore.namespace.AT_REST`. An engine keeps one object per rank, in
   its own layout. Neither is part of a block's hash. Engines of any layout and number of ranks therefore share their
   blocks, and each converts its own.
2. An impossible conversion is refused when it is made, with the name of the field, before any byte moves.
3. Bytes are moved and never changed, and each byte of the destination is written.
"""

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from msgspec.structs import replace

from kvstore.buffers import ByteArray, Piece, pieces
from kvstore.errors import LayoutMismatch
from kvstore.layouts.fingerprint import Convertible, Fingerprint, Identical, Incompatible, negotiate
from kvstore.layouts.repack import RepackPlan
from kvstore.layouts.shards import shards_by_rank
from kvstore.namespace import AT_REST


class Conversion:
    """Conversion in both directions. It has no state, so any number of threads may use it."""

    def __init__(self, engine: Fingerprint):
        """Make the plans for both directions; raise LayoutMismatch, which names the field, if there are none."""
        stored = replace(engine, layout=AT_REST, tp=1)
        self._reading = _agreed(stored, engine)
        self._writing = _agreed(engine, stored)
        self._ranks: list[slice] = []
        self.stored_bytes = engine.at_rest.block_bytes
        self.engine_bytes = 0
        """Size of a block in the engine, all ranks together; more than at rest if ranks hold the same heads."""
        for part in shards_by_rank(engine.shape, engine.layout, engine.tp):
            start = self.engine_bytes
            self.engine_bytes += engine.shape.bytes_of(part.box)
            self._ranks.append(slice(start, self.engine_bytes))

    def read(self, stored: Piece) -> ByteArray:
        """Convert a block of the store to the engine's: the objects of all ranks, one after the other."""
        source = _bytes(stored, self.stored_bytes)
        if not self._reading:
            return source.copy()
        held = np.empty(self.engine_bytes, np.uint8)
        for plan, rank in zip(self._reading, self._ranks, strict=True):
            plan.perform([source], [held[rank]])
        return held

    def write(self, held: Piece) -> ByteArray:
        """Convert a block of the engine, its ranks one after the other, to the store's."""
        source = _bytes(held, self.engine_bytes)
        if not self._writing:
            return source.copy()
        stored = np.empty(self.stored_bytes, np.uint8)
        (plan,) = self._writing
        plan.perform([source[rank] for rank in self._ranks], [stored])
        return stored


def _agreed(writer: Fingerprint, reader: Fingerprint) -> Sequence[RepackPlan]:
    """Return the plan of each reading rank; none if there is nothing to do."""
    agreement = negotiate(writer=writer, reader=reader)
    match agreement:
        case Identical():
            return ()
        case Convertible(plans=plans):
            return plans
        case Incompatible():
            raise agreement.error()
        case _:
            assert_never(agreement)


def _bytes(block: Piece, expected: int) -> ByteArray:
    (found,) = pieces(block)
    if found.nbytes != expected:
        raise LayoutMismatch("block_bytes", f"block_bytes: a block of {found.nbytes} bytes, not {expected}")
    return found
