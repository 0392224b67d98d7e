"""Protocol versions: the range of versions that this build speaks, and the version that two processes agree on.

Rules:

1. The protocol version is one small integer for all links of the product. In its first message, each peer on a
   connection states the lowest and the highest version that it speaks. Both peers then use the highest common version.
2. A peer that states no range speaks version 1. If a peer states a lowest version above its highest one, only the
   highest version counts.
3. Without a common version, the connection is refused. The error names both ranges, and the peer that has to be
   upgraded.
4. A build whose highest version is N can speak with a build whose highest version is N-1. The lowest version of
   `own_protocols` may therefore grow only if the build before this one already spoke the new lowest version.

CONTRIBUTING.md ("Change a message") says which changes need another version.
"""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct

DISTRIBUTION = "fleet-serving"
# maximum number of characters of a peer's product version that are kept, because the text comes from outside
LONGEST_PRODUCT = 64


class ProtocolRange(Struct, frozen=True):
    """The protocol versions that a process speaks, and its product version (empty if unknown)."""

    lowest: int = 1
    highest: int = 1
    product: str = ""

    def __str__(self) -> str:
        numbers = f"{self.lowest}" if self.lowest == self.highest else f"{self.lowest} to {self.highest}"
        return f"protocol {numbers}{f' (version {self.product})' if self.product else ''}"


UNSTATED = ProtocolRange()
"""Range of a process that states none (rule 2)."""


class NoCommonProtocol(Exception):
    """Two processes speak no common version of the protocol. The message names both ranges, and the process to upgrade.

    Attributes:
        peer: The range of the other process.
    """

    def __init__(self, own_name: str, own: ProtocolRange, peer_name: str, peer: ProtocolRange):
        older = peer_name if peer.highest < own.lowest else own_name
        super().__init__(f"{own_name} speaks {own}, and {peer_name} speaks {peer}; upgrade {older}")
        self.peer = peer


@cache
def own_protocols() -> ProtocolRange:
    """Return the range that this build speaks."""
    try:
        product = version(DISTRIBUTION)
    except PackageNotFoundError:  # the program runs from its source tree and is not installed
        product = ""
    return ProtocolRange(lowest=1, highest=2, product=product)


def stated(lowest: int, highest: int, product: str) -> ProtocolRange:
    """Return the range that a peer states.

    A bound of 0, which means that the peer does not state it, becomes 1 (rule 2).
    """
    lowest, highest = lowest or 1, highest or 1
    shown = "".join(filter(str.isprintable, product[:LONGEST_PRODUCT]))
    return ProtocolRange(min(lowest, highest), highest, shown)


def agree(own: ProtocolRange, peer: ProtocolRange, *, own_name: str, peer_name: str) -> int:
    """Return the highest common version.

    Raises:
        NoCommonProtocol: The two ranges have no common version.
    """
    highest = min(own.highest, peer.highest)
    if highest < max(own.lowest, peer.lowest):
        raise NoCommonProtocol(own_name, own, peer_name, peer)
    return highest
