"""What can go wrong between a client and a store node, told apart by what the caller can do about it."""

from kvstore.namespace import KvNamespace


def reason(error: Exception) -> str:
    """Why something failed, for a person: of an error of the system what it says, without its number and the path."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class StoreError(Exception):
    """Anything that keeps a store node from being used."""


class StoreUnreachable(StoreError):
    """The node did not answer in time, or is not there: go on without it, and try again later."""


class LayoutMismatch(StoreError):
    """Node and client do not mean the same bytes: a person has to mend the configuration; nothing was moved.

    Attributes:
        field: The first field of `KvNamespace` that differs.
    """

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class StoreNotStarted(StoreError):
    """The node's settings cannot be obeyed on this machine: an address in use, too little memory. Nothing was started."""


class NodeEnded(StoreError):
    """A node in this process has ended by itself: the process has to go as well, so that its supervisor starts another."""


class BadCredentials(StoreNotStarted):
    """A file that proves who one is cannot be used, on a node or on a client: a person has to mend the configuration."""


class InvalidArgument(StoreError):
    """A request that no node will ever accept.

    Attributes:
        field: Name of the offending field of the request.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class NamespaceUnknown(StoreError):
    """No client has opened this namespace since the node started: say Hello (again), then repeat the call."""

    def __init__(self, digest: bytes):
        super().__init__(f"namespace {digest.hex()} is not open here")


class Restarted(StoreError):
    """The node is not the one that the caller shook hands with any more: say Hello again, then repeat the call."""


class NamespaceInUse(StoreError):
    """The same weights are already stored in another layout; see `kvstore.pool.machine`, rule 7.

    Attributes:
        fields: Those of `KvNamespace` that differ.
    """

    def __init__(self, present: KvNamespace, offered: KvNamespace):
        self.fields = present.differences(offered)
        parts = ", ".join(
            f"{name}: {getattr(present, name)!r} here, {getattr(offered, name)!r} offered" for name in self.fields
        )
        super().__init__(f"model {offered.model!r} is already stored in another layout ({parts})")


class Exhausted(StoreError):
    """A limit of the node is reached: try again later, or raise the setting that the message names."""


class TierFailed(StoreError):
    """A tier could not read or write; its blocks are misses until it works again."""


class UndecodableBlock(StoreError):
    """Bytes of a backing tier are not what its codec made for that block: damaged, another's, or sealed with another key."""
