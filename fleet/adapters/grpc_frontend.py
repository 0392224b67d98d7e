"""The gRPC port of a router: `fleet.v1.Inference`, `fleet.v1.Cluster`, health and reflection.

Requests are taken as bytes and parsed here, because the library answers what it cannot parse with INTERNAL; a client
that sends invalid UTF-8 or too much gets a typed error like everybody else.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Never, Protocol, TypeVar
from uuid import uuid4

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleet.adapters.grpc_errors import grpc_status_of
from fleet.adapters.grpc_options import SERVER_OPTIONS
from fleet.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.errors import ConfigurationRefused, Reason, Refused
from fleet.ids import RequestId
from fleet.requests import Admitted
from fleet.router.generation import Generation
from fleet.router.snapshot import PoolSnapshot, RouterSnapshot
from fleet.v1 import control_pb2, inference_pb2
from fleet.wire.public import decode_request, encode_event, encode_model
from kvstore.v1 import blocks_pb2, blocks_pb2_grpc

log = logging.getLogger(__name__)

INFERENCE = "fleet.v1.Inference"
CLUSTER = "fleet.v1.Cluster"

MAX_REQUEST_BYTES = 8 << 20  # as over HTTP
STORE_SECONDS = 1.0  # for the store node to say how full it is
HEALTH_SECONDS = 0.25  # how often the health service looks whether a worker serves
STOP_SECONDS = 2.0  # for the last messages of calls that end

Context = Any
"""`grpc.aio.ServicerContext` of bytes: its stubs want message types, which these calls do not have."""

AnyMessage = TypeVar("AnyMessage", bound=Message)


class RouterStatus(Protocol):
    """What is needed of `fleet.router.server.RouterServer`."""

    def status(self) -> RouterSnapshot: ...


@asynccontextmanager
async def open_grpc_frontend(
    listen: str,
    generation: Generation,
    router: RouterStatus,
    clock: Clock,
    *,
    store: str = "",
    services: Mapping[str, Callable[[grpc.aio.Server], None]] | None = None,
) -> AsyncIterator["GrpcFrontend"]:
    """Listen and serve until the context ends; then running calls are cancelled.

    Args:
        listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``.
        generation: Serves the requests.
        router: Says how the cluster is.
        clock: For deadlines.
        store: gRPC address of the KV store node, asked how full it is; empty: there is none.
        services: More services for the same port: what adds each to the server, by full name.

    Raises:
        ConfigurationRefused: Nobody can listen there; the message says why.
    """
    services = services or {}
    async with AsyncExitStack() as held:
        ask_store = None
        if store:
            channel = await held.enter_async_context(grpc.aio.insecure_channel(store))
            ask_store = partial(_ask_store, blocks_pb2_grpc.BlockStoreStub(channel))
        server = grpc.aio.server(options=SERVER_OPTIONS)
        frontend = GrpcFrontend(generation, router, clock, ask_store)
        server.add_generic_rpc_handlers(frontend.handlers())
        for add in services.values():
            add(server)
        health_pb2_grpc.add_HealthServicer_to_server(frontend.health, server)
        names = (INFERENCE, CLUSTER, *services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        frontend.address = _bind(server, listen)
        await server.start()
        failure: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(frontend.watch_health())
            try:
                yield frontend
            except Exception as error:  # noqa: BLE001 - raised again below
                failure = error  # the body's own, which the group would wrap
            finally:
                watch.cancel()
                await server.stop(STOP_SECONDS)
        if failure is not None:
            raise failure


class GrpcFrontend:
    """Made by `open_grpc_frontend`."""

    def __init__(
        self,
        generation: Generation,
        router: RouterStatus,
        clock: Clock,
        ask_store: Callable[[], Awaitable[blocks_pb2.StatsResponse | None]] | None,
    ) -> None:
        self.address = ""  # as clients write it, with the port that was taken
        self.health = health.aio.HealthServicer()
        self._generation = generation
        self._router = router
        self._clock = clock
        self._ask_store = ask_store
        self._draining = False

    def drain(self) -> None:
        """Take no more requests; running ones go on."""
        self._draining = True

    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """The services' methods, all of which take bytes."""
        stream: Any = grpc.unary_stream_rpc_method_handler  # the stubs know no coroutines
        unary: Any = grpc.unary_unary_rpc_method_handler
        inference = {
            "Generate": stream(self._generate, response_serializer=_serialize),
            "ListModels": unary(self._list_models, response_serializer=_serialize),
        }
        cluster = {"Status": unary(self._status, response_serializer=_serialize)}
        return (
            grpc.method_handlers_generic_handler(INFERENCE, inference),
            grpc.method_handlers_generic_handler(CLUSTER, cluster),
        )

    async def watch_health(self) -> None:
        """Say SERVING while a worker serves, for ever."""
        told: bool | None = None
        while True:
            serving = bool(self._generation.models()) and not self._draining
            if serving is not told:
                told = serving
                response = health_pb2.HealthCheckResponse
                for service in ("", INFERENCE, CLUSTER):
                    await self.health.set(service, response.SERVING if serving else response.NOT_SERVING)
            await asyncio.sleep(HEALTH_SECONDS)

    async def _generate(self, content: bytes, context: Context) -> None:
        try:
            await self._stream(content, context)
        except Refused as refused:
            await _abort(context, refused)
        except grpc.aio.AbortError:
            raise
        except Exception:  # supervisor: a bug in one call does not end the others
            log.exception("request failed", extra={"method": "Generate"})
            await _abort(context, Refused(Reason.INTERNAL, "internal error; the router's log has the details"))

    async def _stream(self, content: bytes, context: Context) -> None:
        if self._draining:
            raise Refused(Reason.DRAINING, "this router is shutting down", retry_after_ms=1000)
        message = _parse(inference_pb2.GenerateRequest, content)
        deadline = self._deadline(message.timeout_ms, context.time_remaining())
        request = decode_request(message, RequestId(uuid4().hex), deadline)
        model = request.model

        def token_text(token_id: int) -> str:
            return self._generation.token_text(model, token_id)

        async with aclosing(self._generation.generate(request, _authorization(context))) as events:
            async for event in events:
                if isinstance(event, Admitted):
                    model = event.model
                await context.write(encode_event(event, token_text))

    async def _list_models(self, content: bytes, context: Context) -> Message:
        await _parsed_or_abort(inference_pb2.ListModelsRequest, content, context)
        return inference_pb2.ListModelsResponse(models=[encode_model(card) for card in self._generation.models()])

    async def _status(self, content: bytes, context: Context) -> Message:
        await _parsed_or_abort(control_pb2.StatusRequest, content, context)
        snapshot = self._router.status()
        counters = snapshot.counters
        response = control_pb2.StatusResponse(
            pools=[_encode_pool(pool) for pool in snapshot.pools],
            router=control_pb2.RouterStatus(
                requests=counters.ended,
                aggregated=counters.aggregated,
                disaggregated=counters.disaggregated,
                refused=sum(counters.refused.values()),
                active=snapshot.active,
                queued=snapshot.queued,
                index_blocks=snapshot.index_blocks,
                models=[card.name for card in self._generation.models()],
            ),
        )
        if self._ask_store is not None and (stats := await self._ask_store()) is not None:
            response.store.CopyFrom(
                control_pb2.StoreStatus(
                    store_id=stats.store_id,
                    blocks=stats.blocks,
                    bytes=stats.bytes,
                    capacity_bytes=stats.capacity_bytes,
                    hits=stats.hits,
                    misses=stats.misses,
                    corrupt=stats.corrupt,
                )
            )
        return response

    def _deadline(self, timeout_ms: int, remaining_seconds: float | None) -> Nanos | None:
        """The instant after which nobody waits: of the message or of the call, whichever is earlier."""
        now = self._clock.now()
        spans = [] if remaining_seconds is None else [int(remaining_seconds * SECOND)]
        if timeout_ms:
            spans.append(timeout_ms * MILLISECOND)
        return Nanos(now + min(spans)) if spans else None


