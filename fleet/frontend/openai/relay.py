"""Relay: reads requests for external backends, lets the router place them, and forwards the bytes of requests and answers.

Rules:

1. The relay only reads the fields that placement needs (model, prompt, requested length, the object ``fleet``) and forwards
   the body unchanged. The server validates all other fields. Its answer is relayed with any status below 500, so the client
   also gets the server's own error about a wrong field.
2. A request is submitted in the same iteration of the event loop in which its last byte arrived. If a server has room,
   the request is also placed and sent in this iteration. There are two exceptions. A long prompt is tokenized in a thread first,
   because tokenizing it on the event loop would delay other requests. And a request of a tenant near a shared rate limit
   waits until the routers have exchanged their usage.
3. A request and its reservations end once: after the last byte of the answer, when the router rejects the request, or when
   the client disconnects. In the last case the connection to the server is closed, so that the server stops.
4. For a failure before the first byte of an answer, the client gets an HTTP error status. For a later failure, an event
   with an ``error`` object is appended, if the answer is a stream and its last event is complete. Otherwise the
   connection is closed.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

from msgspec import Raw, structs

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import Reason, RequestRejected, internal_error
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import TOKEN_BYTES, RateLimitStatus
from fleet.core.telemetry import CHAT as OPERATION_CHAT
from fleet.core.telemetry import COMPLETION, SCORE
from fleet.core.telemetry import EMBEDDINGS as OPERATION_EMBEDDINGS
from fleet.frontend.access_log import AccessLog
from fleet.frontend.metrics.relay import RelayedRequests, RelayMetrics
from fleet.frontend.openai.bodies import HINT_HEADER_NAMES, OPENAI_FIELD_NAMES, header_hints
from fleet.frontend.openai.passage import Passage
from fleet.frontend.openai.prompt_keys import KeyedPrompt, PromptReader
from fleet.frontend.openai.relay_requests import (
    MAX_ANSWER_TOKENS,
    RelayRawBody,
    RelayTextBody,
    apply_fleet_options,
    client_credentials,
    forwarded_headers,
    prompt_bytes,
    read_body,
    read_prompt,
    relay_sampling,
)
from fleet.frontend.openai.relayed_paths import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    GENERATING,
    MESSAGES,
    PLACED,
    POOLING,
    RERANK_PATHS,
    RESPONSES,
    SCORE_PATHS,
    PathClass,
    RelayedPaths,
)
from fleet.frontend.openai.requests import authorization_of, bearer_of_key, new_request_id
from fleet.frontend.request_tracing import RequestEnd, RequestTrace, RequestTracing, TracedRequest
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.http.errors import ANTHROPIC_ERRORS, OPENAI_ERRORS, RESPONSES_ERRORS, ErrorForm, send_rejection
from fleet.net.http.exchange import REQUEST_ID_HEADER, ClientDisconnected, Exchange, ExchangeTask, rate_limit_headers
from fleet.net.status_codes import rename_field
from fleet.router.api import RouterApi
from fleet.router.messages import Arrived, Complete, Emit, StartedOver
from fleet.router.tenants import Tenants, admit_with_peers, await_settle
from kvstore.tracing.context import TraceContext, traceparent_of

log = logging.getLogger(__name__)

ERROR_FORMS: Mapping[str, ErrorForm] = {
    RESPONSES: RESPONSES_ERRORS,
    MESSAGES: ANTHROPIC_ERRORS,
    COUNT_TOKENS: ANTHROPIC_ERRORS,
}
"""Form of error answers by path, for paths whose form differs from that of completions and chats."""

OPERATIONS: Mapping[str, str] = {
    CHAT: OPERATION_CHAT,
    RESPONSES: OPERATION_CHAT,
    MESSAGES: OPERATION_CHAT,
    COMPLETIONS: COMPLETION,
    EMBEDDINGS: OPERATION_EMBEDDINGS,
    **dict.fromkeys((*RERANK_PATHS, *SCORE_PATHS, CLASSIFY), SCORE),
}
"""Names of operations by path, for metrics and traces. `operation_of` gives the same names to requests for Fleet's own workers.
For any other path, the name is the path without its first slash."""

OWN_PATHS = frozenset(
    {
        CHAT,
        COMPLETIONS,
        RESPONSES,
        MESSAGES,
        COUNT_TOKENS,
        EMBEDDINGS,
        *RERANK_PATHS,
        *SCORE_PATHS,
        CLASSIFY,
        POOLING,
        "/tokenize",
        "/detokenize",
    }
)
"""Paths at which Fleet's own workers may serve a model.

