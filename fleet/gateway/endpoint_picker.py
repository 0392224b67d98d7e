"""Endpoint picker: places requests for gateways, by the Gateway API Inference Extension and Envoy's `ext_proc`.

Rules:

1. A request is read completely, then placed and reserved in one step, with the reservations of `fleet.v1.Selection`.
   Then its headers go on with the endpoint, and its body unchanged. Only endpoints that the gateway allows are picked.
2. A request that cannot be placed is answered in place of a server: 503 if no worker is ready, 429 with a retry hint if
   it is shed, and the OpenAI API's error if it is invalid.
3. A reservation ends when the answer ends, when the gateway ends the call, or when the gateway is silent for the lease.
   Tokens are counted roughly as they pass, so that the load is known meanwhile.
4. The endpoint that answers counts, not the picked one: if the gateway names another, the reservation moves there.
5. A request without a body, or for a path that generates nothing, goes to the endpoint with the fewest requests and
   reserves nothing.
6. Several pickers may not know each other's reservations, so gateways should ask only one of them. The others are not
   ready, and answer 503 while they know of a leader. Without that knowledge they pick, because half of the load data is
   better than no answer.
7. A gateway that breaks the protocol gets a gRPC error.
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

READINESS = "readiness"


@asynccontextmanager
async def open_endpoint_picker(
    settings: EndpointPickerSettings, picker: "EndpointPicker", *, shared: bool = False, connection_seconds: float = 0
) -> AsyncIterator["EndpointPicker"]:
    """Listen and serve until the context ends; then running calls are cancelled.

    Args:
        settings: The address.
        picker: The service.
        shared: True if other processes may listen on the same port.
        connection_seconds: Longest life of a gateway's connection; 0: no limit. A gateway sends all its requests over
            one connection, so a limit spreads gateways over the pickers of a Service, and moves them before this one
            ends.

    Raises:
        ConfigurationRefused: The address cannot be listened on; the message says why.
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
    ) as picker.address:
        yield picker


class EndpointPicker:
    """The endpoint picker service, for any number of gateways."""

    def __init__(
        self,
        settings: EndpointPickerSettings,
        router: RouterApi,
        selection: SelectionService,
        prompts: PromptReaderApi,
        standing: PickerLeadership | None = None,
    ) -> None:
        """Prepare the service.

        Args:
            settings: Limits.
            router: Knows the workers.
            selection: Places and reserves.
            prompts: Reads requests.
            standing: Leadership among several pickers; None: it is the only one.
        """
        self.address = ""  # with the real port
        self._endpoints = PickerEndpoints(settings, router, standing or SolePicker())
        self._desk = PickerContext(settings=settings, endpoints=self._endpoints, selection=selection, prompts=prompts)
        self._calls = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies that are incomplete or not placed yet."""
        return self._desk.held_bytes

    def add(self, server: grpc.aio.Server) -> None:
        stream: Any = grpc.stream_stream_rpc_method_handler  # the stubs do not know coroutines
        methods = {"Process": stream(self._process, response_serializer=serialize)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def ready(self) -> bool:
        """Return True if a request that came now would find a worker."""
        return self._endpoints.ready()

    async def drain(self, within: Nanos) -> None:
        """Announce that this picker is leaving, and wait for the answers that still pass."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within / SECOND):
                await self._endpoints.leave()
                await self._quiet.wait()

    async def _process(self, messages: AsyncIterator[bytes], context: Context) -> None:
        await answer_call(self._serve(messages, context), context)

    async def _serve(self, messages: AsyncIterator[bytes], context: Context) -> None:
        self._calls += 1
        self._quiet.clear()
        call = PickerCall(self._desk)
        try:
            await call.run(messages, context)
        finally:
            call.end()
            self._calls -= 1
            if not self._calls:
                self._quiet.set()
