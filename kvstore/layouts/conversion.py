"""Conversion: converts the blocks of an engine to the store's layout, and back.

Rules:

1. A store keeps blocks of the whole model in one layout, `kvstore.namespace.AT_REST`. In an engine, each rank has an
   object with its part of a block, in the engine's layout. The block hash does not depend on layouts and ranks.
   Therefore engines with different layouts and numbers of ranks share blocks, and each engine converts them.
2. An impossible conversion is an error when the `Conversion` is made, before any byte moves. The error names the field.
3. Bytes are copied and never changed, and every byte of the destination is written.
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
    """Converts blocks between the layout of an engine, divided among its ranks, and the layout of the store.

    Thread-safe, because a conversion has no mutable state.
    """

    def __init__(self, engine: Fingerprint):
        """Make the plans for both directions.

        Raises:
            LayoutMismatch: The layout or a size is invalid, or the heads cannot be divided among the ranks. The error
                names the field.
        """
        stored = replace(engine, layout=AT_REST, tp=1)
        self._reading = _make_plans(stored, engine)
        self._writing = _make_plans(engine, stored)
        self._ranks: list[slice] = []
        self.stored_bytes = engine.at_rest.block_bytes
        self.engine_bytes = 0
        """Bytes of a block on all ranks of the engine together. This is more than the size of the block in the store if
        several ranks hold the same heads."""
        for part in shards_by_rank(engine.shape, engine.layout, engine.tp):
            start = self.engine_bytes
            self.engine_bytes += engine.shape.bytes_of(part.box)
            self._ranks.append(slice(start, self.engine_bytes))

    def read(self, stored: Piece) -> ByteArray:
        """Convert a block of the store to the engine's form: the concatenated objects of all ranks, in order of rank.

        Raise LayoutMismatch if the block has a wrong size.
        """
        source = _checked_bytes(stored, self.stored_bytes)
        if not self._reading:
            return source.copy()
        held = np.empty(self.engine_bytes, np.uint8)
        for plan, rank in zip(self._reading, self._ranks, strict=True):
            plan.perform([source], [held[rank]])
        return held

    def write(self, held: Piece) -> ByteArray:
        """Convert a block of the engine, the concatenated objects of all ranks in order, to the store's form.

        Raise LayoutMismatch if the block has a wrong size.
        """
        source = _checked_bytes(held, self.engine_bytes)
        if not self._writing:
            return source.copy()
        stored = np.empty(self.stored_bytes, np.uint8)
        (plan,) = self._writing
        plan.perform([source[rank] for rank in self._ranks], [stored])
        return stored


def _make_plans(writer: Fingerprint, reader: Fingerprint) -> Sequence[RepackPlan]:
    """Return a plan for each rank of the reader.

    The result is empty if both have the same layout and number of ranks, so that nothing is converted.

    Raises:
        LayoutMismatch: The blocks of the writer cannot be converted to those of the reader. The error names the field.
    """
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


def _checked_bytes(block: Piece, expected: int) -> ByteArray:
    (found,) = pieces(block)
    if found.nbytes != expected:
        raise LayoutMismatch("block_bytes", f"block_bytes: a block has {found.nbytes} bytes instead of {expected}")
    return found
