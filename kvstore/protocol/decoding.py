"""Decoding interceptor: refuses requests that are not valid messages, counts them, and logs each of them in one line.

Without this interceptor, gRPC would log a traceback for each such request and answer UNKNOWN. Any program that reaches a
port could then fill the node's log.
"""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Never, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from msgspec import Struct

from kvstore.protocol.wire import FIELD_KEY

FIELD = "request"
CAUSE = f"{FIELD}: it is no such message, or a string in it is not UTF-8"

Request = TypeVar("Request")
Response = TypeVar("Response")
AioContext = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)


class _Undecodable(Struct, frozen=True):
    """Takes the place of a request that could not be decoded, until the call is refused."""


UNDECODABLE = _Undecodable()


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Checks the requests of all methods of a server, including each request of a stream.

    Add it after the interceptors that refuse unauthenticated callers.
    """

    def __init__(self) -> None:
        self.refused = 0
        """Number of requests since the server started that were refused because they are no valid messages."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Response] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = "_".join(
            "stream" if each else "unary" for each in (handler.request_streaming, handler.response_streaming)
        )
        guarded = getattr(grpc, f"{kind}_rpc_method_handler")(
            self._guarded(handler_call_details.method, getattr(handler, kind), streams=handler.request_streaming),
            _lenient(handler.request_deserializer),
            handler.response_serializer,
        )
        return cast("grpc.RpcMethodHandler[Request, Response]", guarded)

    def _guarded(self, method: str, behaviour: Any, *, streams: bool) -> Any:
        async def decoded(requests: AsyncIterator[Any], context: AioContext) -> AsyncIterator[Any]:
            async for request in requests:
                yield request if request is not UNDECODABLE else await self._refuse(method, context)

        async def checked(request: Any, context: AioContext) -> Any:
            if streams:
                return decoded(request, context)
            return request if request is not UNDECODABLE else await self._refuse(method, context)

        async def answer(request: Any, context: AioContext) -> Any:
            return await behaviour(await checked(request, context), context)

        async def stream(request: Any, context: AioContext) -> AsyncIterator[Any]:
            async with aclosing(behaviour(await checked(request, context), context)) as answers:
                async for each in answers:
                    yield each

        return stream if inspect.isasyncgenfunction(behaviour) else answer

    async def _refuse(self, method: str, context: AioContext) -> Never:
        self.refused += 1
        log.warning("request refused: not a valid message", extra={"method": method, "peer": context.peer()})
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, CAUSE, ((FIELD_KEY, FIELD),))
        raise AssertionError  # `abort` has raised an exception


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(content: bytes) -> Any:
        try:
            return deserialize(content)
        except DecodeError:
            return UNDECODABLE

    return decode
