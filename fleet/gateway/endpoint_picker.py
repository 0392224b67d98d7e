"""The router's placement for gateways: an endpoint picker of the Gateway API Inference Extension, behind Envoy's `ext_proc`.

Rules:

1. A request is read whole, placed and booked in one step, as by `fleet.v1.Selection` and in the same books; then its headers go on
   with the endpoint, and its body as it came. Only the endpoints that the gateway allows are picked from.
2. A request that goes nowhere is answered in place of a server: 503 when nobody is ready for it, 429 with a hint when it is shed, and
   what the OpenAI API would say when it is wrong.
3. What is booked is given back when the answer ends, when the gateway ends the call, or when it tells nothing for the lease.
   Tokens are counted as they pass, roughly, so that the load is known while it lasts.
4. The endpoint that has answered counts, and not the one that was picked: where the gateway tells of another, the booking moves there.
5. A request without a body, or for a path that generates nothing, has nothing to be placed by: it goes to the endpoint with the
   fewest requests, and books nothing.
6. Of several pickers that do not know of each other's bookings, gateways are to ask one. The others are not ready, and answer 503 as
   long as they know of one who leads; without that knowledge they rather pick with half of the truth than not at all.
7. A gateway that breaks the protocol gets a gRPC status, since no answer of ours could be told from its confusion.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from fleet.core.clock import SECOND, Nanos
from fleet.gateway.call import PickerCall, PickerContext
from fleet.gateway.endpoints import PickerEndpoints, PickerLeadership, RouterApi, SolePicker
from fleet.gateway.ext_proc import SERVICE
from fleet.gateway.prompts import PromptReaderApi
from fleet.gateway.selection import SelectionService
from fleet.net.grpc.calls import Context, answer_call, serialize
from fleet.net.grpc.options import frontend_server_options
from fleet.net.grpc.port import LIVENESS, open_port
from fleet.router.settings.endpoint_picker import EndpointPickerSettings

READINESS = "readiness"


@asynccontextmanager
async def open_endpoint_picker(
    settings: EndpointPickerSettings, picker: "EndpointPicker", *, shared: bool = False, connection_seconds: float = 0
) -> AsyncIterator["EndpointPicker"]:
    """Listen and serve until the context ends; then running calls are cancelled.

    Args:
        settings: Where.
        picker: That serves.
        shared: Whether other processes may listen on the same port.
        connection_seconds: How long a gateway's connection lasts; 0: for as long as the gateway likes. A gateway has one for all its
            requests, so it is by this that they spread over the pickers behind a Service, and are elsewhere before this one ends.

    Raises:
        ConfigurationRefused: Nobody can listen there; the message says why.
    """
    server = grpc.aio.server(options=frontend_server_options(shared=shared, connection_seconds=connection_seconds))
    picker.add(server)
    async with open_port(
        server, settings.listen, (READINESS, SERVICE), picker.ready, alive={LIVENESS: lambda: True}
    ) as picker.address:
        yield picker


class EndpointPicker:
    """Serves any number of gateways."""

    def __init__(
        self,
        settings: EndpointPickerSettings,
        router: RouterApi,
        selection: SelectionService,
        prompts: PromptReaderApi,
        standing: PickerLeadership | None = None,
    ) -> None:
        """Nothing is started.

        Args:
            settings: Limits.
            router: Knows the workers.
            selection: Books.
            prompts: Reads requests.
            standing: Among other pickers; None: it is the only one.
        """
        self.address = ""  # with the port that was taken
        self._endpoints = PickerEndpoints(settings, router, standing or SolePicker())
        self._desk = PickerContext(settings=settings, endpoints=self._endpoints, selection=selection, prompts=prompts)
        self._calls = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def held_bytes(self) -> int:
        """Of bodies that are not whole or not placed yet."""
        return self._desk.held_bytes

    def add(self, server: grpc.aio.Server) -> None:
        stream: Any = grpc.stream_stream_rpc_method_handler  # the stubs know no coroutines
        methods = {"Process": stream(self._process, response_serializer=serialize)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def ready(self) -> bool:
        """Whether a request sent now would find a worker."""
        return self._endpoints.ready()

    async def drain(self, within: Nanos) -> None:
        """Say that this picker is going away, and wait for the answers that pass."""
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
