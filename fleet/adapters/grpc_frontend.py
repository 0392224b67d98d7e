"""The gRPC port of a router: `fleet.v1.Inference`, `fleet.v1.Cluster`, health and reflection."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any
from uuid import uuid4

import grpc
from google.protobuf.message import Message

from fleet.adapters.grpc_calls import Context, answered, authorization, parse, serialize, unary_in_context, writing
from fleet.adapters.grpc_cluster import AskStore, ClusterService, Others, Router, asking_store
from fleet.adapters.grpc_door import Door, Holding
from fleet.adapters.grpc_http2 import Http2Server
from fleet.adapters.grpc_options import SERVER_OPTIONS, SHARED_SERVER_OPTIONS
from fleet.adapters.grpc_port import Server, open_port
from fleet.clock import Clock
from fleet.ids import RequestId
from fleet.requests import Admitted
from fleet.router.generation import Generation
from fleet.router.http_settings import GRPC_LIMITS, GrpcSettings
from fleet.v1 import inference_pb2
from fleet.wire.public import decode_request, encode_event, encode_model
from kvstore.v1 import blocks_pb2_grpc

INFERENCE = "fleet.v1.Inference"
CLUSTER = "fleet.v1.Cluster"


@asynccontextmanager
async def open_grpc_frontend(
    listen: str,
    generation: Generation,
    router: Router,
    clock: Clock,
    *,
    max_held_bytes: int,
    limits: GrpcSettings = GRPC_LIMITS,
    store: str = "",
    shared: bool = False,
    connection_seconds: float = 0,
    control_listen: str = "",
    services: Mapping[str, Callable[[Server], None]] | None = None,
    others: Others | None = None,
) -> AsyncIterator["GrpcFrontend"]:
    """Listen and serve until the context ends; then running calls are cancelled.

    Args:
        listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``.
        generation: Serves the requests.
        router: Says how the cluster is.
        clock: For deadlines.
        max_held_bytes: Limit of the messages of all requests that arrive or run, beyond which long ones are refused.
        limits: Limits of connections.
        store: gRPC address of the KV store node, asked how full it is; empty: there is none.
        shared: Whether other processes may listen on the same port.
        connection_seconds: How long a client's connection lasts; 0: for as long as the client likes.
        control_listen: Where what is not for clients listens: `services` and `fleet.v1.Cluster`; empty: on the same port.
        services: More services: what adds each to the server, by full name.
        others: The other routers of the cluster, if there are any.

    Raises:
        ConfigurationRefused: Nobody can listen there; the message says why.
    """
    services = services or {}
    async with AsyncExitStack() as held:
        ask_store = None
        if store:
            channel = await held.enter_async_context(grpc.aio.insecure_channel(store))
            ask_store = asking_store(blocks_pb2_grpc.BlockStoreStub(channel))
        server = Http2Server(
            shared=shared, connection_seconds=connection_seconds, limits=limits, max_held_bytes=max_held_bytes
        )
        frontend = GrpcFrontend(generation, router, clock, server, ask_store, others)
        server.add_generic_rpc_handlers((frontend.inference(),))
        inner: Server = server
        if control_listen:
            inner = grpc.aio.server(options=SHARED_SERVER_OPTIONS if shared else SERVER_OPTIONS)
        inner.add_generic_rpc_handlers((frontend.cluster(),))
        for add in services.values():
            add(inner)
        names = (CLUSTER, *services)
        if control_listen:
            frontend.control = await held.enter_async_context(
                open_port(inner, control_listen, names, frontend.door.ready)
            )
            names = ()
        async with open_port(server, listen, (INFERENCE, *names), frontend.door.ready) as frontend.address:
            yield frontend


class GrpcFrontend:
    """Made by `open_grpc_frontend`."""

    def __init__(
        self,
        generation: Generation,
        router: Router,
        clock: Clock,
        server: Holding,
        ask_store: AskStore | None,
        others: Others | None = None,
    ) -> None:
        self.address = ""  # as clients write it, with the port that was taken
        self.control = ""  # of the port that is not for clients, where that is another one
        self.door = Door(generation, clock, server)
        self._generation = generation
        self._cluster = ClusterService(router, ask_store, others)

    def inference(self) -> grpc.GenericRpcHandler:
        """`fleet.v1.Inference`, whose methods take bytes."""
        stream: Any = grpc.unary_stream_rpc_method_handler  # the stubs know no coroutines
        inference = {
            "Generate": stream(self._generate, response_serializer=serialize),
            "ListModels": unary_in_context(self._list_models),
        }
        return grpc.method_handlers_generic_handler(INFERENCE, inference)

    def cluster(self) -> grpc.GenericRpcHandler:
        """`fleet.v1.Cluster`, likewise."""
        return grpc.method_handlers_generic_handler(CLUSTER, self._cluster.methods())

    async def _generate(self, content: bytes, context: Context) -> None:
        await answered(self._stream(content, context), context)

    async def _stream(self, content: bytes, context: Context) -> None:
        self.door.check()
        message = parse(inference_pb2.GenerateRequest, content)
        deadline = self.door.deadline(context, message.timeout_ms)
        request = decode_request(message, RequestId(uuid4().hex), deadline)
        model = request.model

        def token_text(token_id: int) -> str:
            return self._generation.token_text(model, token_id)

        events = self._generation.generate(request, authorization(context))
        with self.door.holding(len(content)):
            async with writing(context) as writer, aclosing(events):
                async for event in events:
                    if isinstance(event, Admitted):
                        model = event.model
                    await writer.send(encode_event(event, token_text))

    async def _list_models(self, content: bytes, context: Context) -> Message:
        parse(inference_pb2.ListModelsRequest, content)
        self._generation.identify(authorization(context))
        return inference_pb2.ListModelsResponse(models=[encode_model(card) for card in self._generation.models()])
