"""A table of blocks as a dict: what the native one means, and what runs where it was not built."""

from typing import Generic, Protocol, TypeVar

NAME_BYTES = 16
SLOT_BYTES = 20


class HasSlot(Protocol):
    """A block that stays where it is."""

    @property
    def slot(self) -> bytes:
        """`SLOT_BYTES`, the same for as long as the block is in the table."""
        ...


BlockT = TypeVar("BlockT", bound=HasSlot)


class BlockTable(Generic[BlockT]):
    """Blocks by name. A name that has not 16 bytes is a `ValueError`, and so are names that are not a multiple of them."""

    def __init__(self, key: tuple[int, int], /) -> None:  # noqa: ARG002 - a dict has a key of its own
        """Empty.

        Args:
            key: Two numbers of 64 bits that nobody else knows, so that clients cannot choose names that collide.
        """
        self._blocks: dict[bytes, BlockT] = {}

    def get(self, name: bytes, /) -> BlockT | None:
        """The block of that name."""
        return self._blocks.get(_checked(name))

    def put(self, name: bytes, block: BlockT, /) -> None:
        """Add a block, in the place of the one that had its name."""
        if len(block.slot) != SLOT_BYTES:
            raise ValueError(f"a slot of {len(block.slot)} bytes instead of {SLOT_BYTES}")
        self._blocks[_checked(name)] = block

    def remove(self, name: bytes, /) -> None:
        """Drop the block of that name.

        Raises:
            KeyError: There is none.
        """
        del self._blocks[_checked(name)]

    def blocks(self, names: bytes, /) -> list[BlockT]:
        """The longest prefix of a chain, whose names follow each other in `names`, that is here."""
        if len(names) % NAME_BYTES:
            raise ValueError(f"names of {len(names)} bytes, which is not a multiple of {NAME_BYTES}")
        found: list[BlockT] = []
        for start in range(0, len(names), NAME_BYTES):
            if (block := self._blocks.get(names[start : start + NAME_BYTES])) is None:
                break
            found.append(block)
        return found

    def slots(self, names: bytes, /) -> bytes:
        """Where those blocks lie: their slots, one after the other."""
        return b"".join([block.slot for block in self.blocks(names)])

    def names(self) -> list[bytes]:
        """All, in no particular order, which is the same for the same history and key."""
        return list(self._blocks)

    def __contains__(self, name: bytes, /) -> bool:
        return _checked(name) in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)


def _checked(name: bytes) -> bytes:
    if len(name) != NAME_BYTES:
        raise ValueError(f"a name of {len(name)} bytes instead of {NAME_BYTES}")
    return name
