"""Newer peers: makes the messages of a later version of Fleet, with fields and values that this version does not know."""

from typing import TypeVar

from google.protobuf.message import Message
from hypothesis import strategies as st

from kvstore.v1 import protocol_pb2

AnyMessage = TypeVar("AnyMessage", bound=Message)

FUTURE = protocol_pb2.ProtocolRange(lowest=7, highest=9, product="99.0")
"""Range of protocol versions of a peer that has no version in common with this one."""


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _field(number: int, content: int | bytes) -> bytes:
    if isinstance(content, int):
        return _varint(number << 3) + _varint(content)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


unknown_fields = st.lists(
    st.builds(_field, st.integers(5000, 2**29 - 1), st.integers(0, 2**64 - 1) | st.binary(max_size=40)),
    min_size=1,
    max_size=4,
).map(b"".join)
"""Encoded fields with numbers that no message of this version has."""

unknown_values = st.text(st.characters(codec="utf-8"), max_size=20).map(lambda text: f"new {text}")


def with_unknown_fields(message: AnyMessage, fields: bytes) -> AnyMessage:
    """Return a copy of a message; the copy and all messages inside it have these further fields."""
    copy = type(message).FromString(message.SerializeToString())
    _add(copy, fields)
    assert copy.SerializeToString() != message.SerializeToString()
    return type(message).FromString(copy.SerializeToString())


def _add(message: Message, fields: bytes) -> None:
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for each in value if field.is_repeated else (value,):
            _add(each, fields)
    message.MergeFromString(fields)
