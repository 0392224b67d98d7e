"""Range messages: converts a `kvstore.v1.ProtocolRange` to `kvstore.protocol.versions.ProtocolRange`, and back."""

from typing import Literal, Protocol

from kvstore.protocol.versions import UNSTATED, ProtocolRange, agree, own_protocols, stated
from kvstore.v1 import protocol_pb2 as pb


class RangeCarrier(Protocol):
    """A message with the field `protocols`."""

    @property
    def protocols(self) -> pb.ProtocolRange: ...

    def HasField(self, field_name: Literal["protocols"]) -> bool: ...  # noqa: N802 - protobuf names the method


def range_message(protocols: ProtocolRange | None = None) -> pb.ProtocolRange:
    """Return the message for a protocol range; None means the range of this build."""
    protocols = protocols or own_protocols()
    return pb.ProtocolRange(lowest=protocols.lowest, highest=protocols.highest, product=protocols.product)


def parse_range(message: RangeCarrier) -> ProtocolRange:
    """Return the range that the sender of a message states; `UNSTATED` if it states none."""
    if not message.HasField("protocols"):
        return UNSTATED
    protocols = message.protocols
    return stated(protocols.lowest, protocols.highest, protocols.product)


def agree_with_server(answer: RangeCarrier, peer_name: str) -> int:
    """Return the protocol version to use with the server that answered a call.

    Raises:
        NoCommonProtocol: There is no common version.
    """
    return agree(own_protocols(), parse_range(answer), own_name="this process", peer_name=peer_name)
