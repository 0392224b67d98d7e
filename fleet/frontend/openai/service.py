"""HTTP port of a router: the OpenAI API, health and metrics.

The head and the first event of a stream leave in one write after the first token. Until then a failure has its own HTTP
status. A later failure is an event with an ``error`` object, and no ``[DONE]`` follows.

``/health`` (readiness) has status 200 while a live worker serves a model and the router does not drain, and 503 otherwise.
``/live`` (liveness), which only the health port has, answers with status 200 as long as the process responds.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote

import msgspec
from msgspec import structs
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import choose_encoder

from fleet.core.clock import Clock, Nanos
from fleet.core.errors import Reason, RequestRejected, draining_rejection
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import Admitted, CallDelta, Delta, Finished, GenerateRequest, Logprobs, TextPrompt
from fleet.core.system_clock import unix_seconds
from fleet.frontend.generation import INLINE_BODY_BYTES, Generation, OverflowTerms
from fleet.frontend.metrics.merged import merge_metrics
from fleet.frontend.openai.answers import (
    AnswerFormatter,
    ChatFormatter,
    CompletionFormatter,
    Json,
    count_entries,
    model_object,
)
from fleet.frontend.openai.bodies import HINT_HEADER_NAMES
from fleet.frontend.openai.branches import BranchedAnswers
from fleet.frontend.openai.openapi import openapi_document
from fleet.frontend.openai.relay import ERROR_FORMS, Relay
from fleet.frontend.openai.relayed_paths import PathClass
from fleet.frontend.openai.requests import (
    OpenAiRequest,
    authorization_of,
    new_request_id,
    read_chat,
    read_completion,
    unused_id,
)
from fleet.frontend.openai.resumable_stream import EventIds
from fleet.frontend.openai.translated.models import model_info, models_page
from fleet.frontend.openai.translated.service import TranslatedFrontend
from fleet.frontend.openai.vectors import VectorFrontend
from fleet.frontend.peer_routers import PeerRoutersApi
from fleet.net.client_tls import ServerCertificates
from fleet.net.http.errors import ANTHROPIC_ERRORS, send_http_error, send_rejection
from fleet.net.http.exchange import (
    ANTHROPIC_VERSION,
    EVENT_STREAM,
    Exchange,
    ExchangeTask,
    HttpHead,
    rate_limit_headers,
)
from fleet.net.http.server import HttpServer, RouteHandler, run_server
from fleet.net.settings import KIB, MIB, HttpSettings
from fleet.net.status_codes import rename_field
from kvstore.protocol.versions import own_protocols
from kvstore.security.metrics_access import OPEN_METRICS, MetricsGuard

HEALTH_LIMITS = HttpSettings(
    # Connections of the health port: enough for a kubelet, Prometheus and a few people. The limit is low, because every
    # answer is computed anew and costs time on the event loop.
    max_connections=128,
    max_head_bytes=8 * KIB,
    max_body_bytes=KIB,
    max_held_bytes=MIB,
    first_byte_timeout_seconds=5.0,
    head_timeout_seconds=5.0,
    body_timeout_seconds=5.0,
    idle_timeout_seconds=75.0,
    write_timeout_seconds=10.0,
)


MetricsGuards = tuple[MetricsGuard, MetricsGuard]
"""Two guards, which decide who may read the metrics: at the port for clients, and at the health port."""


class OverflowOffer(OverflowTerms, Protocol):
    """Port to a hosted endpoint for one request, which may overflow to it."""

    async def serve(self, exchange: Exchange, refused: RequestRejected) -> RequestRejected | None:
        """Let the hosted endpoint answer a request that the router has rejected with `refused`.

        Returns:
            The rejection for the client if the endpoint gave no answer; None if the client has its answer.

        Raises:
            RequestRejected: The tenant's limit is reached, or an answer that has begun broke off.
            ClientDisconnected: The client has closed its connection.
        """
        ...


class Overflow(Protocol):
    """Port to the hosted endpoints of one router process, which take requests that the model's own workers cannot take.

    `fleet.backends.hosted.overflow` implements it.
    """

    def offer(self, parsed: OpenAiRequest, exchange: Exchange, authorization: str) -> OverflowOffer | None:
        """Return the offer for a request; None if its model has no hosted endpoint, or if the request must not overflow."""
        ...


STREAM_HEADERS: tuple[tuple[str, str], ...] = (
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),  # without this header, nginx would buffer the events
)


class AnswerOfModels(Protocol):
    """Function that turns the list of served models into an answer; `of_anthropic` chooses the form of Anthropic's API."""

    def __call__(self, listed: list[Json], *, of_anthropic: bool) -> Json: ...


