"""Protocol versions on control ports: refuses a caller with which this process has no version of the protocol in common."""

import grpc

from fleet.net.grpc.calls import Context
from kvstore.protocol.range_messages import RangeCarrier, parse_range
from kvstore.protocol.versions import NoCommonProtocol, agree, own_protocols


async def agree_with_caller(request: RangeCarrier, own_name: str, context: Context) -> None:
    """Abort the call with OUT_OF_RANGE if the caller speaks no version of the protocol that this process speaks."""
    try:
        agree(own_protocols(), parse_range(request), own_name=own_name, peer_name="the caller")
    except NoCommonProtocol as error:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))
