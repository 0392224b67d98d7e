"""Overflow: sends requests that a model's own workers cannot take to a hosted endpoint, under a spending limit.

Rules:

1. A request overflows if the router rejects it because of load before any part of its answer was sent. Load means: its
   predicted wait is above `after_seconds`, the queue is full, no worker serves the model, or its worker was lost. A request
   does not overflow if the hosted endpoint could not answer it in the same way. This holds for requests that name a LoRA
   adapter, a worker or a label, that have images or token ids, or that want a longer answer than `max_answer_tokens`. It also
   holds for requests with fields that the endpoint does not know or treats differently. Requests of excluded tenants do not
   overflow either. The endpoint gets the sampling defaults of the model, those of extended fields only if it knows such
   fields (`extended_fields`).
2. The limit `after_seconds` applies only while the endpoint would accept the request. So when the spending limit is
   reached, requests wait as they would without an endpoint.
3. If the endpoint does not accept a request, the client gets the router's own rejection. Its message also gives the
   reason why the request did not overflow.
4. An endpoint that fails through its own fault gets no requests for a pause. The pause doubles with each further failure, up to
   `LONGEST_PAUSE_SECONDS`.
"""

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from fleet.backends.hosted.endpoint import EndpointFailed, HostedAnswer, HostedEndpoint, hosted_body
from fleet.backends.hosted.ledger import FileLedger, MemoryLedger, SpendingLedger
from fleet.backends.hosted.spending import NANODOLLARS, TokenPrices
from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused, Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    ChatPrompt,
    GenerateRequest,
    RateLimitStatus,
    Sampling,
    StructuralTag,
    TextPrompt,
    TokenPrompt,
)
from fleet.frontend.openai.requests import OpenAiRequest
from fleet.frontend.overflow import OverflowOutcome, OverflowRecord, OverflowState
from fleet.net.http.exchange import Exchange, rate_limit_headers
from fleet.router.settings.overflow import OverflowSettings
from fleet.router.tenants import Tenants, admit_with_peers

log = logging.getLogger(__name__)

FOR_LOAD = frozenset({Reason.QUEUE_FULL, Reason.NO_WORKER, Reason.WORKER_LOST})
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
_EXTENDED_FIELDS = (
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    "thinking_tokens",
    *("logit_bias", "allowed_token_ids"),  # both contain token ids, which mean other tokens to the endpoint's model
)
_EXTENDED_OPTIONS = (
    "include_stop_string",
    "show_special_tokens",
    "bad_words",
    "cache_salt",
    "truncate_prompt",
)
_NO_SAMPLING = Sampling()
_NO_OPTIONS = GenerateRequest(id=RequestId(""), model=ModelName(""), prompt=TextPrompt(""))


