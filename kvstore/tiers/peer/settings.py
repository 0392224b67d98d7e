"""Settings of the peer tier."""

from typing import Annotated

from msgspec import Meta

from kvstore.net.addresses import host_port, unix_path
from kvstore.tiers.settings import TierSettings


class PeerSettings(TierSettings, frozen=True, kw_only=True, tag="peer"):
    """Settings of a tier in the memory of other nodes. A wrong field raises a `ValueError` that names it."""

    peers: tuple[str, ...]
    """Control addresses of the nodes, ``host:port`` or ``unix:/path``. All nodes have to write them in the same way,
    because nodes rank their peers by these strings."""

    own_address: str = ""
    """This node's own entry in `peers`; empty if `peers` does not contain this node. The node also ranks its own
    address, so that all nodes agree on the owner of a block. It never sends a request to itself."""

    look_ups: Annotated[int, Meta(ge=1, le=16)] = 2
    """Maximum number of peers that answer one look-up or read; after that, no further peer is asked. The default of 2
    covers the likely holder and one more peer. Each peer costs a round trip."""

    connect_seconds: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """Time limit for the handshake with a peer; less if the deadline of the call is nearer."""

    push: bool = False
    """Write the demoted blocks of each call to the memory of their owner. The owner is the first peer in the rendezvous
    order of the call's first block, so the blocks of one chain may have several owners."""

    def __post_init__(self) -> None:
        if not set(self.peers) - {self.own_address}:
            raise ValueError("peers: at least one other node is needed")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError("peers: an address is listed twice")
        if self.own_address and self.own_address not in self.peers:
            raise ValueError(f"own_address: {self.own_address!r} is not among the peers")
        for index, address in enumerate(self.peers):
            if not unix_path(address).startswith("/") and not _has_port(address):
                raise ValueError(f"peers[{index}]: {address!r} is neither unix:/path nor host:port")


def _has_port(address: str) -> bool:
    try:
        return host_port(address)[1] > 0
    except ValueError:
        return False
