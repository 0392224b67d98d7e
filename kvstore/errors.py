"""Errors of store nodes and their clients, one class for each reaction of the caller."""

from kvstore.namespace import KvNamespace


def reason(error: Exception) -> str:
    """Return the cause of an error in words; for an operating-system error, without its number and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class StoreError(Exception):
    """Base class: a store node cannot be used."""


class StoreUnreachable(StoreError):
    """The node did not answer in time, or is not there. Continue without it and retry later."""


class LayoutMismatch(StoreError):
    """Node and client would store the same blocks in different layouts. No bytes were moved. Correct the configuration.

    Attributes:
        field: The first field of `KvNamespace` that differs.
    """

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class StoreNotStarted(StoreError):
    """The node's settings cannot be used on this machine, for example because an address is in use.

    Nothing was started.
    """


class NodeEnded(StoreError):
    """A node that runs in this process has ended by itself.

    End the process, so that its supervisor starts another one.
    """


class BadCredentials(StoreNotStarted):
    """A credentials file of a node or a client cannot be used. Correct the configuration."""


class InvalidArgument(StoreError):
    """The request is invalid, and every node will refuse it.

    Attributes:
        field: Name of the invalid field of the request.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class NamespaceUnknown(StoreError):
    """No client has opened this namespace since the node started. Send Hello again, then repeat the call."""

    def __init__(self, digest: bytes):
        super().__init__(f"namespace {digest.hex()} is not open here")


class Restarted(StoreError):
    """The node has restarted since the handshake. Send Hello again, then repeat the call."""


class NamespaceInUse(StoreError):
    """The blocks of the same weights are already stored in another layout; see rule 7 of `kvstore.pool.machine`.

    Attributes:
        fields: Names of the fields of `KvNamespace` that differ.
    """

    def __init__(self, present: KvNamespace, offered: KvNamespace):
        self.fields = present.differences(offered)
        parts = ", ".join(
            f"{name}: {getattr(present, name)!r} here, {getattr(offered, name)!r} offered" for name in self.fields
        )
        super().__init__(f"model {offered.model!r} is already stored in another layout ({parts})")


class Exhausted(StoreError):
    """A limit of the node is reached. Retry later, or raise the setting that the message names."""


class TierFailed(StoreError):
    """A tier could not read or write. Its blocks count as misses until it works again."""


class UndecodableBlock(StoreError):
    """Bytes from a backing tier cannot be decoded: damaged, of another block, or encrypted with an unknown secret."""