@asynccontextmanager
async def open_overflow(
    settings: Mapping[ModelName, OverflowSettings],
    tenants: Tenants,
    clock: Clock,
    unix_seconds: Callable[[], float],
    *,
    connect_timeout_seconds: float,
    explained_requests: int,
    sampling_defaults: Mapping[ModelName, Mapping[str, float]] | None = None,
) -> AsyncIterator["HostedOverflow"]:
    """Open the ledgers and the HTTP client of all hosted endpoints, until the end of the `with` block.

    `sampling_defaults` has the values of sampling parameters that a client leaves out (`TextCodec.sampling_defaults`), by model.

    Raises:
        ConfigurationRefused: A ledger or a key file cannot be used.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_seconds)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        with ExitStack() as held:
            models = {
                model: _HostedModel(
                    model,
                    each,
                    _ledger(model, each, unix_seconds, held),
                    HostedEndpoint(each, session),
                    (sampling_defaults or {}).get(model, {}),
                )
                for model, each in settings.items()
            }
            yield HostedOverflow(models, tenants, clock, explained_requests)


def _ledger(
    model: ModelName, settings: OverflowSettings, unix_seconds: Callable[[], float], held: ExitStack
) -> SpendingLedger:
    limit = round(settings.dollars_per_hour * NANODOLLARS / settings.routers)
    if not settings.ledger:
        return MemoryLedger(limit, unix_seconds)
    try:
        ledger = FileLedger(Path(settings.ledger), limit, unix_seconds)
    except OSError as error:
        raise ConfigurationRefused(f"overflow.{model}.ledger: {settings.ledger}: {error.strerror}") from error
    held.callback(ledger.close)
    return ledger


class _HostedModel:
    """Keeps the state of the hosted endpoint of one model: its ledger, its counters, and the pause after a failure."""

    def __init__(
        self,
        model: ModelName,
        settings: OverflowSettings,
        ledger: SpendingLedger,
        endpoint: HostedEndpoint,
        sampling_defaults: Mapping[str, float],
    ) -> None:
        self.model = model
        self.settings = settings
        self.sampling_defaults = {
            name: value
            for name, value in sampling_defaults.items()
            if settings.extended_fields or name not in _EXTENDED_FIELDS
        }
        self.ledger = ledger
        self.endpoint = endpoint
        self.limit = round(settings.dollars_per_hour * NANODOLLARS / settings.routers)
        self.prices = TokenPrices(
            prompt=settings.dollars_per_million_prompt_tokens, answer=settings.dollars_per_million_answer_tokens
        )
        self.outcomes = dict.fromkeys(OverflowOutcome, 0)
        # Cost in nanodollars of all requests of this process that have ended; an unknown usage counts as the estimate.
        self.charged = 0
        self.running = 0
        self.trouble = ""
        self.not_before = Nanos(0)
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._api_key = self._read_key()

    def _read_key(self) -> str:
        path = self.settings.api_key_file
        if not path:
            return ""
        try:
            key = Path(path).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
            raise ConfigurationRefused(f"overflow.{self.model}.api_key_file: {path}: {cause}") from error
        if not key or not key.isprintable() or " " in key:
            raise ConfigurationRefused(
                f"overflow.{self.model}.api_key_file: {path}: it must hold one key and nothing else"
            )
        return key

    def api_key(self) -> str:
        """Read the API key from its file and return it; if the file cannot be used, the last known key; empty if no file is set."""
        try:
            self._api_key = self._read_key()
        except ConfigurationRefused as error:
            log.warning("overflow key not read, the last one is used", extra={"cause": str(error)})
        return self._api_key

    def estimate(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Return the cost of a request with these numbers of prompt and answer tokens, in nanodollars."""
        return self.prices.cost(prompt_tokens, answer_tokens)

    def closed(self, now: Nanos) -> str:
        """Return the reason why the endpoint accepts no request now, or an empty text if it accepts requests.

        This method does not check the spending limit.
        """
        if now < self.not_before:
            return f"the hosted endpoint failed: {self.trouble}"
        if self.running >= self.settings.max_running:
            return f"{self.running} requests run at the hosted endpoint already"
        return ""

    def failed(self, error: EndpointFailed, now: Nanos) -> None:
        self.trouble = error.message
        self.not_before = Nanos(now + round(self._pause_seconds * SECOND))
        log.warning(
            "overflow endpoint failed",
            extra={
                "model": self.model,
                "cause": error.message,
                "excerpt": error.excerpt,
                "pause": self._pause_seconds,
            },
        )
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def worked(self) -> None:
        self.trouble = ""
        self._pause_seconds = FIRST_PAUSE_SECONDS


