"""Which namespaces are open on a node, and which may not be opened beside them (rule 7 of `kvstore.machine`)."""

from collections.abc import Iterator

from kvstore.block import ChainHash
from kvstore.clock import SECOND, Nanos
from kvstore.errors import Exhausted, InvalidArgument, NamespaceInUse, NamespaceUnknown
from kvstore.layout import Namespace
from kvstore.lifecycle import State
from kvstore.messages import Address, Slot

NAMESPACE_IDLE = Nanos(60 * SECOND)
"""A layout that nobody used for this long no longer stands in the way of another; covers a worker's restart."""


class StoredBlock:
    """One block, from its reservation to its end. Only the machine changes it."""

    __slots__ = ("address", "crc32c", "pins", "state")

    def __init__(self, address: Address):
        self.address = address
        self.state = State.RESERVED
        self.pins = 0
        self.crc32c = 0

    @property
    def slot(self) -> Slot:
        return Slot(self.address.offset, self.address.generation, self.crc32c)


class OpenNamespace:
    """One namespace and the blocks that can be found in it, or are being written."""

    __slots__ = ("blocks", "namespace", "used")

    def __init__(self, namespace: Namespace, used: Nanos):
        self.namespace = namespace
        self.used = used
        self.blocks: dict[ChainHash, StoredBlock] = {}


class Namespaces:
    """By digest."""

    def __init__(self, capacity_bytes: int, limit: int):
        self._capacity_bytes = capacity_bytes
        self._limit = limit
        self._opened: dict[bytes, OpenNamespace] = {}

    def open(self, namespace: Namespace, now: Nanos) -> None:
        """Make a namespace known; again is fine.

        Raises:
            InvalidArgument: A block would not fit into the tier.
            NamespaceInUse: The same weights are in use in another layout.
            Exhausted: Too many namespaces hold blocks.
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
        self._opened[digest] = OpenNamespace(namespace, now)

    def get(self, digest: bytes) -> OpenNamespace:
        """The namespace with that digest.

        Raises:
            NamespaceUnknown: It is not open.
        """
        opened = self._opened.get(digest)
        if opened is None:
            raise NamespaceUnknown(digest)
        return opened

    def use(self, digest: bytes, now: Nanos) -> OpenNamespace:
        """As `get`; it counts as used."""
        opened = self.get(digest)
        opened.used = now
        return opened

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._opened

    def __iter__(self) -> Iterator[OpenNamespace]:
        return iter(self._opened.values())

    def _forget_an_empty_one(self) -> None:
        empty = [digest for digest, opened in self._opened.items() if not opened.blocks]
        if not empty:
            raise Exhausted(f"{self._limit} namespaces hold blocks (max_namespaces)")
        del self._opened[min(empty, key=lambda digest: self._opened[digest].used)]


def _weights(namespace: Namespace) -> tuple[str, str, str]:
    return namespace.model, namespace.revision, namespace.lora
