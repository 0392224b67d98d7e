"""gRPC port for clients: `fleet.v1.Inference`, health and reflection. Other services are on the control port."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf.message import Message

from fleet.core.clock import Clock
from fleet.core.ids import RequestId
from fleet.core.requests import Admitted
from fleet.frontend.generation import Generation
from fleet.frontend.grpc.intake import MessageMemory, RequestIntake
from fleet.net.grpc.calls import (
    Context,
    answer_call,
    authorization_of,
    open_writer,
    parse_message,
    serialize,
    unary_context_handler,
)
from fleet.net.grpc.http2 import Http2Server
from fleet.net.grpc.port import open_port
from fleet.net.settings import DEFAULT_GRPC_LIMITS, GrpcSettings
from fleet.v1 import inference_pb2
from fleet.wire.inference import decode_request, encode_event, encode_model

INFERENCE = "fleet.v1.Inference"


@asynccontextmanager
async def open_grpc_frontend(
    listen: str,
    generation: Generation,
    clock: Clock,
    *,
    max_held_bytes: int,
    limits: GrpcSettings = DEFAULT_GRPC_LIMITS,
    shared: bool = False,
    connection_seconds: float = 0,
) -> AsyncIterator["GrpcFrontend"]:
    """Listen and serve until the context ends; then cancel running calls.

    Args:
        listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``.
        generation: Serves the requests.
        clock: For deadlines.
        max_held_bytes: The limit for the messages of requests that arrive or run; beyond it long ones are refused.
        limits: Limits of connections.
        shared: Whether other processes may listen on the same port.
        connection_seconds: The lifetime of a client's connection; 0 sets no limit.

    Raises:
        ConfigurationRefused: The address is malformed or in use.
    """
    server = Http2Server(
        shared=shared, connection_seconds=connection_seconds, limits=limits, max_held_bytes=max_held_bytes
    )
    frontend = GrpcFrontend(generation, clock, server)
    server.add_generic_rpc_handlers((frontend.inference(),))
    async with open_port(server, listen, (INFERENCE,), frontend.door.ready) as frontend.address:
        yield frontend


class GrpcFrontend:
    """The service `fleet.v1.Inference`; `open_grpc_frontend` makes it."""

    def __init__(self, generation: Generation, clock: Clock, server: MessageMemory) -> None:
        self.address = ""  # with the port that was taken
        self.door = RequestIntake(generation, clock, server)
        self._generation = generation

    def inference(self) -> grpc.GenericRpcHandler:
        """Return the handlers of `fleet.v1.Inference`, which take bytes."""
        stream: Any = grpc.unary_stream_rpc_method_handler  # the type stubs know no coroutines
        inference = {
            "Generate": stream(self._generate, response_serializer=serialize),
            "ListModels": unary_context_handler(self._list_models),
        }
        return grpc.method_handlers_generic_handler(INFERENCE, inference)

    async def _generate(self, content: bytes, context: Context) -> None:
        await answer_call(self._stream(content, context), context)

    async def _stream(self, content: bytes, context: Context) -> None:
        self.door.check()
        message = parse_message(inference_pb2.GenerateRequest, content)
        deadline = self.door.deadline(context, message.timeout_ms)
        request = decode_request(message, RequestId(uuid4().hex), deadline)
        model = request.model

        def token_text(token_id: int) -> str:
            return self._generation.token_text(model, token_id)

        events = self._generation.generate(request, authorization_of(context))
        with self.door.holding(len(content)):
            async with open_writer(context) as writer, aclosing(events):
                async for event in events:
                    if isinstance(event, Admitted):
                        model = event.model
                    await writer.send(encode_event(event, token_text))

    async def _list_models(self, content: bytes, context: Context) -> Message:
        parse_message(inference_pb2.ListModelsRequest, content)
        self._generation.identify(authorization_of(context))
        return inference_pb2.ListModelsResponse(models=[encode_model(card) for card in self._generation.models()])
