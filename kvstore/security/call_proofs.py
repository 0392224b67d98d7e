"""Proofs of the secret on the calls of the control plane, added and checked by gRPC interceptors.

Rules:

1. A client's proof travels in the metadata of a call and covers the method and the exact bytes of the request. The
   server checks it before it parses the request, and accepts it once. It refuses proofs that were made before its
   port opened (`kvstore.security.call_replays`).
2. The node's proof travels in the trailing metadata of the answer. A stream of answers may never end, so a client
   cannot check the node's proof on it. Before it opens such a stream, a client should therefore make a call that has
   one answer. Proofs do not cover the content of answers; only TLS protects answers.
3. Calls that stream requests cannot be proven, because the proof is sent before the bytes of the requests are known.
   The server refuses such calls, except over Unix sockets.
"""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

import grpc

from kvstore.security.authentication import AuthenticationKey, CallProof, OutdatedProof, nonce
from kvstore.security.call_replays import CallReplays
from kvstore.system_clock import unix_seconds

PROOF_KEY = "kvstore-proof"
NODE_PROOF_KEY = "kvstore-node-proof"
EXEMPT = "/grpc.health.v1.Health/"

UNPROVEN = "the answer is not proven: whoever answers there does not have the caller's secret"
ASKING = "this port asks for a proof: set the caller's secret to that of this port"
OUTDATED = "this proof does not cover the request, as those of older versions: update the caller's software"
STREAMED = "this port asks for a proof, and a call that streams requests cannot be proven: use its Unix socket"

Calendar = Callable[[], int]
"""A function that returns the seconds since 1970."""

Request = TypeVar("Request")
Response = TypeVar("Response")
AioContext = grpc.aio.ServicerContext[Any, Any]


class UnprovenAnswer(grpc.RpcError):
    """The sender of the answer did not prove that it knows the secret.

    The error has the status UNAUTHENTICATED, like a refusal by the node.
    """

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAUTHENTICATED

    def details(self) -> str:
        return UNPROVEN

    def trailing_metadata(self) -> tuple[()]:
        return ()


class ProofServerInterceptor(grpc.aio.ServerInterceptor):
    """Checks the proofs of callers, and adds the node's proof to each answer.

    Calls over Unix sockets need no proof, because the file mode of a socket protects it.
    """

    def __init__(self, key: AuthenticationKey, now: Calendar = unix_seconds):
        self._key = key
        self._now = now
        self._replays = CallReplays(now())

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Response] | None":
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(EXEMPT):
            return cast("grpc.RpcMethodHandler[Request, Response] | None", handler)
        if handler.request_streaming:
            proven = self._without_proofs(handler)
        elif handler.response_streaming:
            asking = self._asking if iscoroutinefunction(handler.unary_stream) else self._asking_once
            behaviour = asking(method, handler.unary_stream, handler.request_deserializer)
            proven = grpc.unary_stream_rpc_method_handler(behaviour, None, handler.response_serializer)
        else:
            behaviour = self._asking(method, handler.unary_unary, handler.request_deserializer)
            proven = grpc.unary_unary_rpc_method_handler(behaviour, None, handler.response_serializer)
        return cast("grpc.RpcMethodHandler[Request, Response]", proven)

    # gRPC gives the functions that `_asking` and `_asking_once` return the exact bytes of a request, because it gets no deserializer.

    def _asking(self, method: str, behaviour: Any, deserialize: Any) -> Any:
        async def answer(request: bytes, context: AioContext) -> Any:
            await self._check(method, request, context)
            return await behaviour(deserialize(request) if deserialize else request, context)

        return answer

    def _asking_once(self, method: str, behaviour: Any, deserialize: Any) -> Any:
        async def stream(request: bytes, context: AioContext) -> AsyncIterator[Any]:
            await self._check(method, request, context)
            async for each in behaviour(deserialize(request) if deserialize else request, context):
                yield each

        return stream

    def _without_proofs(self, handler: Any) -> Any:
        """Return a handler for calls that stream requests, which cannot be proven (rule 3).

        It serves them over Unix sockets, and refuses them on all other connections.
        """

        async def answer(requests: Any, context: AioContext) -> Any:
            await self._refuse_unless_local(context)
            return await handler.stream_unary(requests, context)

        async def stream(requests: Any, context: AioContext) -> AsyncIterator[Any]:
            await self._refuse_unless_local(context)
            async for each in handler.stream_stream(requests, context):
                yield each

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                stream, handler.request_deserializer, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(answer, handler.request_deserializer, handler.response_serializer)

    async def _refuse_unless_local(self, context: AioContext) -> None:
        if not _is_local(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, STREAMED)

    async def _check(self, method: str, request: bytes, context: AioContext) -> None:
        if _is_local(context):
            return
        texts = [value for name, value in context.invocation_metadata() or () if name == PROOF_KEY]
        try:
            (text,) = texts
            proof = CallProof.parse(str(text))
        except OutdatedProof:
            refusal = OUTDATED
        except ValueError:
            refusal = ASKING
        else:
            now = self._now()
            refusal = proof.refusal(self._key, method, request, now) or self._replays.refusal(
                proof.caller, proof.number, proof.unix_seconds, now
            )
            if not refusal:
                answer = proof.answer(self._key, method, request).hex()
                context.set_trailing_metadata(((NODE_PROOF_KEY, answer),))
                return
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)


