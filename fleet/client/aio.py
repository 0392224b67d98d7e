"""Asynchronous client: like `fleet.client.sync`, where arguments and errors are described, for one event loop."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, Unpack

import grpc

from fleet.client.control import ControlPort, control_errors
from fleet.client.errors import Cancelled, error_of
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
from fleet.client.sync import CALL_SECONDS
from fleet.client.tls import ClientTls, check_key_is_safe, open_aio_channel
from fleet.core.errors import Reason
from fleet.core.requests import Delta, ModelCard
from fleet.net.grpc.options import CHANNEL_OPTIONS
from fleet.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from fleet.wire.inference import decode_model
from kvstore.security.credentials import Credentials


class AsyncClient:
    """A connection to a cluster, made within a running event loop; close it, or use it as a context manager.

        async with AsyncClient("127.0.0.1:50051") as client:
            async with client.generate("Once upon a time", max_tokens=32) as stream:
                async for delta in stream:
                    print(delta.text, end="", flush=True)

    Connecting happens with the first call. All methods raise `FleetError`s.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: ClientTls | None = None,
        insecure: bool = False,
        control: str = "",
        control_credentials: Credentials = Credentials(),  # noqa: B008 - frozen
    ) -> None:
        """Connect to a router; the arguments are those of `fleet.client.Client`."""
        check_key_is_safe(address, api_key, tls, insecure=insecure)
        self._metadata = api_key_metadata(api_key)
        self._channel = open_aio_channel(address, CHANNEL_OPTIONS, tls)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control_port = ControlPort(address, control, control_credentials)
        self._control_channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end all running streams."""
        await self._channel.close()
        if self._control_channel is not None:
            await self._control_channel.close()

    def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> "AsyncStream":
        """Send a request with a streamed answer; arguments as for `fleet.client.Client.generate`."""
        message = build_message(prompt, options)
        return AsyncStream(
            self._inference.Generate(message, timeout=options.get("timeout_seconds"), metadata=self._metadata)
        )

    async def complete(self, prompt: PromptLike, **options: Unpack[Options]) -> Result:
        """Send a request and wait for the complete answer; arguments as for `generate`."""
        async with self.generate(prompt, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def models(self) -> tuple[ModelCard, ...]:
        """Return the models that at least one live worker serves."""
        try:
            response = await self._inference.ListModels(
                inference_pb2.ListModelsRequest(), timeout=CALL_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        return tuple(decode_model(model) for model in response.models)

    async def status(self) -> ClusterStatus:
        """Return pools, workers, load and caches."""
        with control_errors():
            return decode_status(await self._cluster.Status(control_pb2.StatusRequest(), timeout=CALL_SECONDS))

    async def explain(self, request_id: str) -> tuple[PlacementExplained, ...]:
        """Return the placements of a request, the first one first."""
        with control_errors():
            request = control_pb2.ExplainRequest(request_id=request_id)
            return decode_explanation(await self._cluster.Explain(request, timeout=CALL_SECONDS))

    async def explain_overflow(self, request_id: str) -> OverflowExplained | None:
        """Return what became of a request that was refused and may overflow; None if it was not refused.

        Raises:
            RequestNotFound: This router does not know it, or has forgotten it.
            FleetError: The call failed.
        """
        with control_errors():
            request = control_pb2.ExplainRequest(request_id=request_id)
            return decode_overflow(await self._cluster.Explain(request, timeout=CALL_SECONDS))

    async def tune(self, **thresholds: float) -> dict[str, float]:
        """Set thresholds of the router for later requests; return all thresholds."""
        request = tune_request(thresholds)
        with control_errors():
            return thresholds_of(await self._cluster.Tune(request, timeout=CALL_SECONDS))

    async def remote_prefill(self) -> RemotePrefill:
        """Return what the router has measured for the threshold `remote_prefill_min_tokens`."""
        with control_errors():
            answer = await self._cluster.Tune(control_pb2.TuneRequest(), timeout=CALL_SECONDS)
        return remote_prefill_of(answer.remote_prefill)

    @property
    def _cluster(self) -> "control_pb2_grpc.ClusterAsyncStub":
        if self._control_channel is None:
            self._control_channel = self._control_port.aio_channel()
        return control_pb2_grpc.ClusterStub(self._control_channel)


class AsyncStream(StreamedAnswer):
    """One streamed answer, to be iterated. Leaving its context, or `cancel`, stops the engine."""

    def __init__(
        self, call: "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
    ) -> None:
        self._call = call
        self._messages = aiter(call)
        super().__init__()
        self._cancelled = False  # by `cancel`, not because the task was cancelled

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """Return the next tokens.

        Raises:
            FleetError: The request was rejected, or the answer could not be completed.
        """
        while True:
            try:
                message = await anext(self._messages)
            except StopAsyncIteration:
                self._end()
                raise
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if not self._cancelled or (task is not None and task.cancelling()):
                    raise
                raise Cancelled("the stream was cancelled", Reason.CANCELLED) from error
            if (delta := self._take(message)) is not None:
                return delta

    def cancel(self) -> None:
        """Stop the answer; further iteration raises `Cancelled`, unless the answer was complete."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
