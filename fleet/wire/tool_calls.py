"""Tool calls: translates parts of tool calls from and to proto/fleet/v1/inference.proto."""

from fleet.core.requests import CallDelta
from fleet.v1 import inference_pb2 as pb


def encode_call(call: CallDelta) -> pb.CallDelta:
    return pb.CallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def decode_call(message: pb.CallDelta) -> CallDelta:
    return CallDelta(index=message.index, id=message.id, name=message.name, arguments=message.arguments)
