"""Rejections as gRPC statuses with details: Fleet's `ErrorDetail`, and Google's standard details, which tools understand."""

from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fleet.core.errors import Reason, RequestRejected
from fleet.net.status_codes import REASON_STATUSES
from fleet.v1 import inference_pb2 as pb

# Error messages are cut at this length: the message is sent three times in metadata, and clients accept 8 KiB of metadata.
MAX_MESSAGE_CHARACTERS = 500
RETRY_AFTER_MS = 1000


def long_message_rejection() -> RequestRejected:
    """Return the rejection of a message for which the limit of received bytes leaves no memory (`Http2Server.over_memory_limit`)."""
    message = "too many long requests are being taken in; retry later"
    return RequestRejected(Reason.QUEUE_FULL, message, retry_after_ms=RETRY_AFTER_MS)


def encode_status(refused: RequestRejected) -> Any:
    """Return the status for `ServicerContext.abort_with_status`."""
    message = (
        refused.message
        if len(refused.message) <= MAX_MESSAGE_CHARACTERS
        else f"{refused.message[:MAX_MESSAGE_CHARACTERS]}…"
    )
    details: list[Message] = [
        pb.ErrorDetail(
            reason=refused.reason, field=refused.field, retry_after_ms=refused.retry_after_ms, cause=refused.cause
        )
    ]
    if refused.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=refused.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if refused.retry_after_ms:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(refused.retry_after_ms)
        details.append(retry)
    status = status_pb2.Status(code=REASON_STATUSES[refused.reason].grpc.value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)