At other paths, `Relay.serve` rejects unknown models immediately.
"""


class AnswerStream(Protocol):
    """Port to the connection to a server, over which an answer is arriving."""

    def flush(self) -> None:
        """Send now the bytes that wait for the end of the event loop's iteration, so that other bytes can be sent after them."""
        ...

    def at_event_boundary(self) -> bool:
        """Return whether the relayed bytes end with a whole event, so that another event may follow."""
        ...

    def send_last_event(self, event: bytes) -> None:
        """Append an event to the answer if this is possible; otherwise do nothing.

        It is possible if the answer is a stream whose last event is complete, and whose end is marked by the end of the
        connection. The method checks this itself.
        """
        ...


class RelayStage(Enum):
    READING = auto()  # not submitted to the router yet, for example because a thread still tokenizes the prompt
    SUBMITTED = auto()
    OVER = auto()


_TRACE_LINES = re.compile(rb"^trace(?:parent|state): [^\r]*\r\n", re.MULTILINE)

# Module variables, because reading an enum member takes longer.
_READING, _SUBMITTED, _OVER = RelayStage.READING, RelayStage.SUBMITTED, RelayStage.OVER


class RelayedRequest:
    """Holds one relayed request. The client's connection, the server's connection and the router call its methods.

    Implements `ExchangeTask` for the client's connection and `RequestListener` for the router.
    """

    def __init__(
        self,
        relay: "Relay",
        exchange: Exchange,
        request_id: RequestId,
        began_at: Nanos,
        tenant: str,
        counts: RelayedRequests,
    ) -> None:
        request = exchange.request
        head = request.head
        self._relay = relay
        self._exchange = exchange
        self._stage = _READING
        self._began = False
        self.request_id = request_id
        self.path = head.path
        self.head = forwarded_headers(head) if head.forwarded_headers is None else head.forwarded_headers
        self.query = head.query
        # If clients authenticate to this router by a key, the key is not forwarded to servers.
        self.credentials = b"" if relay.takes_keys else head.credentials
        self.body = request.body
        self._errors = ERROR_FORMS.get(head.path, OPENAI_ERRORS)
        # Block keys by block size; no keys if no server caches the prompt.
        self.keys: Mapping[int, tuple[int, ...]] = {}
        self.began_at = began_at
        self.first_byte_at = began_at  # updated when the answer begins
        self.streams = False  # True if the client wants a stream
        self.moved = False  # True after the request was taken from a silent server, to be sent to another one
        self.tenant = tenant
        self.counts = counts
        self.flow: AnswerStream | None = None  # the connection over which the answer arrives; None before it begins
        self.answer_tokens = 0  # approximate number of tokens relayed so far
        self.keeps_alive = exchange.keeps_alive  # whether the client may send another request on its connection
        self.chunks = head.chunked_answer  # whether the client understands the transfer encoding "chunked"
        # What was left of the tenant's rate limits after admission; None: the request is not admitted yet, or has no such limits.
        self.allowance: RateLimitStatus | None = None
        self.trace: RequestTrace | None = None  # None: the request is not traced

    def send_trace(self, context: TraceContext) -> None:
        """Replace the client's trace headers, so that the server's spans become children of the router's span."""
        state = b"" if not context.state else b"tracestate: " + context.state.encode() + b"\r\n"
        own = b"traceparent: " + traceparent_of(context).encode() + b"\r\n"
        self.head = _TRACE_LINES.sub(b"", self.head) + own + state

    @property
    def limits(self) -> bytes:
        """The rate limit headers of the tenant, each after a line break."""
        return b"".join(f"\r\n{name}: {value}".encode() for name, value in rate_limit_headers(self.allowance))

    @property
    def began(self) -> bool:
        """True once a byte of an answer was relayed; from then on no other server can answer the request."""
        return self._began

    # Called by `fleet.backends.external`

    def begin(self, source: asyncio.Transport, flow: AnswerStream) -> asyncio.Transport:
        """Begin to relay the answer that arrives over `source`; return the transport to the client.

        Raises:
            ClientDisconnected: The client has just closed its connection.
        """
        client = self._exchange.relay(source)
        self._began = True
        self.flow = flow
        self._relay.first_byte(self)
        return client

    def end(self, *, keep_alive: bool) -> None:
        """Note that the answer was relayed completely. Without `keep_alive`, the client's connection is closed after it."""
        if self._stage is not _OVER:
            self._stage = _OVER
            self._relay.ended(self, None)
            self._exchange.relayed(keep_alive=keep_alive)

    def give_up(self, refused: RequestRejected) -> None:
        """Reject the request, because it cannot be sent to any server."""
        self.refuse(refused)
        self._relay.router.close(self.request_id, self)

    # Called by the router

    def put(self, item: Emit | StartedOver | Complete | RequestRejected) -> None:
        """Take an item from the router.

        Only a rejection has an effect, because answers are relayed without the router.
        """
        if isinstance(item, RequestRejected):
            self.refuse(rename_field(item, OPENAI_FIELD_NAMES))

    def submitted(self) -> None:
        self._stage = _SUBMITTED

    def refuse(self, refused: RequestRejected) -> None:
        if self._stage is _OVER:
            return
        self._stage = _OVER
        self._relay.ended(self, refused)
        if self.flow is not None:
            self.flow.flush()
        if self._began and (self.flow is None or not self.flow.at_event_boundary()):
            if self.flow is not None:
                self.flow.send_last_event(self._errors.event(refused, None))
            self._exchange.relayed(keep_alive=False)
            return
        with suppress(ClientDisconnected):
            name = self.request_id
            named = (("x-fleet-request-id", name), *self._exchange.id_headers(name))
            send_rejection(self._exchange, refused.with_allowance(self.allowance), *named, form=self._errors)
        if self._began:
            self._exchange.relayed(keep_alive=False)
        else:
            self._exchange.finish()

    # Called by the client's connection

    def cancel(self) -> None:
        """End the request, because the client has disconnected."""
        if self._stage is _OVER:
            return
        submitted = self._stage is _SUBMITTED
        self._stage = _OVER
        self._relay.ended(self, RequestRejected(Reason.CANCELLED, "the client has gone"))
        if submitted:
            self._relay.router.close(self.request_id, self)
        self._exchange.finish()

    @property
    def over(self) -> bool:
        return self._stage is _OVER