class HostedOverflow:
    """Sends requests that overflow to the hosted endpoints of their models, for one router process.

    Implements the ports `Overflow` and `OverflowReports`.
    """

    def __init__(
        self, models: Mapping[ModelName, _HostedModel], tenants: Tenants, clock: Clock, explained_requests: int
    ) -> None:
        self._models = models
        self._tenants = tenants
        self._clock = clock
        self._explained_requests = explained_requests
        self._records: OrderedDict[RequestId, OverflowRecord] = OrderedDict()

    def offer(self, parsed: OpenAiRequest, exchange: Exchange, authorization: str) -> "_Offer | None":
        hosted = self._models.get(parsed.request.model) if parsed.request.model else self._only()
        if hosted is None or not answers_alike(parsed, hosted.settings):
            return None
        return _Offer(self, hosted, parsed, exchange, authorization)

    def _only(self) -> "_HostedModel | None":
        return next(iter(self._models.values())) if len(self._models) == 1 else None

    def explained(self, request_id: RequestId) -> OverflowRecord | None:
        return self._records.get(request_id)

    def status(self) -> tuple[OverflowState, ...]:
        now = self._clock.now()
        return tuple(
            OverflowState(
                model=each.model,
                url=each.settings.url,
                running=each.running,
                outcomes=dict(each.outcomes),
                dollars=each.charged / NANODOLLARS,
                spent_dollars=each.ledger.spent() / NANODOLLARS,
                limit_dollars=each.limit / NANODOLLARS,
                trouble=each.trouble if now < each.not_before else "",
            )
            for each in self._models.values()
        )

    # Methods that `_Offer` calls

    async def take(self, offer: "_Offer", refused: RequestRejected) -> RequestRejected | None:
        """Try to serve a rejected request by its hosted endpoint; return None if it was served, or else the rejection.

        Raises:
            RequestRejected: The client has no known key or names another tenant than its own, the tenant's limit is
                reached, the deadline has passed, or an answer that has begun broke off.
            ClientDisconnected: The client has closed its connection.
        """
        hosted, now = offer.hosted, self._clock.now()
        if offer.exchange.began or refused.reason not in FOR_LOAD:
            return refused
        tenant = await self._admitted_tenant(offer)
        if tenant in hosted.settings.excluded_tenants:
            return refused
        if cause := hosted.closed(now):
            return self._not_taken(offer, refused, OverflowOutcome.CLOSED, cause)
        estimate = offer.estimate
        began = await hosted.ledger.reserve(estimate)
        if began is None:
            cause = f"the spending limit of {hosted.limit / NANODOLLARS:g} dollars an hour has no room for it"
            return self._not_taken(offer, refused, OverflowOutcome.LIMIT_SPENT, cause)
        known, cost, outcome = HostedAnswer(), estimate, OverflowOutcome.BROKEN
        hosted.running += 1
        try:
            await self._answer(offer, known)
            hosted.worked()
            outcome = OverflowOutcome.SERVED
        except EndpointFailed as error:
            outcome = OverflowOutcome.FAILED
            if not error.computed:
                cost = 0
            if error.at_fault:
                hosted.failed(error, self._clock.now())
            refused = _explained(refused, f"the hosted endpoint failed: {error.message}")
        finally:
            hosted.running -= 1
            if known.usage is not None:
                cost = hosted.prices.cost(known.usage.prompt_tokens, known.usage.completion_tokens)
                self._tenants.used(tenant, known.usage.completion_tokens, self._clock.now())
            hosted.charged += cost
            self._record(offer, refused, outcome, estimate, cost, known)
            await hosted.ledger.settle(began, estimate, cost)
        return None if outcome is OverflowOutcome.SERVED else refused

    def most_wait(self, offer: "_Offer", tenant: str) -> Nanos | None:
        """Return the predicted wait above which a request overflows; None if it cannot overflow now (rules 1 and 2)."""
        hosted = offer.hosted
        if tenant in hosted.settings.excluded_tenants or hosted.closed(self._clock.now()):
            return None
        if not hosted.ledger.has_room(offer.estimate):
            return None
        return Nanos(round(hosted.settings.after_seconds * SECOND))

    async def _admitted_tenant(self, offer: "_Offer") -> str:
        """Return the tenant of a request, after the tenant's limits have admitted the request.

        Raises:
            RequestRejected: The client has no known key or names another tenant than its own, or a limit is reached.
        """
        if offer.tenant is not None:
            return offer.tenant
        tenant = self._tenants.tenant(offer.authorization, offer.parsed.request.tenant)
        offer.allowance = await admit_with_peers(self._tenants, tenant, offer.prompt_tokens, self._clock)
        return tenant

    async def _answer(self, offer: "_Offer", known: HostedAnswer) -> None:
        hosted, parsed = offer.hosted, offer.parsed
        request = offer.exchange.request
        settings = hosted.settings
        body = hosted_body(
            request.body,
            settings.hosted_model or hosted.model,
            settings.max_answer_tokens,
            streams=parsed.stream,
            defaults={name: value for name, value in hosted.sampling_defaults.items() if name in parsed.request.unset},
        )
        headers = (
            ("x-request-id", parsed.request.id),
            ("x-fleet-overflow", hosted.model),
            *((("cache-control", "no-cache"), ("x-accel-buffering", "no")) if parsed.stream else ()),
            *rate_limit_headers(offer.allowance),
        )
        await hosted.endpoint.answer(
            request.head.path,
            body,
            hosted.api_key(),
            offer.exchange,
            headers,
            known,
            streams=parsed.stream,
            include_usage=parsed.include_usage,
            most_seconds=offer.seconds_left(self._clock.now()),
        )

    def _not_taken(
        self, offer: "_Offer", refused: RequestRejected, outcome: OverflowOutcome, cause: str
    ) -> RequestRejected:
        said = _explained(refused, cause)
        self._record(offer, said, outcome, 0, 0, HostedAnswer())
        return said

    def _record(
        self,
        offer: "_Offer",
        refused: RequestRejected,
        outcome: OverflowOutcome,
        estimate: int,
        cost: int,
        known: HostedAnswer,
    ) -> None:
        offer.hosted.outcomes[outcome] += 1
        usage = known.usage
        self._records[offer.parsed.request.id] = OverflowRecord(
            model=offer.hosted.model,
            url=offer.hosted.settings.url,
            reason=refused.reason,
            message=refused.message,
            outcome=outcome,
            estimated_dollars=estimate / NANODOLLARS,
            dollars=cost / NANODOLLARS,
            prompt_tokens=0 if usage is None else usage.prompt_tokens,
            answer_tokens=0 if usage is None else usage.completion_tokens,
        )
        while len(self._records) > self._explained_requests:
            self._records.popitem(last=False)