class ReadBody(Protocol):
    """Function that reads a body; `read_chat` and `read_completion` of `fleet.frontend.openai.requests` are such functions."""

    def __call__(
        self,
        body: bytes,
        request_id: RequestId,
        now: Nanos,
        headers: Mapping[bytes, bytes] | None,
        *,
        strict: bool,
    ) -> OpenAiRequest: ...


@asynccontextmanager
async def open_http_frontend(
    listen: str,
    settings: HttpSettings,
    generation: Generation,
    registry: CollectorRegistry,
    clock: Clock,
    relay: Relay | None = None,
    *,
    shared: bool = False,
    processes: PeerRoutersApi | None = None,
    connection_seconds: float = 0,
    health_listen: str = "",
    certificates: ServerCertificates | None = None,
    health_certificates: ServerCertificates | None = None,
    overflow: Overflow | None = None,
    metrics_guards: MetricsGuards = (OPEN_METRICS, OPEN_METRICS),
) -> AsyncIterator["HttpFrontend"]:
    """Listen and serve until the context ends; then cancel running requests.

    Args:
        listen: ``host:port``; port 0 takes a free port.
        settings: Limits of connections.
        generation: Serves the requests.
        registry: The metrics that ``/metrics`` shows.
        clock: Clock for deadlines.
        relay: Serves the requests for external backends; None if there are none.
        shared: Whether other processes may listen on the same port.
        processes: The processes that listen on the same port, whose metrics are merged; None if this is the only one.
        connection_seconds: The age of a connection from which on an answer asks the client to open a new one; 0: no limit.
        health_listen: ``host:port`` of another listener, which serves only health and metrics; empty for none.
        certificates: The certificates of a port that speaks TLS; None: the port does not use TLS.
        health_certificates: The certificates of `health_listen`; None: that listener does not use TLS.
        overflow: Hosted endpoints that take requests which are rejected for load; None if there are none.
        metrics_guards: Decide who may read the metrics at `listen` and at `health_listen`.

    Raises:
        ConfigurationRefused: An address is malformed or in use.
    """
    async with AsyncExitStack() as opened:
        frontend = HttpFrontend(
            settings, generation, registry, clock, relay, processes, connection_seconds, overflow, metrics_guards
        )
        await opened.enter_async_context(
            run_server(frontend, listen, setting="http_listen", shared=shared, certificates=certificates)
        )
        if health_listen:
            health = HttpServer(HEALTH_LIMITS, clock, frontend.health_routes)
            await opened.enter_async_context(
                run_server(
                    health, health_listen, setting="health_listen", shared=shared, certificates=health_certificates
                )
            )
            frontend.health_address = health.address
        yield frontend


