"""Errors between a store node and its clients, divided by what the caller can do about them."""

from kvstore.namespace import KvNamespace


def reason(error: Exception) -> str:
    """Return the cause of an error in words for a person; for a system error without its number and path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class StoreError(Exception):
    """A store node cannot be used."""


class StoreUnreachable(StoreError):
    """The node did not answer in time, or is not there. Continue without it and retry later."""


class LayoutMismatch(StoreError):
    """Node and client do not mean the same bytes. Correct the configuration; nothing was moved.

    Attributes:
        field: The first field of `KvNamespace` that differs.
    """

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class StoreNotStarted(StoreError):
    """The settings of the node cannot be met on this machine, such as an address in use. Nothing was started."""


class NodeEnded(StoreError):
    """A node in this process has ended by itself. End the process, so that its supervisor starts another one."""


class BadCredentials(StoreNotStarted):
    """A credentials file of a node or a client cannot be used. Correct the configuration."""


class InvalidArgument(StoreError):
    """A request that no node will ever accept.

    Attributes:
        field: Name of the offending field of the request.
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
    """The same weights are already stored in another layout; see rule 7 of `kvstore.pool.machine`.

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
    """A tier could not read or write. Its blocks are misses until it works again."""


class UndecodableBlock(StoreError):
    """The bytes from a backing tier are not what its codec made for that block: damaged, or sealed with another key."""
