"""Port for the Open Inference Protocol, which the clients of KServe and Triton speak.

Rules:

1. Each request of a stream ends separately: with its final response, or with an error that carries its id. The stream
   continues in both cases, and also after a malformed message.
2. Requests of a stream run concurrently, at most `MAX_IN_STREAM`. At this limit, the next message waits, and no further
   message is read, until one of the requests has ended. So the connection slows down a client that sends more.
3. Cancelling a call cancels all its requests.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Protocol
from uuid import uuid4

import grpc
from google.protobuf.message import Message
from msgspec import structs

from fleet.core.errors import Reason, RequestRejected, internal_error, invalid
from fleet.core.ids import RequestId
from fleet.core.requests import Admitted, Delta, Finished, Logprobs, ModelCard
from fleet.frontend.grpc.client_port import ClientPort
from fleet.net.grpc.calls import (
    CallerDisconnected,
    Context,
    MessageWriter,
    answer_call,
    authorization_of,
    open_writer,
    parse_message,
    serialize,
    unary_context_handler,
    unary_handler,
)
from fleet.net.status_codes import rename_field
from fleet.v1 import kserve_pb2 as pb
from fleet.wire.kserve import (
    VERSION,
    KServePart,
    KServeRequest,
    check_version,
    decode_infer,
    encode_model,
    encode_part,
    encode_refusal,
    encode_streamed,
)
from kvstore.protocol.versions import own_protocols

log = logging.getLogger(__name__)

SERVICE = "inference.GRPCInferenceService"

MAX_IN_STREAM = 256

Messages = AsyncIterator[bytes]


class KserveFrontend(ClientPort):
    """Serves KServe's Open Inference Protocol over gRPC."""

    SERVICE = SERVICE
    SETTING = "kserve_listen"

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the method handlers of the service, which get undecoded bytes, and a handler for methods that Fleet lacks."""
        stream: Any = grpc.stream_stream_rpc_method_handler  # Any, because grpc's stubs reject coroutines
        methods = {
            "ServerLive": unary_handler(self._server_live),
            "ServerReady": unary_handler(self._server_ready),
            "ModelReady": unary_handler(self._model_ready),
            "ServerMetadata": unary_handler(self._server_metadata),
            "ModelMetadata": unary_context_handler(self._model_metadata),
            "ModelInfer": unary_context_handler(self._infer),
            "ModelStreamInfer": stream(self.model_stream_infer, response_serializer=serialize),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods), _UnimplementedMethods(tuple(methods))

    async def _server_live(self, content: bytes) -> Message:
        parse_message(pb.ServerLiveRequest, content)
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, content: bytes) -> Message:
        parse_message(pb.ServerReadyRequest, content)
        return pb.ServerReadyResponse(ready=self.ready())

    async def _model_ready(self, content: bytes) -> Message:
        request = parse_message(pb.ModelReadyRequest, content)
        known = self._card(request.name) is not None and request.version in ("", VERSION)
        return pb.ModelReadyResponse(ready=known and self.ready())

    async def _server_metadata(self, content: bytes) -> Message:
        parse_message(pb.ServerMetadataRequest, content)
        return pb.ServerMetadataResponse(name="fleet", version=own_protocols().product, extensions=["parameters"])

    async def _model_metadata(self, content: bytes, context: Context) -> Message:
        request = parse_message(pb.ModelMetadataRequest, content)
        self._generation.identify(authorization_of(context))
        check_version("version", request.version)
        if (card := self._card(request.name)) is None:
            served = ", ".join(sorted(card.name for card in self._generation.models())) or "none"
            raise RequestRejected(Reason.MODEL_NOT_FOUND, f"name: is not served here; served: {served}", field="name")
        return encode_model(card)

    async def _infer(self, content: bytes, context: Context) -> Message:
        inference = self._read(parse_message(pb.ModelInferRequest, content), context)
        if inference.stream:
            raise invalid("stream", "must be false in ModelInfer, which gives whole answers; ModelStreamInfer streams")
        last: pb.ModelInferResponse | None = None

        async def keep(response: pb.ModelInferResponse, *, final: bool) -> None:
            nonlocal last
            assert final
            last = response

        with self.holding(len(content)):
            await self._serve(inference, authorization_of(context), keep)
        assert last is not None
        return last

    async def model_stream_infer(self, messages: Messages, context: Context) -> None:
        await answer_call(self._stream(messages, context), context)

    async def _stream(self, messages: Messages, context: Context) -> None:
        room = asyncio.Semaphore(MAX_IN_STREAM)
        # Locked while a task writes a response, so that only one task writes to the stream at a time.
        turns = asyncio.Lock()

        async def answer(content: bytes, writer: MessageWriter) -> None:
            async def write(message: pb.ModelStreamInferResponse) -> None:
                async with turns:
                    await writer.send(message)

            try:
                await self._answer(content, context, write)
            finally:
                room.release()

        refused: grpc.aio.AbortError | None = None
        async with open_writer(context, self.write_seconds) as writer, asyncio.TaskGroup() as tasks:
            try:
                async for content in messages:
                    await room.acquire()
                    tasks.create_task(answer(content, writer))
            except grpc.aio.AbortError as error:  # stop reading, but answer the earlier requests before the call fails
                refused = error
        if refused is not None:
            raise refused

    async def _answer(
        self, content: bytes, context: Context, write: Callable[[pb.ModelStreamInferResponse], Awaitable[None]]
    ) -> None:
        """Answer one request of a stream: write its responses, or an error that carries its id (rule 1)."""
        message = pb.ModelInferRequest()

        async def send_one(response: pb.ModelInferResponse, *, final: bool) -> None:
            await write(encode_streamed(response, final=final))

        with suppress(CallerDisconnected):  # the caller has disconnected, and grpc will cancel the call anyway
            try:
                message = parse_message(pb.ModelInferRequest, content)
                with self.holding(len(content)):
                    await self._serve(self._read(message, context), authorization_of(context), send_one)
            except RequestRejected as refused:
                await write(encode_refusal(refused, message.id, message.model_name))
            except CallerDisconnected:
                raise
            except Exception:  # supervisor: a bug in one request does not end the others
                log.exception("request failed", extra={"method": "ModelStreamInfer"})
                await write(encode_refusal(internal_error(), message.id, message.model_name))

    def _read(self, message: pb.ModelInferRequest, context: Context) -> KServeRequest:
        self.check_admitted()
        inference = decode_infer(message, RequestId(uuid4().hex), self._clock.now(), self.deadline(context))
        if self._generation.tracing is None:
            return inference
        return structs.replace(inference, request=self.traced(inference.request, context))

    async def _serve(self, inference: KServeRequest, authorized: str, send: "SendResponse") -> None:
        try:
            await self._generate(inference, authorized, send)
        except RequestRejected as refused:
            raise rename_field(refused, inference.names) from refused

    async def _generate(self, inference: KServeRequest, authorized: str, send: "SendResponse") -> None:
        request, form = inference.request, inference.form
        model = request.model
        text: list[str] = []  # the pieces of the text, for an answer that is sent as a whole
        token_ids: list[int] = []
        logprobs: list[Logprobs] = []

        def token_text(token_id: int) -> str:
            return self._generation.token_text(model, token_id)

        async with aclosing(self._generation.generate(request, authorized)) as events:
            async for event in events:
                match event:
                    case Admitted():
                        model = event.model
                    case Delta() if inference.stream:
                        part = KServePart(text=event.text, token_ids=event.token_ids, logprobs=event.logprobs)
                        await send(encode_part(part, form, request.id, model, token_text), final=False)
                    case Delta():
                        text.append(event.text)
                        token_ids.extend(event.token_ids)
                        logprobs.extend(event.logprobs)
                    case Finished():
                        text.append(event.text)
                        part = KServePart(text="".join(text), token_ids=token_ids, logprobs=logprobs, finished=event)
                        await send(encode_part(part, form, request.id, model, token_text), final=True)

    def _card(self, name: str) -> ModelCard | None:
        return next((card for card in self._generation.models() if card.name == name), None)


class SendResponse(Protocol):
    async def __call__(self, response: pb.ModelInferResponse, *, final: bool) -> None: ...


class _UnimplementedMethods(grpc.GenericRpcHandler):
    """Answers UNIMPLEMENTED to the protocol's other methods: repositories, configurations, statistics, shared memory."""

    def __init__(self, served: tuple[str, ...]) -> None:
        self._served = ", ".join(served)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        service, _, method = handler_call_details.method.removeprefix("/").rpartition("/")
        if service != SERVICE:
            return None

        async def refuse(_: bytes, context: Context) -> Message:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, f"{method[:100]} is not served by Fleet; served: {self._served}"
            )
            raise AssertionError  # never reached, because `abort` raises

        handler: Any = grpc.unary_unary_rpc_method_handler  # Any, because grpc's stubs reject coroutines
        return handler(refuse)
