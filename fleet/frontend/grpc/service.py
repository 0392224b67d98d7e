"""gRPC port for clients: `fleet.v1.Inference`, health and reflection. KServe has a port of its own."""

from contextlib import aclosing
from functools import partial
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf.message import Message

from fleet.core.ids import RequestId
from fleet.core.requests import Admitted
from fleet.core.validation import check_message_count
from fleet.frontend.grpc.client_port import ClientPort
from fleet.frontend.openai.requests import new_request_id, unused_id
from fleet.net.grpc.calls import (
    Context,
    answer_call,
    authorization_of,
    headers_of,
    open_writer,
    parse_message,
    serialize,
    unary_context_handler,
)
from fleet.net.http.exchange import REQUEST_ID_HEADER
from fleet.v1 import inference_pb2
from fleet.wire.inference import decode_request, encode_event, encode_model

CALL_HEADERS = frozenset({"authorization", "x-request-id"})


class GrpcFrontend(ClientPort):
    """Serves `fleet.v1.Inference`; `Generation` processes the requests, as for the other frontends."""

    SERVICE = "fleet.v1.Inference"
    SETTING = "grpc_listen"

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        stream: Any = grpc.unary_stream_rpc_method_handler  # Any, because grpc's stubs reject coroutines
        inference = {
            "Generate": stream(self.generate, response_serializer=serialize),
            "ListModels": unary_context_handler(self._list_models),
        }
        return (grpc.method_handlers_generic_handler(self.SERVICE, inference),)

    async def generate(self, content: bytes, context: Context) -> None:
        await answer_call(self._stream(content, context), context)

    async def _stream(self, content: bytes, context: Context) -> None:
        self.check_admitted()
        read_body = self._generation.read_body
        message = await read_body(partial(parse_message, inference_pb2.GenerateRequest), content)
        check_message_count(len(message.chat.messages), "chat.messages")
        deadline = self.deadline(context, message.timeout_ms)
        headers = headers_of(context, CALL_HEADERS)
        named = REQUEST_ID_HEADER in headers and not message.request_id
        request_id = new_request_id(headers, self._generation.serves) if named else RequestId(uuid4().hex)
        request = await read_body(lambda _: decode_request(message, request_id, deadline), content)
        request = unused_id(request, request_id, self._generation.serves)
        if self._generation.tracing is not None:
            request = self.traced(request, context)
        model = request.model

        def token_text(token_id: int) -> str:
            return self._generation.token_text(model, token_id)

        events = self._generation.generate(request, headers.get(b"authorization", b"").decode("latin-1"))
        with self.holding(len(content)):
            async with open_writer(context, self.write_seconds) as writer, aclosing(events):
                async for event in events:
                    if isinstance(event, Admitted):
                        model = event.model
                    await writer.send(encode_event(event, token_text))

    async def _list_models(self, content: bytes, context: Context) -> Message:
        parse_message(inference_pb2.ListModelsRequest, content)
        self._generation.identify(authorization_of(context))
        return inference_pb2.ListModelsResponse(models=[encode_model(card) for card in self._generation.models()])
