"""Pooling: translates requests for a vector instead of tokens from and to proto/fleet/v1/inference.proto."""

from fleet.core.requests import Pooling, PoolingTask
from fleet.v1 import inference_pb2 as pb


def encode_pooling(pooling: Pooling) -> pb.Pooling:
    """Encode what a request demands of its vector: task, dimensions, activation, and the length of the first text of a pair.

    Raises:
        TypeError, ValueError: A value does not fit its field.
    """
    return pb.Pooling(
        task=pooling.task.value,
        dimensions=pooling.dimensions,
        activation=pooling.activation,
        first_tokens=pooling.first_tokens,
    )


def decode_pooling(message: pb.Pooling) -> Pooling | None:
    """Decode what a request demands of its vector; return None if its task is unknown."""
    try:
        task = PoolingTask(message.task)
    except ValueError:
        return None
    return Pooling(
        task=task,
        dimensions=message.dimensions,
        activation=message.activation if message.HasField("activation") else None,
        first_tokens=message.first_tokens,
    )