def _is_local(context: AioContext) -> bool:
    return context.peer().startswith("unix:")


class _ProofClient:
    """Makes the proofs for the calls of one caller, and checks the node's proofs."""

    def __init__(self, key: AuthenticationKey, now: Calendar = unix_seconds):
        self._key = key
        self._now = now
        self._caller = nonce()
        self._numbers = itertools.count()

    def _proven(self, details: Any, request: Any) -> tuple[Any, Callable[[Any], bool]]:
        """Return the details of a call, including its proof, and a function that checks the answer's trailing metadata.

        gRPC serializes the request right after this method has returned, and in the same way, so the proof covers the bytes
        that are sent.
        """
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        body = request if isinstance(request, bytes) else request.SerializeToString()
        proof = CallProof.of(
            self._key, method, body, unix_seconds=self._now(), caller=self._caller, number=next(self._numbers)
        )

        def is_answered(trailing: Any) -> bool:
            texts = [value for name, value in trailing or () if name == NODE_PROOF_KEY]
            try:
                (text,) = texts
                return proof.is_answered_by(self._key, method, body, bytes.fromhex(str(text)))
            except ValueError:
                return False

        metadata = [*(details.metadata or ()), (PROOF_KEY, proof.text)]
        return details._replace(metadata=metadata), is_answered


class ProofUnaryInterceptor(_ProofClient, grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds a proof to each synchronous call, and checks the node's proof if the call succeeds and has one answer."""

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details, _ = self._proven(client_call_details, request)
        return continuation(details, request)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details, is_answered = self._proven(client_call_details, request)
        call = continuation(details, request)
        if call.code() is grpc.StatusCode.OK and not is_answered(call.trailing_metadata()):
            raise UnprovenAnswer
        return call


class ProofAioUnaryInterceptor(_ProofClient, grpc.aio.UnaryUnaryClientInterceptor):
    """Adds a proof to each call that an event loop makes and whose answer is one message.

    The node's proof is checked if the call succeeds.
    """

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details, is_answered = self._proven(client_call_details, request)
        call = await continuation(details, request)
        if await call.code() is grpc.StatusCode.OK:
            trailing = await call.trailing_metadata()
            if not is_answered(trailing):
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAUTHENTICATED, await call.initial_metadata(), trailing, UNPROVEN
                )
        return call


class ProofStreamInterceptor(_ProofClient, grpc.aio.UnaryStreamClientInterceptor):
    """Adds a proof to each call that an event loop makes and whose answer is a stream.

    The node's proof is not checked (rule 2).
    """

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details, _ = self._proven(client_call_details, request)
        return await continuation(details, request)
