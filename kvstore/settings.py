"""Settings of a KV store node."""

from typing import Annotated

from msgspec import Meta, Struct

PAGE_BYTES = 4096
"""Blocks begin on page boundaries: O_DIRECT, huge pages and DMA all want it."""


class StoreSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one node is told. Refused as a whole when a field is wrong (`ValueError` names it)."""

    store_id: Annotated[str, Meta(min_length=1, max_length=128)]
    """Name of the node in the cluster; stays the same over restarts."""

    listen: tuple[str, ...]
    """Addresses of the control plane: ``unix:/path`` or ``host:port``; port 0 lets the system choose."""

    shm_socket: str = ""
    """Path of the Unix socket that hands out the pool to processes of this host. Empty: no shared memory."""

    data_listen: str = ""
    """``host:port`` of the TCP data plane. Empty: none."""

    capacity_bytes: Annotated[int, Meta(ge=PAGE_BYTES)] = 256 << 20
    """Size of the pool in memory; all of it is taken at the start. 256 MiB: 2,048 blocks of the built-in model."""

    max_lease_seconds: Annotated[float, Meta(gt=0, le=3600)] = 30
    """Longest time that a match may pin blocks. Covers a prefill that queues; a reader that died pins no longer."""

    reservation_seconds: Annotated[float, Meta(gt=0, le=3600)] = 10
    """Longest time from a reservation to its publication. A block takes milliseconds; a writer that died holds its
    space no longer than this."""

    max_leases: Annotated[int, Meta(ge=1)] = 65_536
    """Leases and reservations at a time, so that a client that never releases cannot exhaust the node."""

    max_namespaces: Annotated[int, Meta(ge=1)] = 256
    """Models, layouts and adapters at a time."""

    watch_queue: Annotated[int, Meta(ge=1)] = 1024
    """Messages that may wait for a slow watcher before its stream is cut."""

    def __post_init__(self) -> None:
        if not self.listen:
            raise ValueError("listen: at least one address is needed")
        for index, address in enumerate(self.listen):
            if not address.startswith("unix:"):
                _host_port(f"listen[{index}]", address)
        if self.data_listen:
            _host_port("data_listen", self.data_listen)


def _host_port(field: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{field}: {address!r} is neither unix:/path nor host:port")
