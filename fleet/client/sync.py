"""Synchronous client. Several threads may share a client, but only one thread at a time may use a stream."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
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
from fleet.client.tls import ClientTls, check_key_is_safe, open_channel
from fleet.client.vectors import AT_ONCE, VectorOptions, VectorResult, build_vector_messages, vector_result
from fleet.core.demand_reports import DemandReport
from fleet.core.errors import Reason
from fleet.core.requests import Delta, ModelCard, Pooling, PoolingTask
from fleet.core.system_clock import SystemClock
from fleet.net.grpc.options import BLOCKING_CHANNEL_OPTIONS
from fleet.planner.sources.wire import decode_report
from fleet.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from fleet.wire.inference import decode_model
from kvstore.protocol.range_messages import range_message
from kvstore.security.credentials import Credentials

# Time limit in seconds for each call that is no request to a model. `watch_demand` has no limit.
CALL_SECONDS = 10.0


class Client:
    """Connects to a cluster. The caller has to close the client, or to use it as a context manager.

        with Client("127.0.0.1:50051") as client:
            print(client.complete("Say hello", max_tokens=16).text)

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
        """Prepare connections to the routers of one cluster.

        Args:
            address: The router's gRPC address for clients, ``host:port`` or ``unix:/path``, or the addresses of several
                routers of one cluster. The first router gets all requests until it fails, and then the next one.
            api_key: API key, which is needed if the cluster has tenants.
            tls: Files for TLS, or None to connect without TLS.
            insecure: If true, the client may send the API key to another host without TLS. Set it only if nobody else can
                read the network.
            resume_seconds: Seconds in which the client tries to continue a broken stream at another router, or at the
                only address. 0 means that a broken stream ends with an error. None means 30 if there are several
                addresses, and otherwise 0. With temperature 0 the continuation has exactly the tokens that the lost
                answer would have had. If no worker has the same weights or can rebuild the sampling state of the answer, the
                stream ends with an error.
            control: The router's control address, for `status`, `watch_demand`, `explain`, `explain_overflow`, `tune`
                and `remote_prefill`. If it is empty, the control address of this user's router on this machine is used.
            control_credentials: Credentials for a control port over TCP (`fleet.client.control.ControlPort`).

        Raises:
            ConfigurationRefused: There is no address, `resume_seconds` is negative or no number, a credentials file cannot
                be used, or the API key would be sent over a network without encryption.
        """
        addresses = addresses_of(address)
        self._resume_seconds = resume_limit(resume_seconds, len(addresses))
        for each in addresses:
            check_key_is_safe(each, api_key, tls, insecure=insecure)
        self._metadata = api_key_metadata(api_key)
        options = (*BLOCKING_CHANNEL_OPTIONS, *(RESUMABLE_OPTIONS if self._resume_seconds else ()))
        self._channels = [open_channel(each, options, tls) for each in addresses]
        self.channel = self._channels[0]
        stubs = [inference_pb2_grpc.InferenceStub(each) for each in self._channels]
        self._routers = RouterRing(stubs, addresses, tls)
        self._control_port = ControlPort(addresses[0], control, control_credentials)
        self._control_channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and end all running streams."""
        for channel in self._channels:
            channel.close()
        if self._control_channel is not None:
            self._control_channel.close()

    def generate(self, prompt: PromptLike, **options: Unpack[Options]) -> "Stream":
        """Send a request whose answer is streamed.

            with client.generate([{"role": "user", "content": "Hi"}], max_tokens=64, stop="END") as stream:
                for delta in stream:
                    print(delta.text, end="")
            stream.result.usage.completion_tokens

        Args:
            prompt: A text, token ids, or a conversation.
            options: The options in `fleet.client.requests.Options`.

        Raises:
            InvalidRequest: An option does not exist, or a value does not fit its field; nothing was sent. If the router
                rejects the request, iterating over the stream raises the error.
        """
        return Stream(self._routers, self._metadata, self._resumption(build_message(prompt, options), options))

    def complete(self, prompt: PromptLike, **options: Unpack[Options]) -> Result:
        """Send a request and wait for the complete answer; the arguments are those of `generate`.

        Raises:
            FleetError: The request failed; `fleet.client.errors` has the subclasses.
        """
        with self.generate(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dimensions: int = 0,
        activation: bool | None = None,
        **options: Unpack[VectorOptions],
    ) -> tuple[VectorResult, ...]:
        """Return the embedding of each text, in the order of the texts; the model needs the task embed.

            with Client("127.0.0.1:50051") as client:
                rain, sun = (each.vector for each in client.embed(["rain", "sun"]))

        Args:
            texts: Texts, or lists of token ids.
            dimensions: The number of dimensions to return, for models that were trained for shorter vectors; 0 means all.
            activation: Whether the embeddings are normalised; None: the model's default is used.
            options: The options in `fleet.client.vectors.VectorOptions`.

        Raises:
            InvalidRequest: An option does not exist, a value does not fit its field, or the model has another task.
            FleetError: A request failed, and the others were cancelled.
        """
        return self._vectors(
            texts, Pooling(task=PoolingTask.EMBED, dimensions=dimensions, activation=activation), options
        )

    def classify(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        activation: bool | None = None,
        **options: Unpack[VectorOptions],
    ) -> tuple[VectorResult, ...]:
        """Return, for each text, one number for each class; the model needs the task classify.

        The arguments are those of `embed`, without `dimensions`. If `activation` is False, the numbers are logits.

        Raises:
            InvalidRequest: An option does not exist, a value does not fit its field, or the model has another task.
            FleetError: A request failed, and the others were cancelled.
        """
        return self._vectors(texts, Pooling(task=PoolingTask.CLASSIFY, activation=activation), options)

    def _vectors(
        self, texts: Sequence[str | Sequence[int]], pooling: Pooling, options: VectorOptions
    ) -> tuple[VectorResult, ...]:
        found: list[VectorResult] = []
        running: deque[Stream] = deque()

        def finish() -> None:
            stream = running[0]
            for _ in stream:
                pass
            found.append(vector_result(stream))
            running.popleft()

        try:
            for message in build_vector_messages(texts, pooling, options):
                if len(running) == AT_ONCE:
                    finish()
                running.append(Stream(self._routers, self._metadata, self._resumption(message, options)))
            while running:
                finish()
        finally:
            for stream in running:
                stream.cancel()
        return tuple(found)

    def models(self) -> tuple[ModelCard, ...]:
        """Return the models that at least one live worker serves.

        Raises:
            Unauthenticated: The cluster has tenants, and this client has no valid key.
            FleetError: The call failed.
        """
        router = self._routers.current
        try:
            response = router.ListModels(
                inference_pb2.ListModelsRequest(), timeout=CALL_SECONDS, metadata=self._metadata
            )
        except grpc.RpcError as error:
            failure = error_of(error)
            if may_be_tls(failure):
                add_tls_cause(failure, self._routers.tls_cause(router))
            raise failure from error
        return tuple(decode_model(model) for model in response.models)

    def status(self) -> ClusterStatus:
        """Return the state of the cluster: pools, workers, load and caches.

        Raises:
            FleetError: The call failed.
        """
        with control_errors():
            return decode_status(
                self._cluster.Status(control_pb2.StatusRequest(protocols=range_message()), timeout=CALL_SECONDS)
            )

    def watch_demand(self) -> Iterator[DemandReport]:
        """Yield about once a second a demand report of the router process at the control address, until either side ends the call.

        Raises:
            FleetError: The call failed.
        """
        with control_errors():
            for message in self._cluster.WatchDemand(control_pb2.WatchDemandRequest(protocols=range_message())):
                yield decode_report(message, SystemClock().now())

    def explain(self, request_id: str) -> tuple[PlacementExplained, ...]:
        """Return all placements of a request, the earliest one first.

        Raises:
            RequestNotFound: The router did not place the request, and the request did not overflow, or the router has dropped
                its explanation for later ones.
            FleetError: The call failed.
        """
        with control_errors():
            request = control_pb2.ExplainRequest(request_id=request_id)
            return decode_explanation(self._cluster.Explain(request, timeout=CALL_SECONDS))

    def explain_overflow(self, request_id: str) -> OverflowExplained | None:
        """Return the outcome of the overflow of a request that the router had rejected; None if the request could not overflow.

        Raises:
            RequestNotFound: As for `explain`.
            FleetError: The call failed.
        """
        with control_errors():
            request = control_pb2.ExplainRequest(request_id=request_id)
            return decode_overflow(self._cluster.Explain(request, timeout=CALL_SECONDS))

    def tune(self, **thresholds: float) -> dict[str, float]:
        """Set thresholds of the router for later requests; return all thresholds by name.

        Args:
            thresholds: New values by name; ``fleet.router.settings.router.Thresholds`` explains them. If there are
                none, the method only returns the thresholds.

        Raises:
            InvalidRequest: A name or value is invalid; nothing was changed.
            FleetError: The call failed.
        """
        request = tune_request(thresholds)
        with control_errors():
            return thresholds_of(self._cluster.Tune(request, timeout=CALL_SECONDS))

    def remote_prefill(self) -> RemotePrefill:
        """Return the measurements by which the router chooses between one worker and a pair for a request.

        Raises:
            FleetError: The call failed.
        """
        with control_errors():
            answer = self._cluster.Tune(control_pb2.TuneRequest(), timeout=CALL_SECONDS)
        return remote_prefill_of(answer.remote_prefill)

    def _resumption(self, message: inference_pb2.GenerateRequest, options: Options | VectorOptions) -> Resumption:
        return Resumption(
            message,
            routers=len(self._routers),
            resume_seconds=self._resume_seconds,
            timeout_seconds=options.get("timeout_seconds"),
        )

    @property
    def _cluster(self) -> control_pb2_grpc.ClusterStub:
        if self._control_channel is None:
            self._control_channel = self._control_port.channel()
        return control_pb2_grpc.ClusterStub(self._control_channel)


class Stream(StreamedAnswer):
    """Streams one answer: the caller iterates over its parts. Leaving the context, or calling `cancel`, cancels the request."""

    def __init__(
        self,
        routers: RouterRing[inference_pb2_grpc.InferenceStub],
        metadata: tuple[tuple[str, str], ...],
        resumption: Resumption,
    ) -> None:
        super().__init__()
        self._routers = routers
        self._metadata = metadata
        self._resumption = resumption
        self._cancelled = False
        self._send()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """Return the next part of the answer.

        Raises:
            StopIteration: The answer is complete.
            FleetError: The request was rejected, or the answer could not be completed.
        """
        while True:
            try:
                message = next(self._call)
            except StopIteration:
                self._end()
                raise
            except grpc.RpcError as error:
                self._try_again(error)
                continue
            if self._resumption.is_broken:
                self._resumption.arrived()
            if (delta := self._take(message)) is not None:
                return delta

    def _send(self) -> None:
        self._router = self._routers.current
        message, timeout = self._resumption.request(self)
        self._call = self._router.Generate(message, timeout=timeout, metadata=self._metadata)

    def _try_again(self, error: grpc.RpcError) -> None:
        """Wait and send the request again after a failure.

        Raises:
            FleetError: The request is not sent again, because the failure is final or `cancel` was called.
        """
        try:
            pause = self._resumption.pause(error_of(error))
        except FleetError as final:
            if may_be_tls(final) and not self.request_id:
                add_tls_cause(final, self._routers.tls_cause(self._router))
            raise final from error
        self._routers.leave(self._router)
        if pause:
            time.sleep(pause)
        if self._cancelled:
            raise Cancelled("the stream was cancelled", Reason.CANCELLED) from error
        self._send()

    def cancel(self) -> None:
        """Stop the answer; a later iteration raises `Cancelled`, unless the answer is already complete."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