class HttpFrontend(HttpServer):
    """Serves the OpenAI API; `open_http_frontend` makes it."""

    def __init__(
        self,
        settings: HttpSettings,
        generation: Generation,
        registry: CollectorRegistry,
        clock: Clock,
        relay: Relay | None,
        processes: PeerRoutersApi | None,
        connection_seconds: float,
        overflow: Overflow | None,
        metrics_guards: MetricsGuards,
    ) -> None:
        routes: dict[str, Mapping[str, RouteHandler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._complete},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._ping, "POST": self._ping},
            "/version": {"GET": self._version},
            "/openapi.json": {"GET": self._openapi},
            "/metrics": {"GET": partial(self._metrics, metrics_guards[0])},
        }
        self._health_guard = metrics_guards[1]
        self._refuses_unknown_fields = settings.unknown_fields == "refuse"
        routes |= TranslatedFrontend(
            generation,
            clock,
            lambda: self.draining,
            _unsuitable_content,
            refuses_unknown_fields=self._refuses_unknown_fields,
        ).routes
        routes |= VectorFrontend(generation, clock, lambda: self.draining, _unsuitable_content).routes
        super().__init__(settings, clock, routes, connection_seconds)
        if relay is not None:
            self.streams_body = self._is_passage
        if generation.by_key:
            self.is_stranger = self._has_no_key
            self.open_paths = ("/ping",)
        self.health_address = ""  # address of the health port; empty if there is none
        self._generation = generation
        self._registry = registry
        self._relay = relay
        self._processes = processes
        self._overflow = overflow

    @property
    def health_routes(self) -> Mapping[str, Mapping[str, RouteHandler]]:
        """The handlers of the health port, which goes on answering while the frontend drains."""
        return {
            "/health": {"GET": self._health},
            "/live": {"GET": self._live},
            "/metrics": {"GET": partial(self._metrics, self._health_guard)},
        }

    async def drain(self, within_seconds: float) -> None:
        """Stop accepting requests, and wait at most `within_seconds` for the running ones."""
        await self.finish(within_seconds, None if self._relay is None else self._relay.quiet)

    def serve(self, exchange: Exchange) -> ExchangeTask:
        relay = self._relay
        head = exchange.request.head
        if (
            relay is not None
            and not exchange.request.unread
            and head.path in relay.placed
            and head.method == "POST"
            and not self.draining
            and (head.forwarded_headers is not None or _unsuitable_content(head.headers) is None)
            and (serving_ := relay.serve(exchange)) is not None
        ):
            return serving_
        return super().serve(exchange)

    def unserved(self, status: HTTPStatus) -> None:
        self._generation.metrics.unserved(status.value)

    def handlers_of(self, path: str) -> Mapping[str, RouteHandler] | None:
        if path.startswith("/v1/models/"):
            return {"GET": self._model}
        return super().handlers_of(path)

    def fallback(self, head: HttpHead) -> RouteHandler | None:
        if self._relay is None:
            return None
        match self._relay.paths.classify(head.path):
            case PathClass.RELAYED:
                return None if self._is_placed(head) else self._pass_through
            case PathClass.CONTROL:
                return self._refuse_control_route
            case PathClass.AMBIGUOUS:
                return self._refuse_ambiguous_path
            case PathClass.UNKNOWN:
                return None

    def _is_passage(self, head: HttpHead) -> bool:
        """Return whether a request is a passage, which `_pass_through` forwards while its body arrives."""
        relay, path = self._relay, head.path
        if relay is None or self._is_placed(head):
            return False
        method = "GET" if head.method == "HEAD" else head.method
        if method in (self._routes.get(path) or self.handlers_of(path) or {}):
            return False
        return relay.paths.classify(path) is PathClass.RELAYED

    def _is_placed(self, head: HttpHead) -> bool:
        """Return whether a request is no passage although its path is relayed: its prompt must count against the tenant's limits."""
        return self._relay is not None and head.path in self._relay.placed and head.method not in _PASSED_METHODS

    def _has_no_key(self, head: HttpHead) -> bool:
        """Return whether a request has no known API key."""
        try:
            self._generation.identify(authorization_of(head.headers))
        except RequestRejected:
            return True
        return False

    async def refuse_stranger(self, exchange: Exchange) -> None:
        """Reject a request without a known API key, and count it. The body is not read, so the error says nothing about it."""
        head = exchange.request.head
        request_id = new_request_id(head.headers, self._generation.serves)
        unknown = GenerateRequest(id=request_id, model=ModelName(""), prompt=TextPrompt(""))
        try:
            async with aclosing(self._generation.generate(unknown, _authorization(exchange))) as events:
                await anext(events)
        except RequestRejected as refused:
            form = ERROR_FORMS.get(head.path)
            send_rejection(exchange, refused, *exchange.id_headers(request_id), form=form)

    async def _pass_through(self, exchange: Exchange) -> None:
        assert self._relay is not None
        if self.draining:
            raise draining_rejection()
        await self._relay.pass_through(exchange)

    async def _refuse_control_route(self, exchange: Exchange) -> None:
        message = (
            f"{exchange.request.path[:200]} controls a server and is not relayed; the operator of this router can list"
            " it in `external_paths`"
        )
        send_http_error(exchange, HTTPStatus.FORBIDDEN, message)

    async def _refuse_ambiguous_path(self, exchange: Exchange) -> None:
        message = (
            "the path must not hold '.' and '..', empty segments, backslashes or encoded percent signs, nor be another spelling of a"
            " path of the API"
        )
        send_http_error(exchange, HTTPStatus.BAD_REQUEST, f"{message}{self._hint(exchange.request.path)}")

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, read_chat, ChatFormatter)

    async def _complete(self, exchange: Exchange) -> None:
        await self._generate(exchange, read_completion, CompletionFormatter)

    async def _generate(self, exchange: Exchange, read: ReadBody, formatter: type[AnswerFormatter]) -> None:
        if self.draining:
            raise draining_rejection()
        if (problem := _unsuitable_content(exchange.request.headers)) is not None:
            self.unserved(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            send_http_error(exchange, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, problem)
            return
        request = exchange.request
        headers = request.head.headers
        request_id = new_request_id(headers, self._generation.serves)
        hinted = None if HINT_HEADER_NAMES.isdisjoint(headers) else headers
        try:
            now, strict = self._clock.now(), self._refuses_unknown_fields
            # Most bodies are small. Reading a small body here saves the call of `Generation.read_body`.
            if len(request.body) <= INLINE_BODY_BYTES:
                parsed = read(request.body, request_id, now, hinted, strict=strict)
            else:
                read_large = partial(read, strict=strict)
                parsed = await self._generation.read_body(read_large, request.body, request_id, now, hinted)
                parsed = structs.replace(parsed, request=unused_id(parsed.request, request_id, self._generation.serves))
        except RequestRejected as refused:
            send_rejection(exchange, refused, ("x-request-id", request_id))
            return
        if (tracing := self._generation.tracing) is not None:
            traced = structs.replace(parsed.request, trace=tracing.read(headers))
            parsed = structs.replace(parsed, request=traced)
        offer = None
        if self._overflow is not None and parsed.details is None and parsed.seen is None:
            offer = self._overflow.offer(parsed, exchange, _authorization(exchange))
        try:
            try:
                if parsed.details is not None:
                    answers = BranchedAnswers(self._generation, parsed, formatter, exchange, _authorization(exchange))
                    await answers.serve()
                elif parsed.request.resumable:
                    await self._stream_with_ids(exchange, parsed, formatter, offer)
                elif parsed.stream:
                    await self._stream(exchange, parsed, formatter, offer)
                else:
                    await self._collect(exchange, parsed, formatter, offer)
            except RequestRejected as refused:
                if offer is None or (said := await offer.serve(exchange, refused)) is refused:
                    raise
                if said is not None:
                    raise said from refused
        except RequestRejected as refused:
            send_rejection(exchange, rename_field(refused, parsed.names), ("x-request-id", parsed.request.id))

    async def _stream(
        self,
        exchange: Exchange,
        parsed: OpenAiRequest,
        formatter_type: type[AnswerFormatter],
        offer: OverflowOffer | None,
    ) -> None:
        headers: tuple[tuple[str, str], ...] = (
            *STREAM_HEADERS,
            ("x-request-id", parsed.request.id),
        )
        token_ids: list[int] = []
        async with aclosing(self._generation.generate(parsed.request, _authorization(exchange), offer)) as events:
            formatter: AnswerFormatter | None = None
            async for item in events:
                if isinstance(item, Delta):  # most items are deltas, so this check comes first
                    assert formatter is not None
                    if parsed.return_token_ids:
                        token_ids += item.token_ids
                    if chunk := formatter.chunk(item):
                        exchange.send(chunk, content_type=EVENT_STREAM, headers=headers)
                        await exchange.drained()
                elif isinstance(item, Admitted):
                    formatter = formatter_type(parsed, item.model, self._generation.token_text, int(unix_seconds()))
                    headers += rate_limit_headers(item.allowance)
                else:
                    assert formatter is not None
                    chunks = formatter.last_chunks(item, token_ids)
                    exchange.send(chunks, content_type=EVENT_STREAM, headers=headers, last=True)

    async def _stream_with_ids(
        self,
        exchange: Exchange,
        parsed: OpenAiRequest,
        formatter_type: type[AnswerFormatter],
        offer: OverflowOffer | None,
    ) -> None:
        """Stream like `_stream`, and give each event an id (`fleet.frontend.openai.resumable_stream`)."""
        ids, headers = EventIds(parsed.seen), STREAM_HEADERS
        if parsed.seen is not None and parsed.seen.is_whole:
            request = parsed.request
            self._generation.check_resume_token(parsed.seen.resume, _authorization(exchange), request.tenant)
            exchange.respond(HTTPStatus.NO_CONTENT, b"", headers=exchange.id_headers(request.id))
            return
        position = 0 if parsed.seen is None else parsed.seen.resume.position
        async with aclosing(self._generation.generate(parsed.request, _authorization(exchange), offer)) as events:
            formatter: AnswerFormatter | None = None
            # The event of a delta without tokens, such as the part of a parsed answer that comes after its last token. It has
            # no position of its own in the answer. So it is sent before the next event with tokens, or with the last events.
            rest, has_tokens = b"", False
            async for item in events:
                if isinstance(item, Delta):  # most items are deltas, so this check comes first
                    assert formatter is not None
                    if item.resume_token:
                        ids.begin(item.resume_token)
                    if not item.token_ids:
                        rest += formatter.chunk(item)
                        continue
                    if not has_tokens:
                        ids.check_goes_on()
                    if rest:
                        exchange.send(ids.numbered(rest, position), content_type=EVENT_STREAM, headers=headers)
                        rest = b""
                    has_tokens = True
                    position += len(item.token_ids)
                    if event := formatter.chunk(item, b"%b%d\ndata: " % (ids.beginning, position)):
                        exchange.send(event, content_type=EVENT_STREAM, headers=headers)
                        await exchange.drained()
                elif isinstance(item, Admitted):
                    if item.resume_token:
                        ids.begin(item.resume_token)
                    if item.resumes:
                        parsed = structs.replace(parsed, request=structs.replace(parsed.request, id=item.resumes))
                    headers += (("x-request-id", item.request_id),)
                    created = item.began or int(unix_seconds())
                    formatter = formatter_type(parsed, item.model, self._generation.token_text, created)
                    if item.resumes:
                        formatter.resume()
                    headers += rate_limit_headers(item.allowance)
                else:
                    assert formatter is not None
                    if not rest and not item.text and (begin := formatter.begin()):
                        # A resumed stream does not repeat the event with the role. So this event is not numbered as one of
                        # the last events: their numbers must be the same after a resumption.
                        exchange.send(ids.numbered(begin, position), content_type=EVENT_STREAM, headers=headers)
                    chunks = ids.numbered_last(rest + formatter.last_chunks(item, ()), position)
                    exchange.end_events(chunks, headers)

    async def _collect(
        self,
        exchange: Exchange,
        parsed: OpenAiRequest,
        formatter_type: type[AnswerFormatter],
        offer: OverflowOffer | None,
    ) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[CallDelta] = []
        token_ids: list[int] = []
        logprobs: list[Logprobs] = []
        headers: tuple[tuple[str, str], ...] = (("x-request-id", parsed.request.id),)
        async with aclosing(self._generation.generate(parsed.request, _authorization(exchange), offer)) as events:
            formatter: AnswerFormatter | None = None
            async for item in events:
                match item:
                    case Admitted():
                        formatter = formatter_type(parsed, item.model, self._generation.token_text, int(unix_seconds()))
                        headers += rate_limit_headers(item.allowance)
                    case Delta():
                        texts.append(item.text)
                        reasoning.append(item.reasoning)
                        calls += item.calls
                        token_ids += item.token_ids
                        logprobs += item.logprobs
                    case Finished():
                        assert formatter is not None
                        texts.append(item.text)
                        whole = partial(
                            formatter.whole, "".join(texts), token_ids, logprobs, item, "".join(reasoning), calls
                        )
                        entries = count_entries(len(token_ids), len(logprobs), parsed.request.sampling.logprobs)
                        content = await self._generation.format_answer(whole, entries)
                        exchange.respond(HTTPStatus.OK, content, headers=headers)

    async def _models(self, exchange: Exchange) -> None:
        def answer(listed: list[Json], *, of_anthropic: bool) -> Json:
            query = exchange.request.head.query
            return models_page(listed, query) if of_anthropic else {"object": "list", "data": listed}

        await self._answer_of_models(exchange, answer)

    async def _model(self, exchange: Exchange) -> None:
        name = unquote(exchange.request.path.removeprefix("/v1/models/"))  # clients encode the slash of ORG/NAME

        def answer(listed: list[Json], *, of_anthropic: bool) -> Json:
            for each in listed:
                if each["id"] == name:
                    return model_info(each) if of_anthropic else each
            served = ", ".join(sorted(str(each["id"]) for each in listed)) or "none"
            message = f"model: {name[:100]!r} is not served here; served: {served}"
            raise RequestRejected(Reason.MODEL_NOT_FOUND, message, field="model")

        await self._answer_of_models(exchange, answer)

    async def _answer_of_models(self, exchange: Exchange, answer: AnswerOfModels) -> None:
        """Send the result of `answer` for the served models. The client's headers choose the form of OpenAI's or Anthropic's API."""
        of_anthropic = ANTHROPIC_VERSION in exchange.request.headers
        try:
            self._generation.identify(_authorization(exchange))
            content = msgspec.json.encode(answer(await self._model_objects(), of_anthropic=of_anthropic))
        except RequestRejected as refused:
            send_rejection(exchange, refused, form=ANTHROPIC_ERRORS if of_anthropic else None)
        else:
            exchange.respond(HTTPStatus.OK, content)

    async def _model_objects(self) -> list[Json]:
        """Return the model objects of all served models; values that an external server gives take precedence."""
        theirs = {} if self._relay is None else await self._relay.model_objects()
        return [
            {**model_object(card, self._generation.created(card)), **theirs.get(card.name, {})}
            for card in self._generation.models()
        ]

    async def _health(self, exchange: Exchange) -> None:
        """Answer a readiness probe. Probes have no API key, so the models are not listed where keys are required."""
        models = [card.name for card in self._generation.models()]
        serving = bool(models) and not self.draining
        status = "ok" if serving else "draining" if self.draining else "no worker serves yet"
        code = HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE
        body = {"status": status} if self._generation.by_key else {"status": status, "models": models}
        exchange.respond(code, msgspec.json.encode(body))

    async def _ping(self, exchange: Exchange) -> None:
        """Answer as vLLM and SageMaker do: an empty body, with the status of ``/health``."""
        serving = bool(self._generation.models()) and not self.draining
        exchange.respond(HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE, b"")

    async def _version(self, exchange: Exchange) -> None:
        exchange.respond(HTTPStatus.OK, msgspec.json.encode({"version": own_protocols().product}))

    async def _live(self, exchange: Exchange) -> None:
        """Answer a liveness probe: the process responds."""
        exchange.respond(HTTPStatus.OK, msgspec.json.encode({"status": "live"}))

    async def _openapi(self, exchange: Exchange) -> None:
        exchange.respond(HTTPStatus.OK, openapi_document())

    async def _metrics(self, guard: MetricsGuard, exchange: Exchange) -> None:
        if refusal := guard.refusal(exchange.request.headers.get(b"authorization", b"").decode("latin-1")):
            send_rejection(exchange, RequestRejected(Reason.UNAUTHENTICATED, refusal))
            return
        if self._processes is not None:
            content, content_type = merge_metrics(await self._processes.metrics()).encode(), CONTENT_TYPE_LATEST
        else:
            accepted = exchange.request.headers.get(b"accept", b"").decode("latin-1")
            encode, content_type = choose_encoder(accepted)  # choose the format OpenMetrics if the scraper accepts it
            content = encode(self._registry)
        exchange.respond(HTTPStatus.OK, content, content_type=content_type)


def _authorization(exchange: Exchange) -> str:
    """Return ``Bearer KEY`` of a request; empty if the request has no key."""
    return authorization_of(exchange.request.headers)


_PASSED_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
"""Methods whose requests are passages at every path, because they bring no prompt. With other methods, a server may take a prompt: SGLang
also takes one with PUT."""


def _unsuitable_content(headers: Mapping[bytes, bytes]) -> str | None:
    """Return an error message if the headers declare a body that is not uncompressed JSON; otherwise None."""
    content_type = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if content_type != b"application/json" and not content_type.endswith(b"+json"):
        return "content-type: must be application/json"
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        return "content-encoding: compressed bodies are not supported"
    return None
