"""Asynchronous client for one event loop. `fleet.client.sync` describes the methods in full. Only the client there has `watch_demand`."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self, Unpack

import grpc

from fleet.client.control import ControlPort, control_errors
from fleet.client.errors import Cancelled, FleetError, add_tls_cause, error_of, may_be_tls
from fleet.client.requests import Options, PromptLike, api_key_metadata, build_message, tune_request
from fleet.client.results import (
    ClusterStatus,
    OverflowExplained,
    PlacementExplained,
    RemotePrefill,
    Result,
    StreamedAnswer,
    decode_explanation,
    decode_overflow,
    decode_status,
    remote_prefill_of,
    thresholds_of,
)
from fleet.client.resumption import RESUMABLE_OPTIONS, Resumption, RouterRing, addresses_of, resume_limit
from fleet.client.sync import CALL_SECONDS
from fleet.client.tls import ClientTls, check_key_is_safe, open_aio_channel
from fleet.client.vectors import AT_ONCE, VectorOptions, VectorResult, build_vector_messages, vector_result
from fleet.core.errors import Reason
from fleet.core.requests import Delta, ModelCard, Pooling, PoolingTask
from fleet.net.grpc.options import CHANNEL_OPTIONS
from fleet.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from fleet.wire.inference import decode_model
from kvstore.protocol.range_messages import range_message
from kvstore.security.credentials import Credentials


class AsyncClient:
    """Connects to a cluster from a running event loop. The caller has to close the client, or to use it as a context manager.

        async with AsyncClient("127.0.0.1:50051") as client:
            async with client.generate("Once upon a time", max_tokens=32) as stream:
                async for delta in stream:
                    print(delta.text, end="", flush=True)

    The connection is opened by the first call. A call that fails raises a subclass of `FleetError`.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        api_key: str = "",
        tls: ClientTls | None = None,
        insecure: bool = False,
        resume_seconds: float | None = None,
        control: str = "",
        control_credentials: Credentials = Credentials(),  # noqa: B008 - the default is immutable
    ) -> None:
        """Prepare connections to the routers of one cluster; the arguments are those of `fleet.client.Client`."""
        addresses = addresses_of(address)
        self._resume_seconds = resume_limit(resume_seconds, len(addresses))
        for each in addresses:
            check_key_is_safe(each, api_key, tls, insecure=insecure)
        self._metadata = api_key_metadata(api_key)
        options = (*CHANNEL_OPTIONS, *(RESUMABLE_OPTIONS if self._resume_seconds else ()))
        self._channels = [open_aio_channel(each, options, tls) for each in addresses]
        stubs: list[inference_pb2_grpc.InferenceAsyncStub] = list(map(inference_pb2_grpc.InferenceStub, self._channels))
        self._routers = RouterRing(stubs, addresses, tls)
        self._control_port = ControlPort(addresses[0], control, control_credentials)
        self._control_channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections and end all running streams."""
        for channel in self._channels:
            await channel.close()
        if self._control_channel is not None:
            await self._control_channel.close()

    def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> "AsyncStream":
        """Send a request with a streamed answer; the arguments are those of `fleet.client.Client.generate`."""
        return AsyncStream(self._routers, self._metadata, self._resumption(build_message(prompt, options), options))

    async def complete(self, prompt: PromptLike, **options: Unpack[Options]) -> Result:
        """Send a request and wait for the complete answer; the arguments are those of `generate`."""
        async with self.generate(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dimensions: int = 0,
        activation: bool | None = None,
        **options: Unpack[VectorOptions],
    ) -> tuple[VectorResult, ...]:
        """Return the embedding of each text; the arguments are those of `fleet.client.Client.embed`."""
        return await self._vectors(
            texts, Pooling(task=PoolingTask.EMBED, dimensions=dimensions, activation=activation), options
        )

    async def classify(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        activation: bool | None = None,
        **options: Unpack[VectorOptions],
    ) -> tuple[VectorResult, ...]:
        """Return, for each text, one number for each class; the arguments are those of `fleet.client.Client.classify`."""
        return await self._vectors(texts, Pooling(task=PoolingTask.CLASSIFY, activation=activation), options)

    async def _vectors(
        self, texts: Sequence[str | Sequence[int]], pooling: Pooling, options: VectorOptions
    ) -> tuple[VectorResult, ...]:
        found: list[VectorResult] = []
        running: deque[AsyncStream] = deque()

        async def finish() -> None:
            stream = running[0]
            async for _ in stream:
                pass
            found.append(vector_result(stream))
            running.popleft()

        try:
            for message in build_vector_messages(texts, pooling, options):
                if len(running) == AT_ONCE:
                    await finish()
                running.append(AsyncStream(self._routers, self._metadata, self._resumption(message, options)))
            while running:
                await finish()
        finally:
            for stream in running:
                stream.cancel()
        return tuple(found)

    async def models(self) -> tuple[ModelCard, ...]:
        """Return the models that at least one live worker serves."""
        router = self._routers.current
        try:
            response = await router.ListModels(
                inference_pb2.ListModelsRequest(), timeout=CALL_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            failure = error_of(error)
            if may_be_tls(failure):
                add_tls_cause(failure, await asyncio.to_thread(self._routers.tls_cause, router))
            raise failure from error
        return tuple(decode_model(model) for model in response.models)

    async def status(self) -> ClusterStatus:
        """Return the state of the cluster: pools, workers, load and caches."""
        with control_errors():
            return decode_status(
                await self._cluster.Status(control_pb2.StatusRequest(protocols=range_message()), timeout=CALL_SECONDS)
            )

    async def explain(self, request_id: str) -> tuple[PlacementExplained, ...]:
        """Return all placements of a request, the earliest one first; raise the same errors as `fleet.client.Client.explain`."""
        with control_errors():
            request = control_pb2.ExplainRequest(request_id=request_id)
            return decode_explanation(await self._cluster.Explain(request, timeout=CALL_SECONDS))

    async def explain_overflow(self, request_id: str) -> OverflowExplained | None:
        """Return the outcome of the overflow of a request that the router had rejected; None if the request could not overflow.

        Raises:
            RequestNotFound: The router did not place the request, and the request did not overflow, or the router has dropped
                its explanation for later ones.
            FleetError: The call failed.
        """
        with control_errors():
            request = control_pb2.ExplainRequest(request_id=request_id)
            return decode_overflow(await self._cluster.Explain(request, timeout=CALL_SECONDS))

    async def tune(self, **thresholds: float) -> dict[str, float]:
        """Set thresholds of the router for later requests; return all thresholds by name."""
        request = tune_request(thresholds)
        with control_errors():
            return thresholds_of(await self._cluster.Tune(request, timeout=CALL_SECONDS))

    async def remote_prefill(self) -> RemotePrefill:
        """Return the measurements by which the router chooses between one worker and a pair for a request."""
        with control_errors():
            answer = await self._cluster.Tune(control_pb2.TuneRequest(), timeout=CALL_SECONDS)
        return remote_prefill_of(answer.remote_prefill)

    def _resumption(self, message: inference_pb2.GenerateRequest, options: Options | VectorOptions) -> Resumption:
        return Resumption(
            message,
            routers=len(self._routers),
            resume_seconds=self._resume_seconds,
            timeout_seconds=options.get("timeout_seconds"),
        )

    @property
    def _cluster(self) -> "control_pb2_grpc.ClusterAsyncStub":
        if self._control_channel is None:
            self._control_channel = self._control_port.aio_channel()
        return control_pb2_grpc.ClusterStub(self._control_channel)


class AsyncStream(StreamedAnswer):
    """Streams one answer: the caller iterates over its parts. Leaving the context, or calling `cancel`, cancels the request."""

    def __init__(
        self,
        routers: "RouterRing[inference_pb2_grpc.InferenceAsyncStub]",
        metadata: tuple[tuple[str, str], ...],
        resumption: Resumption,
    ) -> None:
        super().__init__()
        self._routers = routers
        self._metadata = metadata
        self._resumption = resumption
        self._cancelled = False  # True once `cancel` was called; a cancellation of the caller's task does not count
        self._send()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Return the next part of the answer.

        Raises:
            StopAsyncIteration: The answer is complete.
            FleetError: The request was rejected, or the answer could not be completed.
        """
        while True:
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self._end()
                raise
            except grpc.aio.AioRpcError as error:
                await self._try_again(error)
                continue
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if not self._cancelled or (task is not None and task.cancelling()):
                    raise
                raise Cancelled("the stream was cancelled", Reason.CANCELLED) from error
            if self._resumption.is_broken:
                self._resumption.arrived()
            if (delta := self._take(message)) is not None:
                return delta

    def _send(self) -> None:
        self._router = self._routers.current
        message, timeout = self._resumption.request(self)
        self._call = self._router.Generate(message, timeout=timeout, metadata=self._metadata)
        self._messages = aiter(self._call)

    async def _try_again(self, error: grpc.aio.AioRpcError) -> None:
        """Wait and send the request again after a failure.

        Raises:
            FleetError: The request is not sent again, because the failure is final or `cancel` was called.
        """
        try:
            pause = self._resumption.pause(error_of(error))
        except FleetError as final:
            if may_be_tls(final) and not self.request_id:
                add_tls_cause(final, await asyncio.to_thread(self._routers.tls_cause, self._router))
            raise final from error
        self._routers.leave(self._router)
        if pause:
            await asyncio.sleep(pause)
        if self._cancelled:
            raise Cancelled("the stream was cancelled", Reason.CANCELLED) from error
        self._send()

    def cancel(self) -> None:
        """Stop the answer; a later iteration raises `Cancelled`, unless the answer is already complete."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
