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
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc
from msgspec import structs

from fleet.adapters.ext_proc import (
    SERVICE,
    answer_piece,
    body_pieces,
    headers_of,
    picked,
    refusal,
    request_piece,
    served_of,
    subset_of,
)
from fleet.adapters.grpc_calls import Context, answered, parse, send, serialize
from fleet.adapters.grpc_options import client_options
from fleet.adapters.grpc_port import open_port
from fleet.adapters.grpc_selection import MAX_REPORTED, Booking, SelectionService
from fleet.adapters.openai_requests import NAMES, read_chat, read_completion
from fleet.adapters.relay import CHAT, COMPLETIONS, EMBEDDINGS, PATHS, Relay
from fleet.adapters.status import renamed
from fleet.clock import SECOND, Clock, Nanos
from fleet.errors import Reason, Refused, invalid
from fleet.ids import RequestId, WorkerId
from fleet.requests import ModelCard
from fleet.roles import Placement, Role
from fleet.router.generation import Generation
from fleet.router.messages import Arrived
from fleet.router.picker_settings import EndpointPickerSettings, endpoint_of
from fleet.router.snapshot import RouterSnapshot
from fleet.router.tenants import Tenants
from fleet.v1 import ext_proc_pb2 as pb

LIVENESS, READINESS = "liveness", "readiness"
KNOWN_ADDRESSES = 4096
TAIL_BYTES = 512  # of an answer, in which its usage stands
SERVING = "serving"
DEFAULT_PORTS = {"http": 80, "https": 443}

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*([0-9]{1,9})(?![0-9])')
_EVENT = b"data: {"


class Router(Protocol):
    """What is needed of `fleet.router.server.RouterServer`."""

    def models(self) -> tuple[ModelCard, ...]: ...

    def addresses(self) -> Mapping[WorkerId, str]: ...

    def status(self) -> RouterSnapshot: ...


class Prompts(Protocol):
    """Reads requests."""

    async def arrival(self, path: str, body: bytes, authorization: str) -> Arrived:
        """What the router has to know of a request.

        Args:
            path: One of `fleet.adapters.relay.PATHS`.
            body: Whole.
            authorization: What the client sent to prove its tenant.

        Raises:
            Refused: It is not to be placed.
        """
        ...

    def answered(self, tenant: str, tokens: int) -> None:
        """A tenant has got so many."""
        ...


class Standing(Protocol):
    """Of this picker, among several that do not know of each other's bookings."""

    def leads(self) -> bool:
        """Whether gateways are to ask this one."""
        ...

    def follows(self) -> bool:
        """Whether another one leads, as far as is known."""
        ...

    async def resign(self) -> None:
        """Have another one lead from now on; takes a few seconds at most."""
        ...


class Alone:
    """There is no other. Implements `Standing`."""

    def leads(self) -> bool:
        return True

    def follows(self) -> bool:
        return False

    async def resign(self) -> None:
        """To nobody."""


class RoutersPrompts:
    """Those that the router's own HTTP API takes. Implements `Prompts`."""

    def __init__(self, generation: Generation, relay: Relay | None, tenants: Tenants, clock: Clock) -> None:
        self._generation = generation
        self._relay = relay
        self._tenants = tenants
        self._clock = clock

    async def arrival(self, path: str, body: bytes, authorization: str) -> Arrived:
        request_id = RequestId(f"pick-{secrets.token_hex(8)}")
        if self._relay is not None:
            arrived = await self._relay.arrival(path, body, request_id, authorization)
            if arrived is not None:
                return arrived
        if path == EMBEDDINGS:
            raise invalid("model", "no model here gives embeddings")
        read = read_chat if path == CHAT else read_completion
        asked = read(body, request_id, self._clock.now())
        try:
            return await self._generation.arrival(asked.request, authorization)
        except Refused as refused:
            raise renamed(refused, asked.names) from refused

    def answered(self, tenant: str, tokens: int) -> None:
        self._tenants.used(tenant, tokens, self._clock.now())


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
    server = grpc.aio.server(options=client_options(shared=shared, connection_seconds=connection_seconds))
    picker.add(server)
    async with open_port(
        server, settings.listen, (READINESS, SERVICE), picker.ready, alive=(LIVENESS,)
    ) as picker.address:
        yield picker