def _authorization(context: Context) -> str:
    """What the call says to prove its tenant; empty: nothing."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return str(value)
    return ""


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parse(kind: type[AnyMessage], content: bytes) -> AnyMessage:
    if len(content) > MAX_REQUEST_BYTES:
        raise Refused(
            Reason.TOO_LARGE, f"the message has {len(content)} bytes, and {MAX_REQUEST_BYTES} are allowed in one"
        )
    try:
        return kind.FromString(content)
    except DecodeError as error:
        cause = "the message cannot be parsed: it is no such message, or a string in it is not UTF-8"
        raise Refused(Reason.INVALID_ARGUMENT, cause) from error


async def _parsed_or_abort(kind: type[AnyMessage], content: bytes, context: Context) -> AnyMessage:
    try:
        return _parse(kind, content)
    except Refused as refused:
        await _abort(context, refused)


async def _abort(context: Context, refused: Refused) -> Never:
    await context.abort_with_status(grpc_status_of(refused))
    raise AssertionError  # aborting raises


def _bind(server: grpc.aio.Server, listen: str) -> str:
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigurationRefused(f"cannot listen on {listen}: in use, or no address of this machine") from error
    return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"


async def _ask_store(stub: "blocks_pb2_grpc.BlockStoreAsyncStub") -> blocks_pb2.StatsResponse | None:
    try:
        return await stub.Stats(blocks_pb2.StatsRequest(), timeout=STORE_SECONDS)
    except grpc.aio.AioRpcError as error:
        log.warning("the store node does not answer", extra={"code": error.code().name})
        return None


def _encode_pool(pool: PoolSnapshot) -> control_pb2.PoolStatus:
    return control_pb2.PoolStatus(
        model=pool.model,
        role=pool.role,
        workers=[
            control_pb2.WorkerStatus(
                worker_id=worker.worker_id,
                state=worker.state,
                engine=worker.engine,
                address=worker.address,
                running=worker.running,
                waiting=worker.waiting,
                kv_blocks_used=worker.kv_blocks_used,
                kv_blocks=worker.kv_blocks,
                cached_blocks=worker.cached_blocks,
                booked_requests=worker.booked_requests,
            )
            for worker in pool.workers
        ],
    )
