"""Twin of `table.c`: a table of blocks as a dict. It defines the results and runs where the C is not built."""

from typing import Generic, Protocol, TypeVar

NAME_BYTES = 16
SLOT_BYTES = 20


class HasSlot(Protocol):
    """A block whose slot never changes."""

    @property
    def slot(self) -> bytes:
        """`SLOT_BYTES` bytes that stay the same while the block is in the table."""


BlockT = TypeVar("BlockT", bound=HasSlot)


class BlockTable(Generic[BlockT]):
    """Blocks by hash. A hash without 16 bytes, or hashes that are not a multiple of 16 bytes, raise `ValueError`."""

    def __init__(self, key: tuple[int, int], /) -> None:  # noqa: ARG002 - a dict has its own key
        """Start empty; `key` is two secret 64-bit numbers, so that clients cannot choose hashes that collide."""
        self._blocks: dict[bytes, BlockT] = {}

    def get(self, name: bytes, /) -> BlockT | None:
        """Return the block of that hash, or None."""
        return self._blocks.get(_checked(name))

    def put(self, name: bytes, block: BlockT, /) -> None:
        """Add a block, replacing the one with the same hash."""
        if len(block.slot) != SLOT_BYTES:
            raise ValueError(f"a slot of {len(block.slot)} bytes instead of {SLOT_BYTES}")
        self._blocks[_checked(name)] = block

    def remove(self, name: bytes, /) -> None:
        """Remove the block of that hash; raise KeyError if there is none."""
        del self._blocks[_checked(name)]

    def blocks(self, names: bytes, /) -> list[BlockT]:
        """Return the longest present prefix of a chain, whose hashes follow each other in `names`."""
        if len(names) % NAME_BYTES:
            raise ValueError(f"names of {len(names)} bytes, which is not a multiple of {NAME_BYTES}")
        found: list[BlockT] = []
        for start in range(0, len(names), NAME_BYTES):
            if (block := self._blocks.get(names[start : start + NAME_BYTES])) is None:
                break
            found.append(block)
        return found

    def slots(self, names: bytes, /) -> bytes:
        """Return the slots of that prefix, one after the other."""
        return b"".join([block.slot for block in self.blocks(names)])

    def names(self) -> list[bytes]:
        """Return all hashes; their order depends only on the history and the key."""
        return list(self._blocks)

    def __contains__(self, name: bytes, /) -> bool:
        return _checked(name) in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


def _checked(name: bytes) -> bytes:
    if len(name) != NAME_BYTES:
        raise ValueError(f"a name of {len(name)} bytes instead of {NAME_BYTES}")
    return name