class _Offer:
    """Offers one request, which may overflow, to its hosted endpoint.

    Implements `fleet.frontend.openai.service.OverflowOffer`.
    """

    def __init__(
        self,
        overflow: HostedOverflow,
        hosted: _HostedModel,
        parsed: OpenAiRequest,
        exchange: Exchange,
        authorization: str,
    ) -> None:
        self._overflow = overflow
        self.hosted = hosted
        self.parsed = parsed
        self.exchange = exchange
        self.authorization = authorization
        self.tenant: str | None = None  # the tenant; None until its rate limits have admitted the request
        self.allowance: RateLimitStatus | None = None
        # Number of prompt tokens. Until the prompt is tokenized, this is the number of bytes of the request's body: an
        # upper bound, because a token has at least one byte.
        self.prompt_tokens = len(exchange.request.body)

    @property
    def estimate(self) -> int:
        """The maximum cost of the request, in nanodollars."""
        request, most = self.parsed.request, self.hosted.settings.max_answer_tokens
        answer = most if request.fill_context else request.sampling.max_tokens
        return self.hosted.estimate(self.prompt_tokens, answer)

    def seconds_left(self, now: Nanos) -> float | None:
        """Return the seconds until the client's deadline; None if the client has set no deadline."""
        deadline = self.parsed.request.deadline
        return None if deadline is None else max(0.0, (deadline - now) / SECOND)

    def admitted(self, request: GenerateRequest, prompt_tokens: int, allowance: RateLimitStatus | None) -> Nanos | None:
        self.tenant, self.prompt_tokens, self.allowance = request.tenant, prompt_tokens, allowance
        return self._overflow.most_wait(self, request.tenant)

    async def serve(self, exchange: Exchange, refused: RequestRejected) -> RequestRejected | None:
        assert exchange is self.exchange
        return await self._overflow.take(self, refused)


def answers_alike(parsed: OpenAiRequest, settings: OverflowSettings) -> bool:
    """Return True if the hosted endpoint would answer the request in the same way as the model's own workers (rule 1)."""
    request = parsed.request
    if (
        request.images
        or request.pin
        or request.labels
        or parsed.return_token_ids
        or isinstance(request.prompt, TokenPrompt)
    ):
        return False
    if not request.fill_context and request.sampling.max_tokens > settings.max_answer_tokens:
        return False
    if settings.extended_fields:
        return True
    form = parsed.names.get("sampling.form", "")
    return (
        all(getattr(request.sampling, name) == getattr(_NO_SAMPLING, name) for name in _EXTENDED_FIELDS)
        and all(getattr(request, name) == getattr(_NO_OPTIONS, name) for name in _EXTENDED_OPTIONS)
        and (not isinstance(request.prompt, ChatPrompt) or not _sets_template(request.prompt))
        and (
            request.sampling.form is None
            or (form.startswith("response_format") and not isinstance(request.sampling.form, StructuralTag))
        )
    )


def _sets_template(prompt: ChatPrompt) -> bool:
    """Return True if a chat sets variables of the chat template.

    A chat that sets exactly the two variables `reasoning_effort` and `enable_thinking` does not count, because the router
    sets both for the field `reasoning_effort` of the OpenAI API.
    """
    variables = msgspec.json.decode(prompt.template_args) if prompt.template_args else {}
    return set(variables) not in (set(), {"reasoning_effort", "enable_thinking"})


def _explained(refused: RequestRejected, cause: str) -> RequestRejected:
    """Return a copy of a rejection whose message also gives the reason why the request did not overflow."""
    return RequestRejected(
        refused.reason,
        f"{refused.message}; it did not overflow: {cause}",
        field=refused.field,
        retry_after_ms=refused.retry_after_ms,
        cause=refused.cause,
        allowance=refused.allowance,
    )
