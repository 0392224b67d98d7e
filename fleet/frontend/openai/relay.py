"""Requests for foreign servers: read once, placed by the router, and then bytes that are passed on.

Rules:

1. A body is read for what placement needs (model, prompt, the length asked for, the object ``fleet``) and goes on as the
   client wrote it; whether the rest of it makes sense, the server knows. So does its answer, whatever its status below 500.
2. A request is submitted, placed and begun without leaving the event loop's turn in which its last byte came, unless its
   prompt is so long that tokenising it would hold up others: then a thread does that.
3. It is over once, and its bookings with it: when the last byte of the answer was passed on, when the client has gone (then
   the connection to the server is cut, which is how such servers learn it), or when the router has refused it.
4. What goes wrong before the first byte of an answer was passed on is an HTTP status of its own. After that, a stream of
   events whose last event is whole gets an event with an ``error`` object, and any other answer ends with its connection.
   The error says which server was lost, and not what another server could have done.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from msgspec import Raw, structs

from fleet.core.clock import Clock, Nanos
from fleet.core.errors import Reason, RequestRejected, internal_error
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import TOKEN_BYTES
from fleet.frontend.metrics.relay import RelayMetrics
from fleet.frontend.openai.answers import error_event
from fleet.frontend.openai.bodies import OPENAI_FIELD_NAMES
from fleet.frontend.openai.failures import send_rejection
from fleet.frontend.openai.prompt_keys import KeyedPrompt, PromptReader
from fleet.frontend.openai.rate_limit_headers import rate_limit_headers
from fleet.frontend.openai.relay_requests import (
    EMBEDDINGS,
    MAX_ANSWER_TOKENS,
    RelayRawBody,
    RelayTextBody,
    apply_fleet_options,
    passed_on,
    prompt_bytes,
    read_body,
    read_prompt,
    relay_sampling,
)
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.http.exchange import Exchange, ExchangeTask
from fleet.net.http.messages import ClientDisconnected
from fleet.net.status_codes import rename_field
from fleet.router.messages import Arrived, Complete, Emit, StartedOver
from fleet.router.server import RequestListener
from fleet.router.tenants import Tenants, admit_with_peers, await_settle

log = logging.getLogger(__name__)


class RouterApi(Protocol):
    """What is needed of `fleet.router.server.RouterServer`."""

    def open(self, arrived: Arrived, stream: RequestListener) -> None: ...

    def close(self, request_id: RequestId, stream: RequestListener) -> None: ...


class AnswerStream(Protocol):
    """An answer on its way: the connection to the server that gives it."""

    def flush(self) -> None:
        """Pass on what waits for the end of the turn, so that something else may be said."""
        ...

    def at_event_boundary(self) -> bool:
        """Whether what was passed on so far ends with a whole event, so that another one may follow."""
        ...

    def send_last_event(self, event: bytes) -> None:
        """Pass on one more event, if the answer ends with its connection and so far with a whole event."""
        ...


class RelayStage(Enum):
    READING = auto()  # in a thread
    SUBMITTED = auto()
    OVER = auto()


class RelayedRequest:
    """One request, between its client and the worker that it was placed on.

    Implements `ExchangeTask` for the client's connection and `RequestListener` for the router.
    """

    def __init__(self, relay: "Relay", exchange: Exchange, request_id: RequestId, began_at: Nanos, tenant: str) -> None:
        request = exchange.request
        head = request.head
        self._relay = relay
        self._exchange = exchange
        self._stage = RelayStage.READING
        self._began = False
        self.request_id = request_id
        self.path = head.path
        self.head = passed_on(head) if head.passed_on is None else head.passed_on
        self.authorization = b"" if relay.takes_keys else head.headers.get(b"authorization", b"")  # not ours to show
        self.body = request.body
        self.keys: Mapping[int, tuple[int, ...]] = {}  # of the prompt, by block size; not of what nobody caches
        self.began_at = began_at
        self.first_byte_at = began_at  # once an answer has begun
        self.streams = False  # the client asked for events as they come
        self.moved = False  # from a server that was silent to another one
        self.tenant = tenant
        self.flow: AnswerStream | None = None  # while an answer comes
        self.answer_tokens = 0  # passed on, roughly
        self.keeps_alive = exchange.keeps_alive  # whether the client takes another answer on its connection
        self.chunks = head.chunked_answer  # whether the client understands chunks
        self.limits = b""  # what is left of the tenant's, as headers

    @property
    def began(self) -> bool:
        """Whether a byte of an answer was passed on, so that no other server can give one."""
        return self._began

    # From the worker

    def begin(self, source: asyncio.Transport, flow: AnswerStream) -> asyncio.Transport:
        """Where the answer goes that comes from `source`, now that it begins.

        Raises:
            ClientGone: The client has just closed its connection.
        """
        client = self._exchange.relay(source)
        self._began = True
        self.flow = flow
        self._relay.first_byte(self)
        return client

    def end(self, *, keep_alive: bool) -> None:
        """The answer was passed on whole."""
        if self._stage is not RelayStage.OVER:
            self._stage = RelayStage.OVER
            self._relay.ended(self, None)
            self._exchange.relayed(keep_alive=keep_alive)

    def give_up(self, refused: RequestRejected) -> None:
        """It cannot be sent, whichever worker it is for."""
        self.refuse(refused)
        self._relay.router.close(self.request_id, self)

    # From the router

    def put(self, item: Emit | StartedOver | Complete | RequestRejected) -> None:
        """Only a refusal is news: what the others tell, was passed on before."""
        if isinstance(item, RequestRejected):
            self.refuse(rename_field(item, OPENAI_FIELD_NAMES))

    def submitted(self) -> None:
        self._stage = RelayStage.SUBMITTED

    def refuse(self, refused: RequestRejected) -> None:
        if self._stage is RelayStage.OVER:
            return
        self._stage = RelayStage.OVER
        self._relay.ended(self, refused)
        if self.flow is not None:
            self.flow.flush()
        if self._began and (self.flow is None or not self.flow.at_event_boundary()):
            if self.flow is not None:
                self.flow.send_last_event(error_event(refused))
            self._exchange.relayed(keep_alive=False)
            return
        with suppress(ClientDisconnected):
            name = self.request_id
            send_rejection(self._exchange, refused, ("x-fleet-request-id", name), ("x-request-id", name))
        if self._began:
            self._exchange.relayed(keep_alive=False)
        else:
            self._exchange.over()

    # From the client's connection

    def cancel(self) -> None:
        """The client has gone."""
        if self._stage is RelayStage.OVER:
            return
        submitted = self._stage is RelayStage.SUBMITTED
        self._stage = RelayStage.OVER
        self._relay.ended(self, RequestRejected(Reason.CANCELLED, "the client has gone"))
        if submitted:
            self._relay.router.close(self.request_id, self)
        self._exchange.over()

    @property
    def over(self) -> bool:
        return self._stage is RelayStage.OVER


class PendingRequests(Protocol):
    """Where workers find what they are told to do, see `fleet.backends.external.workers`."""

    def expect(self, relayed: RelayedRequest) -> None: ...

    def forget(self, relayed: RelayedRequest) -> None: ...


class Relay:
    """All requests for foreign servers of one router process."""

    def __init__(
        self,
        router: RouterApi,
        workers: PendingRequests,
        readers: Mapping[ModelName, PromptReader],
        tenants: Tenants,
        metrics: RelayMetrics,
        clock: Clock,
        threads: TokenizerThreads,
        *,
        id_prefix: str,
        only: bool,
    ) -> None:
        """Nothing is started.

        Args:
            router: Places requests.
            workers: Send them where they were placed.
            readers: By the models that foreign servers have.
            tenants: Who may ask for how much.
            metrics: Of relayed requests.
            clock: Times them.
            threads: For long prompts.
            id_prefix: Makes request ids those of this process.
            only: Whether there are no models besides.
        """
        self.router = router
        self._workers = workers
        self._readers = readers
        self._tenants = tenants
        self._metrics = metrics
        self._clock = clock
        self._id_prefix = id_prefix
        self._only = only
        self.takes_keys = tenants.by_key
        self._count = 0
        self._active = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._threads = threads
        self._settling: set[asyncio.Task[bool]] = set()  # requests near a limit that others share

    async def quiet(self) -> None:
        """Wait until nothing is relayed."""
        await self._quiet.wait()

    def serve(self, exchange: Exchange) -> ExchangeTask | None:
        """Begin to serve a request for one of `fleet.frontend.openai.relay_requests.PATHS`; None if it is for a model that others serve."""
        began_at = self._clock.now()
        request = exchange.request
        path = request.head.path
        try:
            body = read_body(request.body, path)
            tenant = "" if body.fleet is None else body.fleet.tenant
            if self.takes_keys:
                tenant = self._tenants.tenant(request.headers.get(b"authorization", b"").decode("latin-1"), tenant)
            reader = self._reader(body, path)
        except RequestRejected as refused:
            with suppress(ClientDisconnected):
                send_rejection(exchange, refused)
            exchange.over()
            return _FINISHED
        if reader is None:
            return None
        self._count += 1
        relayed = RelayedRequest(self, exchange, RequestId(f"{self._id_prefix}-{self._count:x}"), began_at, tenant)
        self._active += 1
        if self._active == 1:
            self._quiet.clear()
        try:
            if (
                path != EMBEDDINGS
                and len(request.body) > reader.inline_bytes
                and prompt_bytes(body) > reader.inline_bytes
            ):
                self._read_elsewhere(relayed, body, reader)
            else:
                self._submit_when_sure(relayed, body, read_prompt(body, reader, path))
        except RequestRejected as refused:
            relayed.refuse(refused)
        except Exception:  # supervisor: a bug in one request does not leave its client waiting
            log.exception("request failed", extra={"request": relayed.request_id})
            relayed.refuse(internal_error())
            self.router.close(relayed.request_id, relayed)
        return relayed

    async def arrival(self, path: str, content: bytes, request_id: RequestId, authorization: str) -> Arrived | None:
        """What the router has to know of a request that somebody else sends to its server; None: it is for a model that others serve.

        Args:
            path: One of `fleet.frontend.openai.relay_requests.PATHS`.
            content: Its body.
            request_id: What the router calls it.
            authorization: What the client sent to prove its tenant.

        Raises:
            Refused: It is not to be placed.
        """
        body = read_body(content, path)
        tenant = "" if body.fleet is None else body.fleet.tenant
        if self.takes_keys:
            tenant = self._tenants.tenant(authorization, tenant)
        if (reader := self._reader(body, path)) is None:
            return None
        if path != EMBEDDINGS and len(content) > reader.inline_bytes and prompt_bytes(body) > reader.inline_bytes:
            read = await self._threads.run(partial(read_prompt, body, reader, path), prompt_bytes(body))
        else:
            read = read_prompt(body, reader, path)
        await admit_with_peers(self._tenants, tenant, len(read.tokens) // TOKEN_BYTES, self._clock)
        arrived = self._arrived(request_id, tenant, self._clock.now(), body, read)
        return structs.replace(arrived, external=True)

    # From requests

    def first_byte(self, relayed: RelayedRequest) -> None:
        now = relayed.first_byte_at = self._clock.now()
        self._metrics.first_byte(Nanos(now - relayed.began_at))

    def ended(self, relayed: RelayedRequest, refused: RequestRejected | None) -> None:
        self._workers.forget(relayed)
        if relayed.answer_tokens:
            self._tenants.used(relayed.tenant, relayed.answer_tokens, self._clock.now())
        self._metrics.ended(None if refused is None else refused.reason, self._clock.now() - relayed.began_at)
        self._active -= 1
        if self._active == 0:
            self._quiet.set()

    # Inside

    def _reader(self, body: RelayTextBody | RelayRawBody, path: str) -> PromptReader | None:
        """The one of the model that is asked for; None if that may be somebody else's."""
        model = body.model
        readers = self._readers
        if model:
            reader = readers.get(ModelName(model))
        elif self._only and len(bases := [each for each in readers.values() if each.adapter is None]) == 1:
            (reader,) = bases
        else:
            reader = None
        if reader is None and (self._only or path == EMBEDDINGS):
            served = ", ".join(sorted(readers))
            raise RequestRejected(
                Reason.MODEL_NOT_FOUND,
                f"model: {(model or '')[:100]!r} is not served here; served: {served}",
                field="model",
            )
        return reader

    def _submit(self, relayed: RelayedRequest, body: RelayTextBody | RelayRawBody, read: KeyedPrompt) -> None:
        """Have it placed, which begins it.

        Raises:
            Refused: The tenant may not have it, the object ``fleet`` is wrong, or the router takes no requests.
        """
        relayed.keys = read.keys
        stream = body.stream
        relayed.streams = bytes(stream) == b"true" if isinstance(stream, Raw) else stream is True
        allowance = self._tenants.admit(relayed.tenant, len(read.tokens) // TOKEN_BYTES, relayed.began_at)
        if allowance is not None:
            relayed.limits = b"".join(f"\r\n{name}: {value}".encode() for name, value in rate_limit_headers(allowance))
        arrived = self._arrived(relayed.request_id, relayed.tenant, relayed.began_at, body, read)
        self._workers.expect(relayed)
        relayed.submitted()
        self.router.open(arrived, relayed)

    def _arrived(
        self, request_id: RequestId, tenant: str, began_at: Nanos, body: RelayTextBody | RelayRawBody, read: KeyedPrompt
    ) -> Arrived:
        """A request as the router hears of it.

        Raises:
            Refused: The object ``fleet`` is wrong.
        """
        arrived = Arrived(
            request_id=request_id,
            model=read.model,
            adapter=read.adapter,
            tokens=read.tokens,
            tenant=tenant,
            sampling=relay_sampling(min(body.max_completion_tokens or body.max_tokens or 1, MAX_ANSWER_TOKENS)),
            keys=read.keys,
            only_end=True,
        )
        return arrived if body.fleet is None else apply_fleet_options(arrived, body.fleet, began_at)

    def _submit_when_sure(self, relayed: RelayedRequest, body: RelayTextBody | RelayRawBody, read: KeyedPrompt) -> None:
        """Submit now, or after the other routers have heard what the tenant took here, where it is near a limit.

        Raises:
            Refused: As of `_submit`.
        """
        settle = self._tenants.settle_with_others
        tokens = len(read.tokens) // TOKEN_BYTES
        if settle is None or not self._tenants.is_unsure(relayed.tenant, tokens, self._clock.now()):
            self._submit(relayed, body, read)
            return
        settling = asyncio.get_running_loop().create_task(await_settle(settle), name="shared limits")
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

        def submit() -> None:
            again = self._submit_when_sure if settling.result() else self._submit
            again(relayed, body, read)

        self._submit_after(relayed, settling, submit)

    def _read_elsewhere(
        self, relayed: RelayedRequest, body: RelayTextBody | RelayRawBody, reader: PromptReader
    ) -> None:
        reading = self._threads.run(partial(read_prompt, body, reader, relayed.path), prompt_bytes(body))
        self._submit_after(relayed, reading, lambda: self._submit_when_sure(relayed, body, reading.result()))

    def _submit_after(
        self, relayed: RelayedRequest, waiting: "asyncio.Future[Any]", submit: Callable[[], None]
    ) -> None:
        """Submit when something is done that the request waits for, unless its client has gone by then."""

        def done(future: "asyncio.Future[Any]") -> None:
            if future.cancelled():
                return
            future.exception()  # asked for, or asyncio complains where nobody waits for the prompt any more
            if relayed.over:
                return
            try:
                submit()
            except RequestRejected as refused:
                relayed.refuse(refused)
            except Exception:  # supervisor: a tokenizer that fails on one prompt does not leave its request waiting
                log.exception("prompt not read", extra={"request": relayed.request_id})
                relayed.refuse(internal_error())

        waiting.add_done_callback(done)


class _FinishedTask:
    """Serving what is over already."""

    def cancel(self) -> None:
        """There is nothing to cancel."""


_FINISHED = _FinishedTask()
