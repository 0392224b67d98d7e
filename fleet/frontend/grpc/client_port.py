"""Base of the gRPC ports for clients: listening, draining, a memory limit for messages, and deadlines."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import ClassVar, Self

import grpc
from msgspec import structs

from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import draining_rejection
from fleet.core.requests import GenerateRequest
from fleet.frontend.generation import Generation
from fleet.frontend.request_tracing import TRACE_HEADERS
from fleet.net.client_tls import ServerCertificates
from fleet.net.grpc.calls import Context, headers_of
from fleet.net.grpc.client_servers import MessageMemory, client_server
from fleet.net.grpc.errors import long_message_rejection
from fleet.net.grpc.port import open_port
from fleet.net.settings import DEFAULT_GRPC_LIMITS, ORDINARY_BODY_BYTES, GrpcSettings


class ClientPort(ABC):
    """Base class of the gRPC frontends: listens, limits the memory for messages, computes deadlines, and refuses requests after `drain`."""

    SERVICE: ClassVar[str]
    """The full name of the gRPC service, such as ``fleet.v1.Inference``."""

    SETTING: ClassVar[str]
    """The name of the settings field with the address to listen on. Error messages contain this name."""

    def __init__(self, generation: Generation, clock: Clock, memory: MessageMemory, limits: GrpcSettings) -> None:
        self.address = ""  # the address with the port number in use; empty before the port listens
        self.memory = memory
        # Seconds for which one message may wait until its caller reads it. After them, the caller counts as disconnected.
        self.write_seconds = limits.write_timeout_seconds
        self._generation = generation
        self._clock = clock
        self._draining = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        listen: str,
        generation: Generation,
        clock: Clock,
        *,
        max_held_bytes: int,
        limits: GrpcSettings = DEFAULT_GRPC_LIMITS,
        shared: bool = False,
        connection_seconds: float = 0,
        certificates: ServerCertificates | None = None,
    ) -> AsyncIterator[Self]:
        """Listen and serve until the context ends; then cancel running calls.

        Args:
            listen: ``host:port`` (port 0 takes a free one) or ``unix:/path``.
            generation: Serves the requests.
            clock: Clock for deadlines.
            max_held_bytes: Memory limit for the messages of requests that arrive or run; beyond it, long messages are refused.
            limits: Settings of the connections, and which gRPC library serves them.
            shared: Whether other processes may listen on the same port.
            connection_seconds: The lifetime of a client's connection; 0 sets no limit.
            certificates: The certificates of a port that speaks TLS; None: the port does not use TLS.

        Raises:
            ConfigurationRefused: The address is malformed or in use, or the gRPC library that `limits` names cannot be loaded.
        """
        server = client_server(
            limits,
            shared=shared,
            connection_seconds=connection_seconds,
            max_held_bytes=max_held_bytes,
            certificates=certificates,
        )
        frontend = cls(generation, clock, server, limits)
        server.add_generic_rpc_handlers(frontend.handlers())
        async with open_port(server, listen, (cls.SERVICE,), frontend.ready, setting=cls.SETTING) as frontend.address:
            yield frontend

    @abstractmethod
    def handlers(self) -> tuple[grpc.GenericRpcHandler, ...]:
        """Return the method handlers of the service; each gets the message as undecoded bytes."""

    def drain(self) -> None:
        """Admit no more requests; running ones continue."""
        self._draining = True

    def ready(self) -> bool:
        """Return whether the port admits requests, and at least one live worker can serve them."""
        return bool(self._generation.models()) and not self._draining

    def check_admitted(self) -> None:
        """Check that the port still admits requests.

        Raises:
            RequestRejected: DRAINING; `drain` was called.
        """
        if self._draining:
            raise draining_rejection()

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count the `size` bytes of a message towards the memory limit while the context is open.

        Raises:
            RequestRejected: QUEUE_FULL; the message is longer than `ORDINARY_BODY_BYTES`, and would exceed the memory limit.
        """
        memory = self.memory
        if size > ORDINARY_BODY_BYTES and memory.held_bytes + size > memory.max_held_bytes:
            raise long_message_rejection()
        memory.held_bytes += size
        try:
            yield
        finally:
            memory.held_bytes -= size

    def traced(self, request: GenerateRequest, context: Context) -> GenerateRequest:
        """Return a request with the trace context of its call. Call this only if requests are traced."""
        tracing = self._generation.tracing
        assert tracing is not None
        return structs.replace(request, trace=tracing.read(headers_of(context, TRACE_HEADERS)))

    def deadline(self, context: Context, timeout_ms: int = 0) -> Nanos | None:
        """Return the deadline of a request: the gRPC call's or the message's, whichever is earlier; None if neither sets one.

        Args:
            context: The gRPC call.
            timeout_ms: The timeout in the message; 0 means none.
        """
        remaining = context.time_remaining()
        spans = [] if remaining is None else [int(remaining * SECOND)]
        if timeout_ms:
            spans.append(timeout_ms * MILLISECOND)
        return Nanos(self._clock.now() + min(spans)) if spans else None
