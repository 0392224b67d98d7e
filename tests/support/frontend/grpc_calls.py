"""gRPC calls in tests: reads typed error details, and defines the options of a slow client."""

import grpc
from google.rpc import error_details_pb2, status_pb2

from fleet.v1 import inference_pb2 as pb

DETAILS = "grpc-status-details-bin"
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
"""Channel options of a client that buffers only few bytes that it has not read."""


def details_of(
    error: grpc.aio.AioRpcError,
) -> tuple[pb.ErrorDetail, error_details_pb2.BadRequest, error_details_pb2.RetryInfo]:
    found = (pb.ErrorDetail(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo())
    for key, value in error.trailing_metadata():
        if key == DETAILS:
            for packed in status_pb2.Status.FromString(value).details:
                for detail in found:
                    packed.Unpack(detail)
    return found
