"""Open namespaces: the namespaces that clients have opened at a node, and their blocks."""

from collections.abc import Iterator

from msgspec import Struct

from kvstore.block import BlockHash
from kvstore.clock import SECOND, Nanos
from kvstore.errors import Exhausted, InvalidArgument, NamespaceInUse, NamespaceUnknown
from kvstore.messages import SLOT, Address, BlockKey, Slot
from kvstore.namespace import KvNamespace
from kvstore.native.tables import BlockTable
from kvstore.pool.lifecycle import BlockState
from kvstore.pool.quotas import TenantAccount

NAMESPACE_IDLE = Nanos(60 * SECOND)
"""If a namespace was unused for this long, another namespace with the same weights may be opened
(`kvstore.pool.machine`, rule 7). While a worker restarts, other namespaces are therefore refused for at least this long.
"""


class StoredBlock(Struct, gc=False, eq=False):
    """One block, from the reservation of its place until it leaves the pool. Only the pool machine changes it.

    A node has millions of blocks. Therefore the slot is one byte string in its wire form, and Python's cyclic garbage
    collection is off for these objects (`gc=False`): a block refers to no other block, so there are no cycles.
    """

    key: BlockKey
    slot: bytes  # place, generation and checksum in the format `kvstore.messages.SLOT`
    length: int  # size of the block in bytes
    account: TenantAccount | None  # account of the tenant whose quota is charged for the block; None: no quota
    state: BlockState = BlockState.RESERVED
    pins: int = 0

    @property
    def generation(self) -> int:
        return self.unpacked.generation

    @property
    def unpacked(self) -> Slot:
        return Slot(*SLOT.unpack(self.slot))

    @property
    def address(self) -> Address:
        offset, generation, _ = SLOT.unpack(self.slot)
        return Address(key=self.key, offset=offset, length=self.length, generation=generation)

    def has_bytes(self, crc32c: int) -> None:
        """Record that the block's bytes were written, and that this is their checksum."""
        self.slot = self.slot[:-4] + crc32c.to_bytes(4, "little")


class OpenNamespace:
    """Holds the readable blocks of one open namespace, and the blocks that are being written."""

    __slots__ = ("digest", "namespace", "readable", "used", "writing")

    def __init__(self, namespace: KvNamespace, used: Nanos, key: tuple[int, int]):
        self.namespace = namespace
        self.digest = namespace.digest
        self.used = used
        self.readable: BlockTable[StoredBlock] = BlockTable(key)
        self.writing: dict[BlockHash, StoredBlock] = {}

    @property
    def is_empty(self) -> bool:
        return not len(self.readable) and not self.writing


class OpenNamespaces:
    """Holds all open namespaces of a node, by digest."""

    def __init__(self, capacity_bytes: int, limit: int, table_key: tuple[int, int]):
        self._capacity_bytes = capacity_bytes
        self._limit = limit
        self._table_key = table_key
        self._opened: dict[bytes, OpenNamespace] = {}

    def open(self, namespace: KvNamespace, now: Nanos) -> None:
        """Open a namespace; if it is open already, only mark it as used.

        If the maximum number of namespaces is open, first close the longest unused one without blocks.

        Raises:
            InvalidArgument: A block has no bytes, or does not fit into the pool.
            NamespaceInUse: Another namespace with the same weights was used within `NAMESPACE_IDLE`.
            Exhausted: Too many namespaces are open, and all of them hold blocks.
        """
        digest = namespace.digest
        if (known := self._opened.get(digest)) is not None:
            known.used = now
            return
        if not 0 < namespace.block_bytes <= self._capacity_bytes:
            limits = f"1..{self._capacity_bytes}, the size of the pool"
            raise InvalidArgument("namespace.block_bytes", f"{namespace.block_bytes} is not within {limits}")
        for other in self._opened.values():
            if _weights(other.namespace) == _weights(namespace) and now - other.used < NAMESPACE_IDLE:
                raise NamespaceInUse(other.namespace, namespace)
        if len(self._opened) >= self._limit:
            self._forget_an_empty_one()
        self._opened[digest] = OpenNamespace(namespace, now, self._table_key)

    def get(self, digest: bytes) -> OpenNamespace:
        """Return the namespace with this digest; raise NamespaceUnknown if it is not open."""
        opened = self._opened.get(digest)
        if opened is None:
            raise NamespaceUnknown(digest)
        return opened

    def use(self, digest: bytes, now: Nanos) -> OpenNamespace:
        """Return the namespace as `get` does, and mark it as used."""
        opened = self.get(digest)
        opened.used = now
        return opened

    def find(self, key: BlockKey) -> StoredBlock | None:
        """Return the block of `key` if it is readable, otherwise None."""
        opened = self._opened.get(key.digest)
        return opened.readable.get(key.name) if opened is not None else None

    def written(self, key: BlockKey) -> StoredBlock | None:
        """Return the block of `key` if it is being written, otherwise None."""
        opened = self._opened.get(key.digest)
        return opened.writing.get(key.name) if opened is not None else None

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._opened

    def __iter__(self) -> Iterator[OpenNamespace]:
        return iter(self._opened.values())

    def _forget_an_empty_one(self) -> None:
        empty = [digest for digest, opened in self._opened.items() if opened.is_empty]
        if not empty:
            raise Exhausted(f"{self._limit} namespaces hold blocks (max_namespaces)")
        del self._opened[min(empty, key=lambda digest: self._opened[digest].used)]


def _weights(namespace: KvNamespace) -> tuple[str, str, str]:
    return namespace.model, namespace.revision, namespace.lora