class PendingRequests(Protocol):
    """Port to `fleet.backends.external.workers`: it keeps submitted requests until the router sends them to a server."""

    def expect(self, relayed: RelayedRequest) -> None: ...

    def forget(self, relayed: RelayedRequest) -> None: ...

    async def model_objects(self) -> Mapping[ModelName, Mapping[str, object]]:
        """Return the model objects that the external servers list, by the model's name."""
        ...

    async def carry(self, passage: Passage, model: ModelName | None) -> None:
        """Forward a passage to a server of `model`, or to any server if `model` is None, and its answer to the client.

        Raises:
            RequestRejected: No server can take the passage, or the passage failed.
        """
        ...


class Relay:
    """Serves all requests of one router process for external backends."""

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
        paths: RelayedPaths,
        is_running: Callable[[RequestId], bool],
        named_ids: set[RequestId],
        access: AccessLog | None = None,
        tracing: RequestTracing | None = None,
    ) -> None:
        """Create the relay.

        Args:
            router: Places requests.
            workers: Sends placed requests to their servers.
            readers: Prompt reader of each model of the external backends, by name.
            tenants: API keys and rate limits of tenants.
            metrics: Counts relayed requests.
            clock: Clock for deadlines and durations.
            threads: Threads in which long prompts are tokenized.
            id_prefix: Prefix of this process for request ids.
            only: Whether the router serves external backends alone, and no workers of Fleet.
            paths: The paths that clients may reach.
            is_running: Returns whether a running request, relayed or not, has a given id.
            named_ids: Set in which the relay keeps the ids of running requests whose clients sent an id. `is_running` looks
                into this set, too.
            access: The access log; None if there is none.
            tracing: Traces requests; None if they are not traced.
        """
        self.router = router
        self._workers = workers
        self._readers = readers
        self._tenants = tenants
        self._metrics = metrics
        self._clock = clock
        self._id_prefix = id_prefix
        self._only = only
        self._access = access
        self._tracing = tracing
        self._is_running = is_running
        self._named_ids = named_ids
        self.paths = paths
        self.placed = frozenset({CHAT, COMPLETIONS, EMBEDDINGS}).union(
            path for path in PLACED if paths.classify(path) is PathClass.RELAYED
        )
        """The paths whose POST requests `serve` takes."""
        self.takes_keys = tenants.by_key
        self._count = 0
        self._active = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._threads = threads
        for reader in readers.values():  # chats and completions are in the metrics, with 0, before their first request
            metrics.begin(reader.model, OPERATION_CHAT)
            metrics.begin(reader.model, COMPLETION)
        # Running exchanges of usage with peer routers, for tenants near a shared rate limit. The set keeps the tasks alive.
        self._settling: set[asyncio.Task[bool]] = set()

    async def quiet(self) -> None:
        """Wait until all requests that `serve` has accepted have ended. Passages are not waited for."""
        await self._quiet.wait()

    def serve(self, exchange: Exchange) -> ExchangeTask | None:
        """Start to serve a POST request for one of the paths `placed`.

        Return None if no external server has the model of the request; Fleet's own workers may then serve it.
        """
        began_at = self._clock.now()
        request = exchange.request
        path = request.head.path
        try:
            sent = known = ""
            if self.takes_keys:  # checked first, so that a client without a key gets no error about its body
                sent = (request.headers.get(b"authorization") or bearer_of_key(request.headers)).decode("latin-1")
                known = self._tenants.tenant(sent, "")
            body = read_body(request.body, path)
            if not HINT_HEADER_NAMES.isdisjoint(request.head.headers):
                body.fleet, _ = header_hints(request.head.headers, body.fleet)
            tenant = "" if body.fleet is None else body.fleet.tenant
            if self.takes_keys:
                tenant = self._tenants.tenant(sent, tenant) if tenant else known
            reader = self._reader(body, path)
        except RequestRejected as refused:
            with suppress(ClientDisconnected):
                send_rejection(exchange, refused, form=ERROR_FORMS.get(path))
            exchange.finish()
            return _FINISHED
        if reader is None:
            return None
        self._count += 1
        operation = OPERATIONS.get(path) or path.removeprefix("/")
        counts = self._metrics.requests.get((reader.model, operation)) or self._metrics.begin(reader.model, operation)
        request_id = RequestId(f"{self._id_prefix}-{self._count:x}")
        if REQUEST_ID_HEADER in request.headers:
            request_id = new_request_id(request.headers, self._is_running, request_id)
            self._named_ids.add(request_id)
        relayed = RelayedRequest(self, exchange, request_id, began_at, tenant, counts)
        self._active += 1
        if self._active == 1:
            self._quiet.clear()
        if self._tracing is not None:
            relayed.trace = self._begin_trace(self._tracing, relayed, body, request.headers)
        try:
            if (
                path in GENERATING
                and len(request.body) > reader.inline_bytes
                and prompt_bytes(body) > reader.inline_bytes
            ):
                self._read_elsewhere(relayed, body, reader)
            else:
                self._submit_when_sure(relayed, body, read_prompt(body, reader, path, request.body))
        except RequestRejected as refused:
            relayed.refuse(refused)
        except Exception:  # supervisor: after a bug the client gets an error instead of waiting
            log.exception("request failed", extra={"request": relayed.request_id})
            relayed.refuse(internal_error())
            self.router.close(relayed.request_id, relayed)
        return relayed

    async def model_objects(self) -> Mapping[ModelName, Mapping[str, object]]:
        """Return the model objects that the external servers list, by the model's name."""
        return await self._workers.model_objects()

    async def pass_through(self, exchange: Exchange) -> None:
        """Serve a passage: forward the request while it arrives, and then the answer.

        Raises:
            RequestRejected: The request failed before any part of an answer was forwarded.
        """
        head = exchange.request.head
        reason: Reason | None = Reason.INTERNAL
        model: ModelName | None = None
        try:
            tenant = self._tenants.tenant(authorization_of(head.headers), "") if self.takes_keys else ""
            allowance = await admit_with_peers(self._tenants, tenant, 0, self._clock)
            self._count += 1
            passage = Passage(
                exchange,
                RequestId(f"{self._id_prefix}-{self._count:x}"),
                b"" if self.takes_keys else client_credentials(head),
                rate_limit_headers(allowance),
            )
            model = await self._model_of(passage)
            await self._workers.carry(passage, model)
            reason = None
        except RequestRejected as refused:
            reason = refused.reason
            if not exchange.began:  # after the answer has begun, only the closed connection can show the failure
                raise
        except (ClientDisconnected, asyncio.CancelledError):
            reason = Reason.CANCELLED
            raise
        finally:
            self._metrics.passed(model, reason)

    async def arrival(self, path: str, content: bytes, request_id: RequestId, authorization: str) -> Arrived | None:
        """Return the router's event for an external request, which a proxy sends to its server.

        Return None if no external server has the model of the request.

        `path` is one of `relayed_paths.PLACED`; `authorization` is the client's key as ``Bearer KEY``, or empty.

        Raises:
            RequestRejected: The API key is wrong, the request is invalid or over a limit of its tenant, the model is not served at this
                path, or too many long prompts wait for the tokenizer threads.
        """
        known = self._tenants.tenant(authorization, "")
        body = read_body(content, path)
        tenant = "" if body.fleet is None else body.fleet.tenant
        tenant = self._tenants.tenant(authorization, tenant) if tenant else known
        if (reader := self._reader(body, path)) is None:
            return None
        if path in GENERATING and len(content) > reader.inline_bytes and prompt_bytes(body) > reader.inline_bytes:
            read = await self._threads.run(partial(read_prompt, body, reader, path, content), prompt_bytes(body))
        else:
            read = read_prompt(body, reader, path, content)
        await admit_with_peers(self._tenants, tenant, len(read.tokens) // TOKEN_BYTES, self._clock)
        arrived = self._arrived(request_id, tenant, self._clock.now(), body, read)
        return structs.replace(arrived, external=True)

    # Called by `RelayedRequest`

    def first_byte(self, relayed: RelayedRequest) -> None:
        now = relayed.first_byte_at = self._clock.now()
        relayed.counts.first_byte.observe((now - relayed.began_at) / SECOND)

    def ended(self, relayed: RelayedRequest, refused: RequestRejected | None) -> None:
        self._workers.forget(relayed)
        self._named_ids.discard(relayed.request_id)
        now = self._clock.now()
        if relayed.answer_tokens and self._tenants.exist:
            self._tenants.used(relayed.tenant, relayed.answer_tokens, now)
        if self._access is not None:
            self._access.relayed(
                relayed.request_id,
                model=relayed.counts.model,
                operation=relayed.counts.operation,
                tenant=relayed.tenant,
                stream=relayed.streams,
                reason=None if refused is None else refused.reason,
                answer_tokens=relayed.answer_tokens,
                began_at=relayed.began_at,
                first_byte_at=relayed.first_byte_at if relayed.began else None,
                trace_id="" if relayed.trace is None else relayed.trace.trace_id,
            )
        if relayed.trace is not None:
            first = relayed.first_byte_at if relayed.began else None
            outcome = None if refused is None else refused.reason
            relayed.trace.ended(RequestEnd(outcome=outcome, first_token=first))
        answered = refused is None or relayed.flow is not None
        relayed.counts.ended(None if refused is None else refused.reason, now - relayed.began_at, answered=answered)
        self._active -= 1
        if self._active == 0:
            self._quiet.set()

    # Internal

    @staticmethod
    def _begin_trace(
        tracing: RequestTracing,
        relayed: RelayedRequest,
        body: RelayTextBody | RelayRawBody,
        headers: Mapping[bytes, bytes],
    ) -> RequestTrace:
        request = TracedRequest(
            id=relayed.request_id,
            operation=relayed.counts.operation,
            model=body.model or "",
            stream=_streams(body),
            context=tracing.read(headers),
            tenant=relayed.tenant,
        )
        trace = tracing.begin(request, relayed.began_at)
        trace.follow(request)
        return trace

    async def _model_of(self, passage: Passage) -> ModelName | None:
        """Return the model whose servers may take a passage; None if any server may.

        Raises:
            RequestRejected: The passage names a model that is not external, and the router also has workers of Fleet. Or the beginning of
                the body, which may name the model, does not arrive.
        """
        readers = self._readers
        if self._only and len({each.model for each in readers.values()}) == 1:
            return next(iter(readers.values())).model
        named = await passage.named_model()
        if (reader := readers.get(ModelName(named))) is not None:
            return reader.model
        if named and not self._only:
            raise RequestRejected(
                Reason.MODEL_NOT_FOUND,
                f"model: {named[:100]!r} is not served at {passage.path[:200]}; served there: {', '.join(sorted(readers))}",
                field="model",
            )
        return None

    def _reader(self, body: RelayTextBody | RelayRawBody, path: str) -> PromptReader | None:
        """Return the prompt reader of the requested model; None if Fleet's own workers may serve the model.

        Raises:
            RequestRejected: MODEL_NOT_FOUND; no external server has the model, and no worker of Fleet can serve this path.
        """
        model = body.model
        readers = self._readers
        if model:
            reader = readers.get(ModelName(model))
        elif self._only and len(bases := [each for each in readers.values() if each.adapter is None]) == 1:
            (reader,) = bases
        else:
            reader = None
        if reader is None and (self._only or path not in OWN_PATHS):
            served = ", ".join(sorted(readers))
            raise RequestRejected(
                Reason.MODEL_NOT_FOUND,
                f"model: {(model or '')[:100]!r} is not served here; served: {served}",
                field="model",
            )
        return reader

    def _submit(self, relayed: RelayedRequest, body: RelayTextBody | RelayRawBody, read: KeyedPrompt) -> None:
        """Submit the request to the router, which places it and lets the backend send it.

        Raises:
            RequestRejected: A rate limit is reached, the object ``fleet`` is invalid, or the router drains.
        """
        relayed.keys = read.keys
        relayed.streams = _streams(body)
        if self._tenants.exist:
            relayed.allowance = self._tenants.admit(relayed.tenant, len(read.tokens) // TOKEN_BYTES, relayed.began_at)
        arrived = self._arrived(relayed.request_id, relayed.tenant, relayed.began_at, body, read)
        self._workers.expect(relayed)
        relayed.submitted()
        self.router.open(arrived, relayed)

    def _arrived(
        self, request_id: RequestId, tenant: str, began_at: Nanos, body: RelayTextBody | RelayRawBody, read: KeyedPrompt
    ) -> Arrived:
        """Return the router's event for a request.

        Raises:
            RequestRejected: The object ``fleet`` is invalid.
        """
        arrived = Arrived(
            request_id=request_id,
            model=read.model,
            adapter=read.adapter,
            tokens=read.tokens,
            tenant=tenant,
            sampling=relay_sampling(
                min(body.max_completion_tokens or body.max_tokens or body.max_output_tokens or 1, MAX_ANSWER_TOKENS)
            ),
            keys=read.keys,
            only_end=True,
        )
        return arrived if body.fleet is None else apply_fleet_options(arrived, body.fleet, began_at)

    def _submit_when_sure(self, relayed: RelayedRequest, body: RelayTextBody | RelayRawBody, read: KeyedPrompt) -> None:
        """Submit the request now or, if its tenant is near a shared rate limit, after the routers have exchanged their usage.

        Raises:
            RequestRejected: A rate limit is reached, the object ``fleet`` is invalid, or the router drains.
        """
        settle = self._tenants.settle_with_others
        if settle is None or not self._tenants.is_unsure(
            relayed.tenant, len(read.tokens) // TOKEN_BYTES, self._clock.now()
        ):
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
        reading = self._threads.run(partial(read_prompt, body, reader, relayed.path, relayed.body), prompt_bytes(body))
        self._submit_after(relayed, reading, lambda: self._submit_when_sure(relayed, body, reading.result()))

    def _submit_after(
        self, relayed: RelayedRequest, waiting: "asyncio.Future[Any]", submit: Callable[[], None]
    ) -> None:
        """Call `submit` when a future is done, unless the client has disconnected by then. If `submit` fails, the client gets the error."""

        def done(future: "asyncio.Future[Any]") -> None:
            if future.cancelled():
                return
            future.exception()  # read the exception, because asyncio logs exceptions that are never read
            if relayed.over:
                return
            try:
                submit()
            except RequestRejected as refused:
                relayed.refuse(refused)
            except Exception:  # supervisor: after a bug or an error of the tokenizer the client gets an error
                log.exception("request failed", extra={"request": relayed.request_id})
                relayed.refuse(internal_error())
                self.router.close(relayed.request_id, relayed)

        waiting.add_done_callback(done)


class _FinishedTask:
    """Stands for the task of a request that was rejected immediately. The HTTP server needs a task for each request."""

    def cancel(self) -> None:
        """Do nothing."""


_FINISHED = _FinishedTask()


def _streams(body: RelayTextBody | RelayRawBody) -> bool:
    """Return whether the client wants a stream. In a `RelayRawBody`, the field `stream` is still undecoded JSON."""
    stream = body.stream
    return stream is True or (isinstance(stream, Raw) and bytes(stream) == b"true")
