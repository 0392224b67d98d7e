"""Twin of `table.c`: a table of blocks as a dict. It defines the results, and is used if the C code is not built."""

from typing import Generic, Protocol, TypeVar

NAME_BYTES = 16
SLOT_BYTES = 20


class HasSlot(Protocol):
    """Protocol of a block that has its slot as packed bytes."""

    @property
    def slot(self) -> bytes:
        """The slot as `SLOT_BYTES` bytes. It does not change while the block is in the table."""


BlockT = TypeVar("BlockT", bound=HasSlot)


class BlockTable(Generic[BlockT]):
    """Finds blocks by their hash.

    A hash is passed as 16 bytes, and several hashes as one concatenation. Other lengths raise `ValueError`.
    """

    def __init__(self, key: tuple[int, int], /) -> None:  # noqa: ARG002 - a dict needs no key
        """Make an empty table.

        `key` consists of two secret 64-bit numbers. The native table places blocks by them, so that clients cannot
        choose hashes that collide; this twin does not need them.
        """
        self._blocks: dict[bytes, BlockT] = {}

    def get(self, name: bytes, /) -> BlockT | None:
        """Return the block with this hash; None if the table does not have it."""
        return self._blocks.get(_checked(name))

    def put(self, name: bytes, block: BlockT, /) -> None:
        """Add a block. It replaces a block with the same hash."""
        if len(block.slot) != SLOT_BYTES:
            raise ValueError(f"a slot of {len(block.slot)} bytes instead of {SLOT_BYTES}")
        self._blocks[_checked(name)] = block

    def remove(self, name: bytes, /) -> None:
        """Remove the block with this hash; raise KeyError if there is none."""
        del self._blocks[_checked(name)]

    def blocks(self, names: bytes, /) -> list[BlockT]:
        """Return the blocks of the longest prefix of the chain `names` (concatenated hashes) that is in the table."""
        if len(names) % NAME_BYTES:
            raise ValueError(f"names of {len(names)} bytes, which is not a multiple of {NAME_BYTES}")
        found: list[BlockT] = []
        for start in range(0, len(names), NAME_BYTES):
            if (block := self._blocks.get(names[start : start + NAME_BYTES])) is None:
                break
            found.append(block)
        return found

    def slots(self, names: bytes, /) -> bytes:
        """Return the concatenated slots of the blocks that `blocks` returns."""
        return b"".join([block.slot for block in self.blocks(names)])

    def names(self) -> list[bytes]:
        """Return all hashes, in the order in which they were first added."""
        return list(self._blocks)

    def __contains__(self, name: bytes, /) -> bool:
        return _checked(name) in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


def _checked(name: bytes) -> bytes:
    if len(name) != NAME_BYTES:
        raise ValueError(f"a name of {len(name)} bytes instead of {NAME_BYTES}")
    return name
