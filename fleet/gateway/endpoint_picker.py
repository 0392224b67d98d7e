"""Endpoint picker: chooses an endpoint for each request of a gateway, over Envoy's gRPC protocol `ext_proc`.

The messages are those of the Gateway API Inference Extension.

Rules:

1. The picker reads a request completely, then places it and reserves capacity for it in one step, as the service
   `fleet.v1.Selection` does. Then it returns the headers with the endpoint (`fleet.gateway.ext_proc.picked`), and the unchanged body, to
   the gateway. It picks only endpoints that the gateway allows.
2. The picker itself answers a request that cannot be placed: with status 503 if no worker is ready, with 429 and a
   retry hint if all workers are busy, and with an error in the form of its API if the request is invalid.
3. A reservation ends when the answer ends, when the gateway ends the call, when one of the request's workers is lost, or
   when the gateway sends nothing for the duration of the lease. While the answer passes through the picker, the picker
   counts its tokens roughly, so that the router knows the load.
4. The gateway may send a request to another endpoint than the picked one. If the gateway names another endpoint with
   the answer, the reservation moves to that endpoint.
5. Only requests for completions, chats, embeddings, responses and messages are placed by their prompts. A request without
   a body, or for another path, goes to the endpoint with the fewest requests and reserves nothing.
6. Several pickers do not always know each other's reservations, so gateways should call only one picker, the leader.
   The other pickers are not ready, and reject requests with 503 while they know of a leader. A picker that knows of no
   leader picks endpoints although it is not ready: it may not know the whole load, but a worse choice is better than an
   error.
7. A gateway that breaks the protocol gets a gRPC error.
8. If clients need API keys, the picker checks the key of a request with a body when its headers arrive. So it keeps no
   byte of the body of an unknown client.
9. If the router itself is the endpoint (`router_endpoint`), the picker forwards the body piece by piece, and rules 1, 5 and 8
   do not apply. The router checks the key and places the request when it gets the request.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from fleet.core.clock import SECOND, Nanos
from fleet.gateway.call import PickerCall, PickerContext
from fleet.gateway.endpoints import PickerEndpoints, PickerLeadership, SolePicker
from fleet.gateway.ext_proc import SERVICE
from fleet.gateway.prompts import PromptReaderApi
from fleet.gateway.selection import SelectionService
from fleet.net.grpc.calls import Context, answer_call, serialize
from fleet.net.grpc.options import frontend_server_options
from fleet.net.grpc.port import LIVENESS, open_port
from fleet.router.api import RouterApi
from fleet.router.settings.endpoint_picker import EndpointPickerSettings
from kvstore.security.certificates import CertificateFiles
from kvstore.security.channels import secure_binder

READINESS = "readiness"


@asynccontextmanager
async def open_endpoint_picker(
    settings: EndpointPickerSettings,
    picker: "EndpointPicker",
    *,
    shared: bool = False,
    connection_seconds: float = 0,
    certificates: CertificateFiles | None = None,
) -> AsyncIterator["EndpointPicker"]:
    """Listen and serve until the context ends. Running calls then get a short time to end, before they are cancelled.

    Args:
        settings: The settings with the address to listen on.
        picker: The service to serve; this function sets its `address`.
        shared: True if other processes may listen on the same port.
        connection_seconds: Maximum lifetime of a gateway's connection in seconds; 0: no limit. A gateway sends all its
            requests over one connection. A limit makes gateways connect anew, so that they spread over the pickers of a
            Service and move to other pickers before this one ends.
        certificates: The certificate files of a port that speaks TLS; None: the port does not use TLS.

    Raises:
        ConfigurationRefused: The address cannot be listened on; the message states the reason.
    """
    server = grpc.aio.server(options=frontend_server_options(shared=shared, connection_seconds=connection_seconds))
    picker.add(server)
    async with open_port(
        server,
        settings.listen,
        (READINESS, SERVICE),
        picker.ready,
        setting="endpoint_picker.listen",
        alive={LIVENESS: lambda: True},
        bind=None if certificates is None else secure_binder(certificates),
    ) as picker.address:
        yield picker


class EndpointPicker:
    """Serves the gRPC service of the endpoint picker to any number of gateways."""

    def __init__(
        self,
        settings: EndpointPickerSettings,
        router: RouterApi,
        selection: SelectionService,
        prompts: PromptReaderApi,
        standing: PickerLeadership | None = None,
    ) -> None:
        """Create the service.

        Args:
            settings: Limits, and how gateways reach workers.
            router: The router, which knows the workers.
            selection: Places requests and reserves capacity.
            prompts: Reads the bodies of requests.
            standing: The election of the leader among several pickers (rule 6); None: this picker is the only one.
        """
        self.address = ""  # the address with the real port, set by `open_endpoint_picker`
        self._endpoints = PickerEndpoints(settings, router, standing or SolePicker())
        self._picker_context = PickerContext(
            settings=settings, endpoints=self._endpoints, selection=selection, prompts=prompts
        )
        self._calls = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def held_bytes(self) -> int:
        """Number of body bytes in memory that belong to incomplete requests or to requests without a worker yet."""
        return self._picker_context.held_bytes

    def add(self, server: grpc.aio.Server) -> None:
        # The type stubs of grpc do not accept coroutines as handlers.
        stream: Any = grpc.stream_stream_rpc_method_handler
        methods = {"Process": stream(self._process, response_serializer=serialize)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def ready(self) -> bool:
        """Return True if this picker leads, is not leaving, and its router has a worker for at least one model."""
        return self._endpoints.ready()

    async def drain(self, within: Nanos) -> None:
        """Stop being ready, and wait until all running calls have ended, at most for the duration `within`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within / SECOND):
                await self._endpoints.leave()
                await self._quiet.wait()

    async def _process(self, messages: AsyncIterator[bytes], context: Context) -> None:
        await answer_call(self._serve(messages, context), context)

    async def _serve(self, messages: AsyncIterator[bytes], context: Context) -> None:
        self._calls += 1
        self._quiet.clear()
        call = PickerCall(self._picker_context)
        try:
            await call.run(messages, context)
        finally:
            call.end()
            self._calls -= 1
            if not self._calls:
                self._quiet.set()
