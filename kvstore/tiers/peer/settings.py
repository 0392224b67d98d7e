"""Whose memory is read."""

from typing import Annotated

from msgspec import Meta

from kvstore.net.addresses import host_port, unix_path
from kvstore.tiers.settings import TierSettings


class PeerSettings(TierSettings, frozen=True, kw_only=True, tag="peer"):
    """Whose memory to read. Refused as a whole when a field is wrong (`ValueError` names it)."""

    peers: tuple[str, ...]
    """Control planes of the nodes, ``host:port`` or ``unix:/path``; written alike on all nodes, since that is what they
    are ranked by."""

    own_address: str = ""
    """This node's own entry among the peers. It is ranked, so that all nodes agree on owners, but never asked."""

    look_ups: Annotated[int, Meta(ge=1, le=16)] = 2
    """Peers that are asked for a chain: the one that is known or likely to have it, and one more. Each costs a round trip."""

    connect_seconds: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """For the handshake with a peer; less where the deadline of the call is nearer."""

    push: bool = False
    """Whether blocks that go down are written to the memory of their chain's owner."""

    def __post_init__(self) -> None:
        if not set(self.peers) - {self.own_address}:
            raise ValueError("peers: at least one other node is needed")
        if len(set(self.peers)) < len(self.peers):
            raise ValueError("peers: an address is there twice")
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
