"""The synchronous client. Safe to use from several threads, a stream from one at a time."""

from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

import grpc

from fleet.client.control import ControlPort, control_error
from fleet.client.errors import error_of
from fleet.client.requests import Options, PromptLike, api_key_metadata, build_message, tune_request
from fleet.client.results import (
    ClusterStatus,
    Collected,
    PlacementExplained,
    RemotePrefill,
    Result,
    decode_explanation,
    decode_status,
    remote_prefill_of,
    thresholds_of,
)
from fleet.core.requests import Delta, ModelCard
from fleet.net.grpc.options import CHANNEL_OPTIONS
from fleet.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from fleet.wire.inference import decode_model
from kvstore.security.credentials import Credentials

CALL_SECONDS = 10.0  # for calls that are answered at once


class Client:
    """A connection to a cluster; close it, or use it as a context manager.

        with Client("127.0.0.1:50051") as client:
            print(client.complete("Say hello", max_tokens=16).text)

    Connecting happens with the first call. All methods raise `FleetError`s.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        control: str = "",
        control_credentials: Credentials = Credentials(),  # noqa: B008 - frozen
    ) -> None:
        """Connect to a router.

        Args:
            address: Its gRPC address for clients, ``host:port`` or ``unix:/path``.
            api_key: A cluster with tenants wants one.
            control: Its control address, where `status`, `explain`, `tune` and `remote_prefill` are asked; empty: as a router of this
                user on this machine has it.
            control_credentials: What proves to a control port over TCP that this client may use it.

        Raises:
            ConfigurationRefused: A file of the credentials cannot be used.
        """
        self._metadata = api_key_metadata(api_key)
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control_port = ControlPort(address, control, control_credentials)
        self._control_channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and with it every stream that still runs."""
        self._channel.close()
        if self._control_channel is not None:
            self._control_channel.close()

    def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> "Stream":
        """Ask for an answer that streams.

            with client.generate([{"role": "user", "content": "Hi"}], max_tokens=64, stop="END") as stream:
                for delta in stream:
                    print(delta.text, end="")
            stream.result.usage.completion_tokens

        Args:
            prompt: Text, token ids, or a conversation.
            options: See `fleet.client.requests.Options`.

        Raises:
            InvalidRequest: A value does not fit its field; nothing was sent. What the server refuses is raised while
                iterating.
        """
        message = build_message(prompt, options)
        return Stream(
            self._inference.Generate(message, timeout=options.get("timeout_seconds"), metadata=self._metadata)
        )

    def complete(self, prompt: PromptLike, **options: Unpack[Options]) -> Result:
        """Ask for an answer and wait for all of it; arguments as of `generate`.

        Raises:
            FleetError: It failed; see the subclasses in `fleet.client.errors`.
        """
        with self.generate(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def models(self) -> tuple[ModelCard, ...]:
        """Models that at least one live worker serves.

        Raises:
            Unauthenticated: The cluster has tenants with keys, and this client has none of theirs.
            FleetError: The cluster cannot be asked.
        """
        try:
            response = self._inference.ListModels(
                inference_pb2.ListModelsRequest(), timeout=CALL_SECONDS, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise error_of(error) from error
        return tuple(decode_model(model) for model in response.models)

    def status(self) -> ClusterStatus:
        """Pools, workers, load and cache.

        Raises:
            FleetError: The cluster cannot be asked.
        """
        try:
            return decode_status(self._cluster.Status(control_pb2.StatusRequest(), timeout=CALL_SECONDS))
        except grpc.RpcError as error:
            raise control_error(error) from error

    def explain(self, request_id: str) -> tuple[PlacementExplained, ...]:
        """Why a request went where it went, placement by placement.

        Raises:
            RequestNotFound: This router has not placed it, or too many others since.
            FleetError: The cluster cannot be asked.
        """
        try:
            request = control_pb2.ExplainRequest(request_id=request_id)
            return decode_explanation(self._cluster.Explain(request, timeout=CALL_SECONDS))
        except grpc.RpcError as error:
            raise control_error(error) from error

    def tune(self, **thresholds: float) -> dict[str, float]:
        """Set thresholds of the router, from the next request on; returns all that are in force.

        Args:
            thresholds: By name; ``fleet.router.settings.router.Thresholds`` has them all. None: only ask.

        Raises:
            InvalidRequest: There is no such threshold, or it cannot have this value; nothing was changed.
            FleetError: The cluster cannot be asked.
        """
        request = tune_request(thresholds)
        try:
            return thresholds_of(self._cluster.Tune(request, timeout=CALL_SECONDS))
        except grpc.RpcError as error:
            raise control_error(error) from error

    def remote_prefill(self) -> RemotePrefill:
        """What the router has measured of its threshold `remote_prefill_min_tokens`, and would decide by it.

        Raises:
            FleetError: The cluster cannot be asked.
        """
        try:
            answer = self._cluster.Tune(control_pb2.TuneRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise control_error(error) from error
        return remote_prefill_of(answer.remote_prefill)

    @property
    def _cluster(self) -> control_pb2_grpc.ClusterStub:
        if self._control_channel is None:
            self._control_channel = self._control_port.channel()
        return control_pb2_grpc.ClusterStub(self._control_channel)


class Stream:
    """One answer as it comes: iterate it. Leaving its context, or `cancel`, stops the engine."""

    def __init__(self, call: "grpc._CallIterator[inference_pb2.GenerateResponse]") -> None:
        self._call = call
        self._collected = Collected()

    @property
    def request_id(self) -> str:
        """Under which logs and traces have it; empty until the server has admitted the request."""
        return self._collected.request_id

    @property
    def result(self) -> Result:
        """The whole answer; only after the last delta.

        Raises:
            RuntimeError: The stream has not ended.
        """
        return self._collected.result

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next tokens.

        Raises:
            FleetError: The request was refused, or the answer could not be completed.
        """
        while True:
            try:
                message = next(self._call)
            except StopIteration:
                self._collected.end()
                raise
            except grpc.RpcError as error:
                raise error_of(error) from error
            if (delta := self._collected.take(message)) is not None:
                return delta

    def cancel(self) -> None:
        """Stop; iterating on raises `Cancelled`, unless the answer was complete."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