class EndpointPicker:
    """Serves any number of gateways."""

    def __init__(
        self,
        settings: EndpointPickerSettings,
        router: Router,
        selection: SelectionService,
        prompts: Prompts,
        standing: Standing | None = None,
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
        self.settings = settings
        self.selection = selection
        self.prompts = prompts
        self.held_bytes = 0  # of bodies
        self._own_endpoint = settings.own_endpoint
        self._router = router
        self._standing = standing or Alone()
        self._draining = False
        self._calls = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def add(self, server: grpc.aio.Server) -> None:
        stream: Any = grpc.stream_stream_rpc_method_handler  # the stubs know no coroutines
        methods = {"Process": stream(self._process, response_serializer=serialize)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    def ready(self) -> bool:
        """Whether a request sent now would find a worker."""
        return self._standing.leads() and not self._draining and bool(self._router.models())

    async def drain(self, within: Nanos) -> None:
        """Say that this picker is going away, and wait for the answers that pass. Who still asks it is answered: gateways hear of it later."""
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(within / SECOND):
                await self._standing.resign()
                await self._quiet.wait()

    def endpoints(self, subset: Sequence[str] | None) -> dict[WorkerId, str]:
        """The workers that may be picked, with their endpoints.

        Raises:
            Refused: There is none.
        """
        port = self.settings.target_port
        every = {worker_id: endpoint_at(address, port) for worker_id, address in self._router.addresses().items()}
        allowed = None if subset is None else set(subset)
        found = {
            worker_id: endpoint
            for worker_id, endpoint in every.items()
            if endpoint and (allowed is None or endpoint in allowed)
        }
        if not found:
            raise self.nobody(subset)
        return found

    def allowed(self, endpoints: Mapping[WorkerId, str]) -> tuple[WorkerId, ...] | None:
        """Which workers may take part; None: all."""
        return None if len(endpoints) == len(self._router.addresses()) else tuple(endpoints)

    def any_endpoint(self, subset: Sequence[str] | None) -> str:
        """The one with the fewest requests (rule 5).

        Raises:
            Refused: There is none.
        """
        endpoints = self.endpoints(subset)
        answering = [
            worker
            for pool in self._router.status().pools
            if pool.role is not Role.PREFILL
            for worker in pool.workers
            if worker.worker_id in endpoints and worker.state == SERVING
        ]
        if not answering:
            raise self.nobody(subset)
        return endpoints[min(answering, key=lambda each: each.booked_requests + each.booked_elsewhere).worker_id]

    def own_endpoint(self, subset: Sequence[str] | None) -> str:
        """The router's own, where requests are placed when they come.

        Raises:
            Refused: It may not be picked, or has no worker.
        """
        endpoint = self._own_endpoint
        if not self.ready() or (subset is not None and endpoint not in subset):
            raise self.nobody(subset)
        return endpoint

    def check(self) -> None:
        """Let a request in.

        Raises:
            Refused: DRAINING; another picker has to be asked.
        """
        if self._standing.follows() and not self._draining:
            raise Refused(
                Reason.DRAINING, "this endpoint picker is a follower; ask the one that is ready", retry_after_ms=1
            )

    def nobody(self, subset: Sequence[str] | None) -> Refused:
        """Why a request goes nowhere."""
        cause = "no endpoint is ready"
        if subset is not None:
            cause = f"none of the {len(subset)} endpoints that the gateway allows is ready"
        return Refused(Reason.NO_WORKER, f"{cause}; retry when one is", retry_after_ms=self.settings.retry_after_ms)

    async def _process(self, messages: AsyncIterator[bytes], context: Context) -> None:
        await answered(self._serve(messages, context), context)

    async def _serve(self, messages: AsyncIterator[bytes], context: Context) -> None:
        self._calls += 1
        self._quiet.clear()
        call = _Call(self)
        try:
            await call.run(messages, context)
        finally:
            call.end()
            self._calls -= 1
            if not self._calls:
                self._quiet.set()


class Stage(Enum):
    """Of one HTTP request, as its gateway tells it."""

    NEW = auto()
    BODY = auto()  # of the request
    SENT = auto()  # to its endpoint
    ANSWER = auto()  # its body
    OVER = auto()


TAKEN: Mapping[Stage, frozenset[str]] = {
    Stage.NEW: frozenset({"request_headers"}),
    # An answer may come before a request has: one of the gateway's own.
    Stage.BODY: frozenset({"request_body", "request_trailers", "response_headers"}),
    Stage.SENT: frozenset({"response_headers"}),
    Stage.ANSWER: frozenset({"response_body", "response_trailers"}),
    Stage.OVER: frozenset(),
}
"""What may come at each stage."""

Answers = list[pb.ProcessingResponse]


class _Call:
    """One HTTP request and its answer."""

    def __init__(self, picker: EndpointPicker) -> None:
        self._picker = picker
        self._stage = Stage.NEW
        self._due = asyncio.get_running_loop().time() + picker.settings.body_seconds
        self._refused = False
        self._own = False  # goes to the router itself, as it comes
        self._streamed = True  # whether the gateway passes on what it is sent of an answer
        self._tells_answer = True
        self._path = ""
        self._authorization = ""
        self._subset: tuple[str, ...] | None = None
        self._body = bytearray()
        self._endpoint = ""  # picked
        self._arrived: Arrived | None = None
        self._booking: Booking | None = None
        self._counter: AnswerCounter | None = None

    async def run(self, messages: AsyncIterator[bytes], context: Context) -> None:
        """Serve it.

        Raises:
            Refused: INVALID_ARGUMENT; the gateway has broken the protocol.
        """
        coming = aiter(messages)
        while not self._refused:
            try:
                content = await self._next(coming)
            except TimeoutError:
                await send(context, refusal(self._late()))
                return
            if content is None:
                return
            message = parse(pb.ProcessingRequest, content)
            if message.observability_mode:
                continue  # nothing that is said here counts
            for response in await self._heard(message):
                await send(context, response)

    def end(self) -> None:
        """Whatever was booked is given back."""
        self._let_go()
        if self._booking is not None:
            self._picker.selection.end(self._booking)
            self._booking = None
        if self._counter is not None and self._counter.tokens and self._arrived is not None:
            self._picker.prompts.answered(self._arrived.tenant, self._counter.tokens)
            self._counter = None

    async def _next(self, messages: AsyncIterator[bytes]) -> bytes | None:
        """What comes next; None: the gateway has ended the call.

        Raises:
            TimeoutError: The request was due.
        """
        async with asyncio.timeout_at(self._due if self._stage in (Stage.NEW, Stage.BODY) else None):
            return await anext(messages, None)

    def _late(self) -> Refused:
        seconds = self._picker.settings.body_seconds
        return Refused(Reason.DEADLINE_PASSED, f"the request was not whole within {seconds:g} s; send it faster")

    async def _heard(self, message: pb.ProcessingRequest) -> Answers:
        kind = message.WhichOneof("request") or "nothing"
        if kind not in TAKEN[self._stage]:
            taken = " or ".join(sorted(TAKEN[self._stage])) or "the end of the call"
            raise invalid("request", f"{kind} came where {taken} was due")
        try:
            match kind:
                case "request_headers":
                    return self._begin(message)
                case "request_body":
                    return await self._took(message.request_body)
                case "request_trailers":
                    last = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
                    return [*await self._whole(ends=False), last]
                case "response_headers":
                    return self._answer_begins(message)
                case "response_body":
                    return self._answer_goes_on(message.response_body)
                case _:
                    self._stage = Stage.OVER
                    self.end()
                    return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        except Refused as refused:
            self._refused = True
            self._let_go()
            return [refusal(refused)]

    # The request

    def _begin(self, message: pb.ProcessingRequest) -> Answers:
        headers = headers_of(message.request_headers, (":path", "authorization"))
        self._path = _api_path(headers.get(":path", ""))
        self._authorization = headers.get("authorization", "")
        self._subset = subset_of(message)
        self._stage = Stage.BODY
        whole = message.request_headers.end_of_stream
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            if not whole and modes.request_body_mode != pb.FULL_DUPLEX_STREAMED:
                raise Refused(Reason.INTERNAL, "the gateway must send request bodies FULL_DUPLEX_STREAMED")
            self._streamed = modes.response_body_mode == pb.FULL_DUPLEX_STREAMED
            self._tells_answer = modes.response_body_mode != pb.NONE
        self._picker.check()
        if self._picker.settings.router_endpoint:
            self._own = True
            self._stage = Stage.SENT if whole else Stage.BODY
            return [picked([self._picker.own_endpoint(self._subset)], "", None)]
        if whole:
            self._stage = Stage.SENT
            return [picked([self._picker.any_endpoint(self._subset)], "", None)]
        return []

    async def _took(self, piece: pb.HttpBody) -> Answers:
        """A part of the body."""
        if self._own:
            self._stage = Stage.SENT if piece.end_of_stream else Stage.BODY
            return [request_piece(piece)]
        picker = self._picker
        if len(self._body) + len(piece.body) > picker.settings.max_body_bytes:
            raise Refused(
                Reason.TOO_LARGE, f"the body has more than the {picker.settings.max_body_bytes} bytes that are taken"
            )
        if picker.held_bytes + len(piece.body) > picker.settings.max_held_bytes:
            raise Refused(
                Reason.QUEUE_FULL,
                "too many long requests come at once",
                retry_after_ms=picker.settings.retry_after_ms,
            )
        picker.held_bytes += len(piece.body)
        self._body += piece.body
        return await self._whole(ends=True) if piece.end_of_stream else []

    async def _whole(self, *, ends: bool) -> Answers:
        """The body is there: place the request.

        Args:
            ends: Whether no trailers follow.

        Raises:
            Refused: It goes nowhere.
        """
        if self._own:
            self._stage = Stage.SENT
            return []
        body = bytes(self._body)
        if self._path in PATHS:
            endpoints, prefill = await self._place(body)
        else:
            endpoints, prefill = [self._picker.any_endpoint(self._subset)], ""
        self._let_go()
        self._stage = Stage.SENT
        return [picked(endpoints, prefill, len(body) if ends else None), *body_pieces(body, ends=ends)]

    async def _place(self, body: bytes) -> tuple[list[str], str]:
        """Endpoints, the best first, and the prefill worker's."""
        picker, settings = self._picker, self._picker.settings
        arrived = await picker.prompts.arrival(self._path, body, self._authorization)
        endpoints = picker.endpoints(self._subset)
        self._arrived = arrived = structs.replace(arrived, among=picker.allowed(endpoints))
        try:
            self._booking, decision = await picker.selection.book(
                arrived, lease_seconds=settings.lease_seconds, wait_seconds=settings.wait_seconds
            )
        except TimeoutError:
            raise Refused(
                Reason.QUEUE_FULL,
                f"all workers have been busy for {settings.wait_seconds:g} s; retry later",
                retry_after_ms=settings.retry_after_ms,
            ) from None
        except Refused as refused:
            raise renamed(refused, NAMES) from refused
        self._counter = AnswerCounter()
        chosen = [decision.decode, *([] if decision.prefill is None else [decision.prefill])]
        if not all(each in endpoints for each in chosen):  # has joined while the request waited
            endpoints = picker.endpoints(self._subset)
            if not all(each in endpoints for each in chosen):
                raise picker.nobody(self._subset)
        self._endpoint = endpoints[decision.decode]
        if decision.prefill is not None:
            # Whoever else might answer need not fit together with that one.
            return [self._endpoint], endpoints[decision.prefill]
        others = decision.next_best(settings.fallbacks) if settings.fallbacks else ()
        return [self._endpoint, *(endpoints[each] for each in others if each in endpoints)], ""

    def _let_go(self) -> None:
        """Of the body."""
        self._picker.held_bytes -= len(self._body)
        self._body = bytearray()

    # The answer

    def _answer_begins(self, message: pb.ProcessingRequest) -> Answers:
        self._let_go()
        served = served_of(message)
        if self._booking is not None and served and served != self._endpoint:
            self._move(served)
        if message.response_headers.end_of_stream:
            self._stage = Stage.OVER
            self.end()
        else:
            self._stage = Stage.ANSWER
            if self._counter is not None:
                headers = headers_of(message.response_headers, ("content-type",))
                self._counter.events = headers.get("content-type", "").startswith("text/event-stream")
            if not self._tells_answer:
                self._report(prefilled=True)
        return [pb.ProcessingResponse(response_headers=pb.HeadersResponse())]

    def _answer_goes_on(self, piece: pb.HttpBody) -> Answers:
        response = answer_piece(piece, streamed=self._streamed)
        if self._counter is not None:
            self._report(prefilled=bool(piece.body), tokens=self._counter.count(piece.body))
        if piece.end_of_stream:
            self._stage = Stage.OVER
            self.end()
        return [response]

    def _report(self, *, prefilled: bool, tokens: int = 0) -> None:
        if self._booking is not None:
            told = min(tokens, MAX_REPORTED)  # a server may say any number
            if not self._picker.selection.report(self._booking, prefilled=prefilled, answer_tokens=told):
                self._booking = None

    def _move(self, served: str) -> None:
        """Book where the answer comes from, and nowhere else (rule 4)."""
        picker = self._picker
        assert self._arrived is not None
        if self._booking is not None:
            picker.selection.end(self._booking)
            self._booking = None
        try:
            (there,) = picker.endpoints([served])
        except (Refused, ValueError):
            return  # none of ours, or several behind one port
        self._arrived = structs.replace(
            self._arrived,
            request_id=RequestId(f"pick-{secrets.token_hex(8)}"),
            pin=there,
            among=None,
            labels=(),
            placement=Placement.AGGREGATED,
        )
        with suppress(Refused):
            self._booking = picker.selection.book_now(self._arrived, lease_seconds=picker.settings.lease_seconds)


class AnswerCounter:
    """Tokens of an answer, roughly: its events where it is streamed, else what its usage says."""

    def __init__(self) -> None:
        self.events = False
        self.tokens = 0
        self._tail = b""

    def count(self, piece: bytes) -> int:
        """Those that are new with this piece."""
        text = self._tail + piece
        if self.events:
            new = text.count(_EVENT)
            # What may be the beginning of the next mark, and none that was counted.
            self._tail = text[-(len(_EVENT) - 1) :]
        else:
            said = _COMPLETION_TOKENS.findall(text)
            new = max(0, int(said[-1]) - self.tokens) if said else 0
            self._tail = text[-TAIL_BYTES:]
        self.tokens += new
        return new


def _api_path(path: str) -> str:
    """The path of the API, whatever gateways put before it."""
    path = path.partition("?")[0]
    return next((each for each in (CHAT, COMPLETIONS, EMBEDDINGS) if path.endswith(each)), path)


@lru_cache(maxsize=KNOWN_ADDRESSES)
def endpoint_at(address: str, port: int) -> str:
    """``ip:port`` of a worker; empty where it is known by no IP address.

    Args:
        address: As the worker is known: ``host:port`` or a URL.
        port: In place of its own; 0: its own.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        return endpoint_of(parts.hostname or "", port or parts.port or DEFAULT_PORTS.get(parts.scheme, 0))
    except ValueError:
        return ""
