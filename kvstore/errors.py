"""Errors of store nodes and their clients.

Errors to which the caller has to react differently have different classes.
"""

from kvstore.namespace import KvNamespace


def reason(error: Exception) -> str:
    """Return the message of an error, or the name of its class if it has none.

    For an error of the operating system, the message has neither the error number nor the path.
    """
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class StoreError(Exception):
    """Base class of all errors of store nodes and their clients."""


class StoreUnreachable(StoreError):
    """The node cannot be used now.

    It did not answer in time, no process listens at its address, or no data path to it works. Or it refused the
    handshake, for example because the client's secret is wrong or too many namespaces are open.

    The caller continues without the node and retries later.
    """


class IncompatibleVersion(StoreUnreachable):
    """Node and client speak no common version of the protocol. The message says which of the two has to be upgraded.

    Until the upgrade, the caller continues without the node.
    """


class LayoutMismatch(StoreError):
    """Blocks cannot be exchanged.

    Reader and writer describe their blocks differently (model, data type, layout, sizes), or a description is invalid,
    or a block has a wrong size. No bytes were moved. The administrator has to correct the configuration.

    Attributes:
        field: Name of the first field that differs or is invalid.
    """

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class StoreNotStarted(StoreError):
    """The settings of a process cannot be used on this machine, for example because an address is in use.

    Nothing was started. Routers and workers get this error too, from code that they share with store nodes.
    """


class NodeEnded(StoreError):
    """A node that runs in this process has ended by itself.

    The host program has to end too, so that its supervisor starts it again.
    """


class BadCredentials(StoreNotStarted):
    """A file with a secret or certificates cannot be used. The administrator has to correct the configuration."""


class InvalidArgument(StoreError):
    """The node finds the request invalid, and would refuse the same request again.

    Attributes:
        field: Name of the invalid field of the request.
    """

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class NamespaceUnknown(StoreError):
    """The namespace is not open at the node.

    No client has opened it since the node started, or the node has closed it to make room for another namespace
    (`kvstore.pool.open_namespaces`). The client has to repeat the handshake (the call `Hello`) and then the failed
    call.
    """

    def __init__(self, digest: bytes):
        super().__init__(f"namespace {digest.hex()} is not open here")


class Restarted(StoreError):
    """The node has restarted since the client's handshake.

    The client has to repeat the handshake (the call `Hello`) and then the failed call.
    """


class NamespaceInUse(StoreError):
    """Another namespace with the same weights is in use at the node; see rule 7 of `kvstore.pool.machine`.

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
    """A limit of the node is reached, so it refuses the request. The caller may retry later.

    The administrator may raise the setting that the message names.
    """


class TierFailed(StoreError):
    """A tier could not read or write. Requests for its blocks count as misses until the tier works again."""


class UndecodableBlock(StoreError):
    """Bytes from a backing tier cannot be decoded.

    They are damaged, belong to another block, or were stored with a codec, version or secret that this node does not
    use.
    """
