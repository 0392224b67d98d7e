"""Proofs of the secret on the calls of the control plane, put there and asked for by interceptors.

A client's proof travels in a call's metadata, the node's in what trails the answer. A stream, which has no end to look
at, carries the client's only: ask something else first.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc

from kvstore.monotonic import unix_seconds
from kvstore.transports.authentication import CallProof, Key, nonce

PROOF_KEY = "kvstore-proof"
NODE_PROOF_KEY = "kvstore-node-proof"
EXEMPT = "/grpc.health.v1.Health/"

UNPROVEN = "the answer is not proven: that is no node with this client's secret"

Calendar = Callable[[], int]
"""Seconds since 1970."""

Request = TypeVar("Request")
Response = TypeVar("Response")
AioContext = grpc.aio.ServicerContext[Any, Any]


class Unproven(grpc.RpcError):
    """An answer whose sender did not prove the secret; looks like a refusal by the node."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAUTHENTICATED

    def details(self) -> str:
        return UNPROVEN

    def trailing_metadata(self) -> tuple[()]:
        return ()


class ProofAsker(grpc.aio.ServerInterceptor):
    """The node's end. Calls over Unix sockets are let through: their files' mode protects them."""

    def __init__(self, key: Key, now: Calendar = unix_seconds):
        self._key = key
        self._now = now

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Response] | None":
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(EXEMPT):
            return cast("grpc.RpcMethodHandler[Request, Response] | None", handler)
        if not handler.response_streaming:
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            behaviour = self._asking(method, handler.stream_unary or handler.unary_unary)
        else:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            behaviour = self._asking_once(method, handler.stream_stream or handler.unary_stream)
        proven = make(behaviour, handler.request_deserializer, handler.response_serializer)
        return cast("grpc.RpcMethodHandler[Request, Response]", proven)

    def _asking(self, method: str, behaviour: Any) -> Any:
        async def answer(request: Any, context: AioContext) -> Any:
            await self._check(method, context)
            return await behaviour(request, context)

        return answer

    def _asking_once(self, method: str, behaviour: Any) -> Any:
        async def stream(request: Any, context: AioContext) -> AsyncIterator[Any]:
            await self._check(method, context)
            async for each in behaviour(request, context):
                yield each

        return stream

    async def _check(self, method: str, context: AioContext) -> None:
        if context.peer().startswith("unix:"):
            return
        texts = [value for name, value in context.invocation_metadata() or () if name == PROOF_KEY]
        try:
            (text,) = texts
            proof = CallProof.parse(str(text))
        except ValueError:
            refusal = "this node asks for a proof: set the client's secret to the node's"
        else:
            refusal = proof.refusal(self._key, method, self._now())
            if not refusal:
                context.set_trailing_metadata(((NODE_PROOF_KEY, proof.answer(self._key, method).hex()),))
                return
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)


class _Prover:
    def __init__(self, key: Key, now: Calendar = unix_seconds):
        self._key = key
        self._now = now

    def _proven(self, details: Any) -> tuple[str, CallProof, Any]:
        """The method, the proof, and the details of the call that carries it."""
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        proof = CallProof.of(self._key, method, self._now(), nonce())
        metadata = [*(details.metadata or ()), (PROOF_KEY, proof.text)]
        return method, proof, details._replace(metadata=metadata)

    def _answered(self, method: str, proof: CallProof, trailing: Any) -> bool:
        texts = [value for name, value in trailing or () if name == NODE_PROOF_KEY]
        try:
            (text,) = texts
            return proof.is_answered_by(self._key, method, bytes.fromhex(str(text)))
        except ValueError:
            return False


class ProvenCalls(_Prover, grpc.UnaryUnaryClientInterceptor):
    """The client's end, for synchronous calls."""

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        method, proof, details = self._proven(client_call_details)
        call = continuation(details, request)
        if call.code() is grpc.StatusCode.OK and not self._answered(method, proof, call.trailing_metadata()):
            raise Unproven
        return call


class ProvenAioCalls(_Prover, grpc.aio.UnaryUnaryClientInterceptor):
    """The client's end, for calls on an event loop."""

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        method, proof, details = self._proven(client_call_details)
        call = await continuation(details, request)
        if await call.code() is grpc.StatusCode.OK:
            trailing = await call.trailing_metadata()
            if not self._answered(method, proof, trailing):
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAUTHENTICATED, await call.initial_metadata(), trailing, UNPROVEN
                )
        return call


class ProvenStreams(_Prover, grpc.aio.UnaryStreamClientInterceptor):
    """The client's end, for streams of answers on an event loop."""

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        _, _, details = self._proven(client_call_details)
        return await continuation(details, request)
