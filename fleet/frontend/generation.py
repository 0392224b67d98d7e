"""Generation: from a client's request to its answer as text; all frontends use this module.

Flow: identify the tenant, resolve the model, validate, fetch images, render the chat template, tokenize, apply the rate limit, compute
the salt of the block hashes, submit to the router's server, turn tokens into text, look for stop strings, count the tokens for the
metrics and the tenant. Rules:

1. Nothing is submitted before everything that the client wrote has been checked. Only the router knows which fields the engines of its
   workers support; it rejects a request that no worker supports (`fleet.router.placement.wait_or_reject`).
2. A request ends once: by `Finished`, by an exception, or because the caller closed the iterator of `generate`. In each case the
   router learns immediately that the client no longer waits, and releases the reservations of the request. If the worker has
   not finished, the router then sends it `Cancel`, and the worker cancels the request in its engine (`workers.machine`, rule 4).
3. The engine handles tokens that end generation (`stop_token_ids`). Stop strings are found in this module, because the
   engine has no text. After a stop string the request is cancelled in the engine, and the answer does not wait for
   the end of this cancellation.
4. An answer that the client gets in one piece (`GenerateRequest.whole`) is collected here. The client has seen nothing of
   it before it is complete. So if a worker is lost, the answer may start over on another worker, even if the new one gets
   other tokens because the sampling is random.
5. An engine samples at least one token. For a request with `max_tokens` 0, the prompt is computed and this token is
   dropped.
6. The answer to a request with `pooling` is one `Delta` with the vector of the prompt. It has no tokens.
7. The metrics and the tenant's counters always count the same tokens, however a request ends. For a resumed answer
   (`fleet.frontend.resumed_answer`) they count the tokens that this router gets from workers. They also count the prompt and the known
   tokens (those that were generated before the resumption) as prompt tokens, unless the resumption is free
   (`fleet.frontend.resume_tokens`, rule 3). The usage that the client gets counts all tokens of the prompt and the answer.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial
from itertools import chain
from math import inf
from typing import Protocol, TypeVar, assert_never

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import (
    IMAGES,
    REASONING_ALONE,
    TOKEN_BYTES,
    Admitted,
    ChatPrompt,
    Delta,
    Finish,
    Finished,
    GenerateEvent,
    GenerateRequest,
    KvPhase,
    ModelCard,
    Prompt,
    RateLimitStatus,
    RemoteImage,
    Resume,
    Sampling,
    TextPrompt,
    TokenBytes,
    TokenPrompt,
    ToolChoice,
    Usage,
    engine_fields,
    merge_calls,
)
from fleet.core.roles import Placement
from fleet.core.telemetry import CHAT, COMPLETION, UNKNOWN_MODEL, ModelRequests, RouterProcessMetrics, operation_of
from fleet.core.validation import (
    MAX_IMAGE_BYTES,
    validate,
    validate_images,
    validate_length,
    validate_pooling,
    validate_task,
)
from fleet.core.work import LoraAdapter, ParsingTask, Progress
from fleet.frontend.access_log import AccessEntry, AccessLog, RequestTimes
from fleet.frontend.request_tracing import RequestEnd, RequestTrace, RequestTracing, traced_request
from fleet.frontend.resume_tokens import FIELD as RESUME_FIELD
from fleet.frontend.resume_tokens import NO_RESUME_TOKENS, ResumeClaims, ResumeTokens, prompt_digest, shaped_digest
from fleet.frontend.resumed_answer import Answer, EndedAnswer, ResumedAnswer
from fleet.frontend.text.codec import AnswerText
from fleet.frontend.text.image_keys import image_digests, image_keys
from fleet.frontend.text.parsed_answer import EngineParsedAnswer
from fleet.frontend.text.parsing_plan import ParsingPlans
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.status_codes import REASON_STATUSES
from fleet.router.api import RouterApi
from fleet.router.messages import Arrived, Complete, StartedOver
from fleet.router.ports import TextCodec
from fleet.router.server import RequestStream
from fleet.router.tenants import Tenants, admit_with_peers
from kvstore.block import adapter_salt, cache_salt, tenant_salt

Result = TypeVar("Result")

_NO_CALLS = ToolChoice.NONE  # reading a module variable takes a tenth of the time of reading the enum attribute
# Prompts of up to this many characters are tokenized on the event loop; longer ones in a thread. Tokenizing this many characters takes
# 0.1 ms with a tokenizer of GPT's kind, and up to 1.4 ms with one of BERT's kind. Up to this many tokens are also decoded on the event loop.
INLINE_CHARACTERS = 4096
# Request bodies with more bytes are parsed in a thread. A body of this size takes up to 6 ms; the slowest ones have thousands of short
# messages.
INLINE_BODY_BYTES = 64 << 10
# Answers with more entries (`Generation.format_answer`) are formatted in a thread, because each entry takes up to 7 µs.
INLINE_ENTRIES = 1024
# Maximum number of resumed answers that the tokenizer threads replay at a time; others wait. A replay decodes the known tokens of a
# resumed answer to text again.
MAX_REPLAYS = 2
# Resumed answers with up to this many known tokens are replayed on the event loop (8 µs for each token); longer ones in a thread.
INLINE_TOKENS = 256
RETRY_AFTER_MS = 1000
# For this time after a router's start, an unknown model is answered with NO_WORKER and not with MODEL_NOT_FOUND, if workers of a known
# model are missing: when they register, the unknown model may turn out to be one of their LoRA adapters.
REGISTRATION_SECONDS = 15
DATA_URL = "must be a data URL in base64, as data:image/png;base64,…"
# Limit of vLLM's sampler for the token sequences of one request's `bad_words`. A request with more is rejected.
MAX_BAD_SEQUENCES = 128


class PromptPace:
    """Spreads the prompts of one HTTP request over several turns of the event loop.

    Short prompts are tokenized on the event loop. Many of them in one turn would delay all other requests.
    """

    def __init__(self) -> None:
        self._begun = 0  # number of characters of the prompts whose tokenization has begun since the last wait

    async def before(self, prompt: Prompt) -> None:
        """Wait for the next turn if this prompt and those begun since the last wait are longer than `INLINE_CHARACTERS` together.

        The first prompt never waits. Only texts count: chats and token ids have 0 characters here.
        """
        characters = len(prompt.text) if isinstance(prompt, TextPrompt) else 0
        if self._begun and self._begun + characters > INLINE_CHARACTERS:
            await asyncio.sleep(0)
            self._begun = 0
        self._begun += characters


class OverflowTerms(Protocol):
    """Port that sets the predicted wait above which one request overflows to a hosted endpoint."""

    def admitted(self, request: GenerateRequest, prompt_tokens: int, allowance: RateLimitStatus | None) -> Nanos | None:
        """Note that a request is valid and within its tenant's limits.

        Returns:
            Predicted wait above which the router rejects the request, so that it overflows; None: only `max_queue_seconds` limits the wait.
        """
        ...


class KeptAnswerSearch(Protocol):
    """Port: finds the tokens of answers that workers keep for clients."""

    async def tokens(self, key: int, most: int) -> tuple[int, ...]:
        """Return the first `most` tokens of an answer; fewer or none if no worker is found that has all of them.

        Args:
            key: The key of the answer, `ResumeClaims.stream`.
            most: Number of wanted tokens.
        """
        ...


class ImageLoader(Protocol):
    """Port that fetches the images which a request names by URLs; `fleet.frontend.images.fetcher` implements it."""

    def fetched(
        self,
        images: Sequence[bytes],
        remote: Sequence[RemoteImage],
        *,
        tenant: str,
        most_bytes: int,
        within_seconds: float,
    ) -> AbstractAsyncContextManager[tuple[bytes, ...]]:
        """Fetch images. The context yields all images of the request; the caller ends it when the request no longer needs them.

        Args:
            images: All images of the request: the content of each image, or empty bytes if it has to be fetched.
            remote: The images to fetch.
            tenant: The tenant of the request; empty: there are no tenants.
            most_bytes: The limit for the content of all images together.
            within_seconds: Time until the deadline of the request; infinite if it has none.

        Raises:
            RequestRejected: An image cannot be fetched.
        """
        ...


class Generation:
    """Serves the requests of all frontends of one router process."""

    def __init__(
        self,
        router: RouterApi,
        codecs: Mapping[ModelName, TextCodec],
        *,
        clock: Clock,
        tenants: Tenants,
        tenant_secret: bytes,
        metrics: RouterProcessMetrics,
        threads: TokenizerThreads,
        resume_tokens: ResumeTokens | None = None,
        kept_answers: KeptAnswerSearch | None = None,
        access: AccessLog | None = None,
        tracing: RequestTracing | None = None,
        image_loader: ImageLoader | None = None,
    ) -> None:
        self._router = router
        self._codecs = codecs
        self._clock = clock
        self._began = clock.now()
        self._tenants = tenants
        self._tenant_secret = tenant_secret
        self.metrics = metrics
        self._running: set[RequestId] = set()
        self.relayed_ids: set[RequestId] = set()
        """Ids, chosen by clients, of running requests to external servers. The relay adds and removes them."""
        # Base model of each LoRA adapter that a request has named since the start, by the adapter's name.
        self._parents: dict[ModelName, ModelName] = {}
        self._threads = threads
        # After the death of a router, clients resume all its streams at the same time, and a thread has to replay each long one. This
        # limit leaves threads free for the prompts of other requests.
        self._replays = asyncio.Semaphore(MAX_REPLAYS)
        # The streams (`ResumeClaims.stream`) whose tokens are being searched or replayed now for a free resumption, one that is not charged.
        self._free_streams: set[int] = set()
        self._parsing_plans = ParsingPlans()
        self._image_loader = image_loader  # None: images at URLs are refused
        self._resume_tokens = resume_tokens  # None: streams cannot be resumed
        self._access = access  # None: there is no access log
        self.tracing = tracing  # None: requests are not traced
        self._kept_answers = kept_answers  # None: no worker keeps tokens for clients
        self._only_model = next(iter(codecs)) if len(codecs) == 1 else ModelName("")
        for model in codecs:  # the metrics show each series with 0 before its first request
            metrics.begin(model, CHAT)
            metrics.begin(model, COMPLETION)

    @property
    def running(self) -> int:
        """The number of requests to Fleet's own workers that have not ended."""
        return len(self._running)

    def models(self) -> tuple[ModelCard, ...]:
        """Return the models that at least one live worker serves."""
        return self._router.models()

    @property
    def by_key(self) -> bool:
        """True if clients must authenticate by an API key."""
        return self._tenants.by_key

    def identify(self, authorization: str) -> str:
        """Return the tenant of a client whose request needs no generation, such as a list of models.

        Args:
            authorization: The header ``Authorization``, as for `generate`.

        Raises:
            RequestRejected: UNAUTHENTICATED; keys are required, and the header contains no known key.
        """
        return self._tenants.tenant(authorization, "")

    def token_text(self, model: ModelName, token_id: int) -> str:
        """Return the text of a single token, for log probabilities."""
        return self._codecs[self._parents.get(model, model)].token_text(token_id)

    async def token_texts(self, model: ModelName, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token of a prompt, which may be long.

        Raises:
            RequestRejected: QUEUE_FULL; too many long prompts wait for the tokenizer threads.
        """

        def read() -> list[str]:
            return [self.token_text(model, each) for each in token_ids]

        return read() if len(token_ids) <= INLINE_CHARACTERS else await self._threads.run(read, len(token_ids))

    def prompt_text(self, model: ModelName, tokens: TokenBytes) -> str:
        """Return the text of a prompt whose tokens are given."""
        return self._codecs[self._parents.get(model, model)].decode(tokens)

    async def read_body(self, read: Callable[..., Result], body: bytes, *arguments: object) -> Result:
        """Return the result of `read`, called with a body and further arguments; a large body is read in a thread.

        While a thread reads the body, another request may begin under an id that was free before. So if one of the arguments is
        the id of the request, the caller must check it again afterwards (`unused_id`).

        Raises:
            RequestRejected: The body is invalid, or too many large bodies wait to be read.
        """
        if len(body) <= INLINE_BODY_BYTES:
            return read(body, *arguments)
        try:
            reading = self._threads.convert(partial(read, body, *arguments))
        except RequestRejected as refused:
            self.metrics.unserved(REASON_STATUSES[refused.reason].http)
            raise
        return await reading

    async def format_answer(self, formatted: Callable[[], Result], entries: int) -> Result:
        """Return a formatted answer; a long one is formatted in a thread.

        Args:
            formatted: Function that formats the answer.
            entries: Measure of the work (`count_entries`): the number of log probabilities, including those of alternative
                tokens, plus an eighth of the number of tokens.
        """
        if entries <= INLINE_ENTRIES:
            return formatted()
        return await self._threads.convert(formatted, is_answer=True)

    def serves(self, request_id: RequestId) -> bool:
        """Return whether a running request to Fleet's own workers or to an external server has this id."""
        return request_id in self._running or request_id in self.relayed_ids

    async def generate(
        self, request: GenerateRequest, authorization: str = "", overflow: "OverflowTerms | None" = None
    ) -> AsyncGenerator[GenerateEvent]:
        """Serve one request: yield `Admitted`, any number of `Delta`, and `Finished`. Closing the iterator cancels the request.

        Args:
            request: The request as the frontend understood it.
            authorization: The header ``Authorization`` with the client's API key, ``Bearer KEY``; empty if there is none.
            overflow: Decides when the request overflows to a hosted endpoint; None: the request never overflows.

        Raises:
            RequestRejected: Before `Admitted` if the request was not accepted; after `Admitted` if it could not be completed.
        """
        entry = None if self._access is None else self._access.begin(request)
        model = request.model or self._only_model
        if model not in self._codecs:
            model = self._parents.get(model, UNKNOWN_MODEL)
        operation = CHAT if isinstance(request.prompt, ChatPrompt) else COMPLETION
        if request.pooling is not None:
            operation = operation_of(request)
        counts = self.metrics.requests.get((model, operation)) or self.metrics.begin(model, operation)
        measured = _RequestTimes(self._clock, counts, entry)
        if self.tracing is not None:
            measured.begin_trace(self.tracing, request)
        resumed = None
        try:
            if request.resume is not None:
                request, resumed = await self._resumed(request, authorization)
                if entry is not None:
                    entry.request_id, entry.tenant = request.id, request.tenant
            if request.id in self._running or request.id in self.relayed_ids:
                raise invalid("request_id", "a running request has the same id; use another one")
            self._running.add(request.id)
            try:
                if self._tenants.exist:
                    tenant = self._tenants.tenant(authorization, request.tenant)
                    if tenant != request.tenant:
                        request = structs.replace(request, tenant=tenant)
                        if entry is not None:
                            entry.tenant = tenant
                if measured.trace is not None:
                    measured.trace.follow(traced_request(request))
                generate = self._generate_with_images if request.remote_images else self._generate
                async with aclosing(generate(request, measured, overflow, resumed)) as events:
                    noted = entry if entry is not None and entry.notes_answer else None
                    async for event in events:
                        if noted is not None:
                            noted.note(event)
                        yield event
            finally:
                self._running.discard(request.id)
        except RequestRejected as refused:
            measured.ended(refused.reason)
            if measured.allowance is None:
                raise
            raise refused.with_allowance(measured.allowance) from refused
        except (asyncio.CancelledError, GeneratorExit):
            measured.ended(Reason.CANCELLED)
            raise
        except Exception:
            measured.ended(Reason.INTERNAL)
            raise

    def check_count(self, request: GenerateRequest, authorization: str, count: int, field: str) -> None:
        """Check that the tenant's limit of requests per minute allows all the requests that one request of a client becomes.

        Call this method before the client's request costs anything, such as fetches of images. If the request is refused, it is
        counted, logged and traced here.

        Args:
            request: The client's request, or the first one that it becomes.
            authorization: The header ``Authorization``, as for `generate`.
            count: Number of requests that the client's request becomes.
            field: The client's field that asks for several requests, such as `n`; the error names it.

        Raises:
            RequestRejected: UNAUTHENTICATED if the API key is wrong; INVALID_ARGUMENT if the request names the tenant of another key, or
                the limit is lower than `count`.
        """
        if count == 1:
            return
        try:
            request = structs.replace(request, tenant=self._tenants.tenant(authorization, request.tenant))
            self._tenants.check_count(request.tenant, count, field)
        except RequestRejected as refused:
            self._failed(request, self._begin(request)[1], refused.reason)
            raise

    @asynccontextmanager
    async def with_images(
        self, request: GenerateRequest, authorization: str, most_bytes: int
    ) -> AsyncIterator[GenerateRequest]:
        """Fetch the images that a request names by URLs, and yield the request with their content.

        Use this method for a client's request that becomes several requests with the same images, so that each image is fetched
        once; `generate` fetches the images of a single request itself. If the fetch fails, the request is counted, logged and
        traced here.

        Args:
            request: The request as the frontend understood it.
            authorization: The header ``Authorization``, as for `generate`.
            most_bytes: The limit for the content of all images together.

        Raises:
            RequestRejected: The API key is wrong, the deadline has passed, the model is not served, the request is invalid or over a limit
                of its tenant, or an image cannot be fetched.
        """
        entry, measured = self._begin(request)
        async with AsyncExitStack() as held:
            try:
                request = structs.replace(request, tenant=self._tenants.tenant(authorization, request.tenant))
                if entry is not None:
                    entry.tenant = request.tenant
                fetched = await held.enter_async_context(self._fetched(request, most_bytes))
            except RequestRejected as refused:
                self._failed(request, measured, refused.reason)
                raise
            except asyncio.CancelledError:
                self._failed(request, measured, Reason.CANCELLED)
                raise
            except Exception:
                self._failed(request, measured, Reason.INTERNAL)
                raise
            yield fetched

    def _begin(self, request: GenerateRequest) -> tuple[AccessEntry | None, "_RequestTimes"]:
        """Begin to measure a client's request before it becomes several requests.

        Return its entry of the access log (None: there is no access log), and the object that measures it.
        """
        model = request.model or self._only_model
        if model not in self._codecs:
            model = self._parents.get(model, UNKNOWN_MODEL)
        entry = None if self._access is None else self._access.begin(request)
        return entry, _RequestTimes(self._clock, self.metrics.begin(model, operation_of(request)), entry)

    def _failed(self, request: GenerateRequest, measured: "_RequestTimes", reason: Reason) -> None:
        """Count, log and trace a request that failed before it became several requests.

        The trace begins only here, because a request that does not fail has no trace: each of the several requests has one of its own.
        """
        if self.tracing is not None:
            measured.begin_trace(self.tracing, request)
        measured.ended(reason)

    async def tokens_of(self, request: GenerateRequest, authorization: str = "") -> tuple[ModelCard, TokenBytes]:
        """Tokenize a prompt without generating; return the model card and the tokens, which may be too many for the model.

        Raises:
            RequestRejected: The API key, the model or the prompt is wrong, no worker serves the model, or too many long prompts wait.
        """
        self._tenants.tenant(authorization, request.tenant)
        card, codec = self._resolve(request.model)
        validate(request, card, None, vocab_size=codec.vocab_size)
        if request.images:
            raise invalid("chat.messages", "have images, whose tokens only a worker can count; leave them out")
        return card, await self._tokenise(request.prompt, codec)

    async def text_of(self, request: GenerateRequest, authorization: str = "") -> str:
        """Return the text of a request's prompt, which is given as tokens; nothing is generated.

        Raises:
            RequestRejected: The API key, the model or the prompt is wrong, no worker serves the model, or too many long prompts wait.
        """
        card, tokens = await self.tokens_of(request, authorization)
        codec = self._codecs[self._parents.get(card.name, card.name)]
        size = len(tokens)
        return (
            codec.decode(tokens)
            if size <= INLINE_CHARACTERS
            else await self._threads.run(partial(codec.decode, tokens), size)
        )

    def card_of(self, model: ModelName, authorization: str, tenant: str) -> ModelCard:
        """Return the card of the model that a request names; an empty name means the only model that workers serve.

        Raises:
            RequestRejected: The API key or the model is wrong, or no worker serves the model.
        """
        self._tenants.tenant(authorization, tenant)
        return self._resolve(model)[0]

    def created(self, card: ModelCard) -> int:
        """Return the Unix time of a model's files in seconds; an adapter has the time of its base model. 0: not known."""
        codec = self._codecs.get(card.parent or card.name)
        return 0 if codec is None else codec.created

    def limits_reasoning(self, model: ModelName) -> bool:
        """Return whether every worker of a model can end the reasoning after a number of tokens; False for an unknown model.

        An empty name means all base models.
        """
        cards = [card for card in self._router.models() if card.name == model or (not model and not card.parent)]
        return bool(cards) and all(card.limits_reasoning for card in cards)

    def class_names(self, model: ModelName) -> Mapping[int, str]:
        """Return the names of the classes of a classifying model, by the numbers of the classes; empty if the model names none.

        Raises:
            RequestRejected: The model is not served.
        """
        _, codec = self._resolve(model)
        return codec.class_names

    async def pair_tokens(self, model: ModelName, pairs: Sequence[tuple[str, str]]) -> Sequence[tuple[TokenBytes, int]]:
        """Return for each pair of texts its tokens as one prompt, and how many of them belong to the first text.

        The pairs of one request are tokenized together. If they have more than `INLINE_CHARACTERS` characters together, this happens in
        a thread, because thousands of short pairs would block the event loop.

        Raises:
            RequestRejected: The model is not served, or too many long prompts wait for the tokenizer threads.
        """
        _, codec = self._resolve(model)

        def encode() -> Sequence[tuple[TokenBytes, int]]:
            return [codec.encode_pair(first, second) for first, second in pairs]

        characters = sum(len(first) + len(second) for first, second in pairs)
        return encode() if characters <= INLINE_CHARACTERS else await self._threads.run(encode, characters)

    async def arrival(self, request: GenerateRequest, authorization: str = "") -> Arrived:
        """Check, tokenize and admit an external request, which another program sends to its worker; return the event for the router.

        Args:
            request: The request as the frontend understood it.
            authorization: The header ``Authorization``, as for `generate`.

        Raises:
            RequestRejected: The API key is wrong, the deadline has passed, the model is not served, too many long prompts wait, or the
                request is invalid or over a limit of its tenant.
        """
        tenant = self._tenants.tenant(authorization, request.tenant)
        request = structs.replace(request, tenant=tenant)
        if request.remote_images:
            raise invalid(request.remote_images[0].field, f"{DATA_URL}; images are not fetched for other programs")
        card, _, tokens, sampling = await self._checked(request)
        await admit_with_peers(self._tenants, tenant, len(tokens) // TOKEN_BYTES, self._clock)
        digests = await image_digests(request.images) if request.images else ()
        # The router needs no other sampling parameters: it does not see the tokens of this answer, so no other worker can continue it
        # (`LiveRequest.may_continue`). With the seed, the router does not count the token of a prefill worker as a part of the answer
        # (`LiveRequest.emits_prefill_token`).
        event_sampling = Sampling(max_tokens=sampling.max_tokens, seed=0, form=sampling.form)
        return structs.replace(self._arrived(request, card, tokens, event_sampling, digests=digests), external=True)

    async def _generate_with_images(
        self,
        request: GenerateRequest,
        measured: "_RequestTimes",
        overflow: "OverflowTerms | None",
        resumed: ResumedAnswer | None,
    ) -> AsyncGenerator[GenerateEvent]:
        """Generate like `_generate`, after the images that the request names by URLs were fetched."""
        is_free = resumed is not None and resumed.is_free
        async with (
            self._fetched(request, MAX_IMAGE_BYTES, is_free=is_free) as fetched,
            aclosing(self._generate(fetched, measured, overflow, resumed)) as events,
        ):
            async for event in events:
                yield event

    @asynccontextmanager
    async def _fetched(
        self, request: GenerateRequest, most_bytes: int, *, is_free: bool = False
    ) -> AsyncIterator[GenerateRequest]:
        """Check a request as far as possible without its images, then fetch the images; yield the request with their content.

        Args:
            request: The request, with its tenant.
            most_bytes: The limit for the content of all images together.
            is_free: True if the tenant is not charged for the request; the tenant's limits are then not checked.

        Raises:
            RequestRejected: The deadline has passed, the model is not served, the request is invalid or over a limit of its tenant, or an
                image cannot be fetched.
        """
        self._check_deadline(request.deadline)
        card, codec = self._resolve(request.model, resumes=request.resume is not None)
        validate(request, card, None, vocab_size=codec.vocab_size)
        validate_images(request, card)
        if self._image_loader is None:
            raise invalid(
                request.remote_images[0].field,
                f"{DATA_URL}; this router fetches no images. Its operator can allow that by the setting images.fetch_urls",
            )
        left = inf if request.deadline is None else (request.deadline - self._clock.now()) / SECOND
        fetched = self._image_loader.fetched(
            request.images,
            request.remote_images,
            tenant=request.tenant,
            most_bytes=most_bytes,
            within_seconds=left,
        )
        async with AsyncExitStack() as held:
            with nullcontext() if is_free else self._tenants.expected(request.tenant, self._clock.now()):
                images = await held.enter_async_context(fetched)
            yield structs.replace(request, images=images, remote_images=())

    async def _generate(
        self,
        request: GenerateRequest,
        measured: "_RequestTimes",
        overflow: "OverflowTerms | None",
        resumed: ResumedAnswer | None,
    ) -> AsyncGenerator[GenerateEvent]:
        card, codec, tokens, sampling = await self._checked(request)
        digests: Sequence[bytes] = ()
        if request.images and (request.resumable or resumed is not None):
            digests = await image_digests(request.images)  # a resume token is valid only for the same images
        if measured.counts.model != (model := card.parent or card.name):
            measured.counts = self.metrics.begin(model, measured.counts.operation)
        measured.served_model = card.name
        prompt_tokens = len(tokens) // TOKEN_BYTES
        prompt_only = request.sampling.max_tokens == 0 and not request.fill_context and request.pooling is None
        parsing = None
        if (demand := request.parsing) is not None and (
            card.parsers is not None or demand.tool_choice is not _NO_CALLS or codec.response_template is not None
        ):
            if not self._parsing_plans.templates.is_loaded and (card.parsers is None or not card.parsers.in_engine):
                await self._threads.run(self._parsing_plans.templates.load, 0)
            parsing = self._parsing_plans.plan(request, demand, card, codec)
        if parsing is not None:
            sampling = parsing.constrained(sampling)

        # Id of the original request. Ids of tool calls are derived from it, and must stay the same in a resumed answer.
        answer_id = request.id if resumed is None else resumed.claims.request_id

        def begun() -> Answer:
            if parsing is not None and parsing.template is None:
                return parsing.engine_answer(answer_id)
            text = AnswerText(
                codec.decoder(tokens, special=parsing is not None or request.show_special_tokens),
                stop=request.stop,
                end_token_ids=frozenset(sampling.stop_token_ids),
                min_tokens=sampling.min_tokens,
                include_stop=request.include_stop_string,
            )
            return text if parsing is None else parsing.answer(answer_id, text, codec, tokens)

        answer = begun()
        claims: ResumeClaims | None = None  # content of the stream's resume tokens; None: the stream has none
        replayed, ended = 0, None
        digest = b""
        if resumed is not None or request.resumable:
            digest = _digest(card, tokens, digests, request)
        if resumed is not None:
            in_engine = isinstance(answer, EngineParsedAnswer)
            # A default of the model may differ at the router that began the answer, so only the client's own temperature counts.
            is_greedy = sampling.temperature == 0 and "temperature" not in request.unset
            resumed.check(
                sampling, digest, codec.vocab_size, in_engine=in_engine, is_kept=request.is_kept, is_greedy=is_greedy
            )
            with self._affordable(resumed.claims, request.tenant):
                if len(resumed.token_ids) <= INLINE_TOKENS:
                    resumed.replay(answer)
                else:
                    async with self._replays:
                        await self._threads.run(partial(resumed.replay, answer), len(resumed.token_ids))
            replayed, ended = answer.num_tokens, resumed.end(answer, sampling)
        if request.resumable and self._resume_tokens is not None:
            claims = self._claims(request, digest, resumed)
        elif request.is_kept:  # the client asks for event ids, which contain resume tokens
            raise invalid("resumable", NO_RESUME_TOKENS)
        due = claims  # content of the next resume token to send; None: none has to be sent
        # Parts that are sent after the worker's stream has ended: all parts of an answer that is not streamed, or the last part of an answer
        # that a stop string has ended.
        collected: list[Delta] = []
        allowance: RateLimitStatus | None = None
        counted_tokens = 0
        # Do not rely on `resumed.is_free`: another request with the same resume token may have been admitted meanwhile, and only
        # the first one is free.
        if resumed is None or not self._is_free(resumed.claims):
            # Charge the replayed tokens, too: a worker computes them like a prompt, and over gRPC the client may have invented them. If
            # the answer ends with them, no worker computes them, but the replay costs time of this router.
            counted_tokens = (0 if request.sibling else prompt_tokens) + replayed
            if self._tenants.exist:
                allowance = await admit_with_peers(self._tenants, request.tenant, counted_tokens, self._clock)
        measured.admitted(counted_tokens, allowance)
        if request.images and not digests:
            digests = await image_digests(request.images)
        complete: Complete | None = None
        last: Delta | None = None
        task = None if parsing is None or card.parsers is None else parsing.task
        answer_key = claims.stream if request.is_kept and claims is not None else 0
        arrived = self._arrived(request, card, tokens, sampling, task, digests, answer_key)
        if overflow is not None:
            most_wait = overflow.admitted(request, prompt_tokens, allowance)
            arrived = structs.replace(arrived, most_wait=most_wait)
        if resumed is not None:
            arrived = structs.replace(arrived, answered=resumed.token_ids, fingerprint=resumed.claims.fingerprint)
        stream: AbstractAsyncContextManager[RequestStream | EndedAnswer]
        stream = self._router.submit(arrived) if ended is None else EndedAnswer(request.id, ended)
        async with stream as submitted:
            try:
                if resumed is not None:
                    self._note_resumed(resumed, measured.counts)
                yield Admitted(
                    request_id=request.id,
                    model=card.name,
                    prompt_tokens=prompt_tokens,
                    sampling=sampling,
                    tokens=tokens,
                    allowance=allowance,
                    resume_token=""
                    if claims is None or request.late_token
                    else self._first_token(request, claims, resumed),
                    resumes=RequestId("") if resumed is None else resumed.claims.request_id,
                    began=0 if claims is None else claims.issued,
                )
                if resumed is not None and resumed.known is not None:
                    yield resumed.known
                async for event in submitted:
                    if not isinstance(event, Progress):  # most events are `Progress`: this is their only type check
                        if isinstance(event, Complete):
                            complete = event
                            break
                        if isinstance(event, StartedOver):
                            answer = begun()
                            collected.clear()
                        else:
                            assert claims is not None
                            claims = due = structs.replace(claims, stream=event.answer_key)
                    elif event.token_ids or event.parsed is not None:
                        measured.tokens()
                        progress = event
                        if resumed is not None and resumed.to_skip:
                            progress = resumed.skip(answer, event)
                            if answer.stopped:
                                break
                        if prompt_only:
                            delta = Delta(text="", token_ids=())
                        elif isinstance(answer, AnswerText):
                            delta = answer.add(progress.token_ids, progress.logprobs)
                        else:
                            delta = answer.take(progress)
                        if event.prompt_logprobs:
                            delta = structs.replace(delta, prompt_logprobs=event.prompt_logprobs)
                        if due is not None and delta.token_ids:
                            delta, due = self._with_token(delta, request.id, due), None
                        # `last` is yielded later, so that the engine stops now even if the client reads slowly.
                        if answer.stopped:
                            last = delta
                            break
                        if request.whole:
                            collected.append(delta)
                            if request.leads and len(collected) == 1:
                                yield Delta(text="", token_ids=())
                        else:
                            yield delta
                    elif event.vector:
                        collected.append(Delta(text="", token_ids=(), vector=event.vector))
            finally:
                generated = answer.num_tokens - replayed
                image_tokens = 0
                if request.images:
                    image_tokens = max((phase.report.image_tokens for phase in submitted.kv), default=0)
                counted_images = image_tokens if counted_tokens else 0
                if self._tenants.exist:
                    self._tenants.used(request.tenant, generated, self._clock.now(), counted_images)
                measured.used(
                    generated, 0 if request.sibling else submitted.cached_tokens, submitted.kv, counted_images
                )
        if last is not None:
            collected.append(last)
        # The resume token was to come with the first tokens (`late_token`), but the answer has none.
        if due is not None and request.late_token and not answer.num_tokens:
            yield Delta(text="", token_ids=(), resume_token=self._issued(due))
        text = ""
        if isinstance(answer, AnswerText):
            if collected:
                yield _joined(collected)
            text = answer.finish()
        elif request.whole:
            yield _joined_parts([*collected, answer.finish()])
        else:
            for delta in collected:
                yield delta
            yield structs.replace(answer.finish(), is_last=True)
        finish = Finish.STOP if answer.stopped or complete is None else complete.finish
        if prompt_only:
            finish = Finish.LENGTH
        elif finish is Finish.STOP and not isinstance(answer, AnswerText) and answer.has_calls:
            finish = Finish.TOOL_CALLS
        usage = measured.usage
        assert usage is not None
        measured.ended(finish)
        if not isinstance(answer, AnswerText):
            usage = structs.replace(usage, reasoning_tokens=answer.reasoning_tokens)
        if resumed is not None:
            usage = structs.replace(
                usage, prompt_tokens=prompt_tokens + image_tokens, completion_tokens=answer.num_tokens
            )
        yield Finished(
            finish=finish,
            usage=usage,
            kv=submitted.kv,
            text=text,
            stop_string=(answer.stop_string or request.stop[0]) if answer.stopped else "",
        )

    def check_resume_token(self, resume: Resume, authorization: str, tenant: str) -> ResumeClaims:
        """Return the content of a resume token.

        Raises:
            RequestRejected: The API key is wrong, the resume token is not valid for the tenant, or this router issues no resume tokens.
        """
        if self._resume_tokens is None:
            raise invalid(RESUME_FIELD, NO_RESUME_TOKENS)
        return self._resume_tokens.read(resume.token, self._tenants.tenant(authorization, tenant))

    async def _resumed(self, request: GenerateRequest, authorization: str) -> tuple[GenerateRequest, ResumedAnswer]:
        """Prepare a request that resumes an answer; return the request under a new id, and the known part of the answer.

        Raises:
            RequestRejected: The API key is wrong, the resume token is not valid for the tenant, this router issues no resume tokens, the
                request is not for a stream, or the tenant has used up a limit.
        """
        assert request.resume is not None
        if request.whole:
            raise invalid(RESUME_FIELD, "is only for streams")
        resume = request.resume
        claims = self.check_resume_token(resume, authorization, request.tenant)
        tenant = claims.tenant
        if request.is_kept and self._kept_answers is not None:
            with self._affordable(claims, tenant):
                known = await self._kept_answers.tokens(claims.stream, resume.position)
            resume = structs.replace(resume, token_ids=known)
        request_id = claims.next_id
        # The id is in use if an earlier resumption broke off, and its request has not ended on this router yet. Another request may
        # also have this id, because clients may choose ids.
        while self.serves(request_id):
            request_id = RequestId(f"{claims.next_id[:111]}.{_new_stream():016x}")
        answer = ResumedAnswer(resume=resume, claims=claims, is_free=self._is_free(claims))
        return structs.replace(request, id=request_id, tenant=tenant), answer

    @contextmanager
    def _affordable(self, claims: ResumeClaims, tenant: str) -> Iterator[None]:
        """Refuse a resumption that is over its tenant's limits. Within the context, the caller searches or replays the known tokens.

        The check comes before this work, because a search or a replay costs much more than a refusal. Of several simultaneous
        resumptions of one stream, only the first one counts as free here.

        Raises:
            RequestRejected: RATE_LIMITED; the resumption is not free, and the tenant has used up a limit.
        """
        if self._is_free(claims) and claims.stream not in self._free_streams:
            self._free_streams.add(claims.stream)
            try:
                yield
            finally:
                self._free_streams.discard(claims.stream)
        else:
            with self._tenants.expected(tenant, self._clock.now()):
                yield

    def _claims(self, request: GenerateRequest, digest: bytes, resumed: ResumedAnswer | None) -> ResumeClaims:
        """Return the content that all resume tokens of this stream share. `digest` is the digest of the prompt (`_digest`)."""
        assert self._resume_tokens is not None
        if resumed is not None:
            return structs.replace(resumed.claims, resumes=resumed.claims.resumes + 1, stream=_new_stream())
        return ResumeClaims(
            request.id,
            request.tenant,
            self._resume_tokens.now(),
            0,
            digest,
            _new_stream(),
        )

    def _first_token(self, request: GenerateRequest, claims: ResumeClaims, resumed: ResumedAnswer | None) -> str:
        """Return the resume token with which an answer begins.

        If workers keep the tokens of the answer, a resumed answer begins with the resume token that the client sent. A new
        resume token has another answer key. Until the first new tokens come, perhaps no worker has the client's tokens under
        that key, so that the client could not resume with the new token.
        """
        return self._issued(claims if resumed is None or not request.is_kept else resumed.claims)

    def _is_free(self, claims: ResumeClaims) -> bool:
        assert self._resume_tokens is not None
        return self._resume_tokens.is_free(claims)

    def _note_resumed(self, resumed: ResumedAnswer, counts: ModelRequests) -> None:
        assert self._resume_tokens is not None
        self._resume_tokens.use(resumed.claims)
        counts.resumed += 1

    def _issued(self, claims: ResumeClaims) -> str:
        assert self._resume_tokens is not None
        return self._resume_tokens.issue(claims)

    def _with_token(self, delta: Delta, request_id: RequestId, claims: ResumeClaims) -> Delta:
        """Return the delta with a resume token. The token has the worker's fingerprint, which is known once the first tokens have come."""
        assert self._resume_tokens is not None
        token = self._resume_tokens.issue(claims, self._router.fingerprint(request_id))
        return structs.replace(delta, resume_token=token)

    async def _checked(self, request: GenerateRequest) -> tuple[ModelCard, TextCodec, TokenBytes, Sampling]:
        """Return the model card, the codec, the prompt tokens and the engine's sampling parameters of a request.

        Raises:
            RequestRejected: The deadline has passed, the model is not served, the request is invalid, or too many long prompts wait.
        """
        self._check_deadline(request.deadline)
        card, codec = self._resolve(request.model, resumes=request.resume is not None)
        if request.pooling is not None or card.pooling is not None:
            validate_task(request.pooling, card)
            if request.pooling is not None:
                validate_pooling(request)
        validate(request, card, None, vocab_size=codec.vocab_size)
        if request.images:
            validate_images(request, card)
        tokens = request.tokens or await self._tokenise(request.prompt, codec)
        if request.truncate_prompt is not None:
            tokens = _truncated(request, card, tokens)
        prompt_tokens = len(tokens) // TOKEN_BYTES
        validate_length(request, card, prompt_tokens)
        return card, codec, tokens, _engine_sampling(request, codec, room=card.max_model_len - prompt_tokens)

    def _check_deadline(self, deadline: Nanos | None) -> None:
        if deadline is not None and deadline <= self._clock.now():
            raise RequestRejected(Reason.DEADLINE_PASSED, "the deadline had passed on arrival", field="timeout_ms")

    def _resolve(self, model: ModelName, *, resumes: bool = False) -> tuple[ModelCard, TextCodec]:
        """Return the card and the codec of a model; an empty name means the only base model that workers serve.

        Args:
            model: Name of the model or of a LoRA adapter.
            resumes: True if the request resumes an answer.

        Raises:
            RequestRejected: NO_WORKER if a retry may succeed; MODEL_NOT_FOUND if the router does not know the model; INVALID_ARGUMENT if
                the name is empty and workers serve several base models.
        """
        cards = {card.name: card for card in self._router.models()}
        if not model:
            models = [card.name for card in cards.values() if not card.parent]
            if len(models) > 1:
                raise invalid("model", f"must be one of {', '.join(sorted(cards))}")
            if not models:
                if len(self._codecs) == 1:  # the router serves only one model, so the request need not name it
                    self._router.turned_away(next(iter(self._codecs)))
                raise RequestRejected(Reason.NO_WORKER, "no worker serves any model yet", retry_after_ms=RETRY_AFTER_MS)
            (model,) = models
        if model in cards and (parent := cards[model].parent):
            self._parents[model] = parent
        if (codec := self._codecs.get(self._parents.get(model, model))) is None:
            # Only workers say which adapters exist, so an unknown name may be an adapter of a worker that is not registered now.
            if resumes:
                raise _unknown_model(model, "no worker serves it now, and one may have served it when the answer began")
            absent = ", ".join(sorted(self._codecs.keys() - cards.keys()))
            if absent and self._clock.now() < self._began + REGISTRATION_SECONDS * SECOND:
                raise _unknown_model(model, f"this router has just started; it may be a LoRA adapter of {absent}")
            known = [card.name for card in cards.values() if (card.parent or card.name) in self._codecs]
            served = ", ".join(sorted(known)) or "none"
            raise RequestRejected(
                Reason.MODEL_NOT_FOUND, f"model: {_quoted(model)} is not served here; served: {served}", field="model"
            )
        if (card := cards.get(model)) is None:
            self._router.turned_away(self._parents.get(model, model))
            raise RequestRejected(
                Reason.NO_WORKER, f"no worker serves {_quoted(model)} now", field="model", retry_after_ms=RETRY_AFTER_MS
            )
        return card, codec

    async def _tokenise(self, prompt: Prompt, codec: TextCodec) -> TokenBytes:
        work: Callable[[], TokenBytes]
        match prompt:
            case TokenPrompt(tokens=tokens):
                return tokens
            case TextPrompt(text=text, special=special):
                work, characters = partial(codec.encode, text, special), len(text)
            case ChatPrompt(messages=messages, tools=tools, template_args=template_args):
                work = partial(codec.render, messages, tools, template_args)
                characters = len(tools) + sum(
                    1 + len(each.content) + len(each.parts) + len(each.tool_calls) for each in messages
                )
            case _:
                assert_never(prompt)
        if characters <= INLINE_CHARACTERS:
            return work()
        return await self._threads.run(work, characters)

    def _arrived(
        self,
        request: GenerateRequest,
        card: ModelCard,
        tokens: TokenBytes,
        sampling: Sampling,
        parsing: ParsingTask | None = None,
        digests: Sequence[bytes] = (),
        answer_key: int = 0,
    ) -> Arrived:
        salt = tenant_salt(self._tenant_secret, request.tenant)
        if request.cache_salt:
            salt = cache_salt(request.cache_salt, salt)
        meant = resolve_model(card, salt)
        needs: tuple[str, ...] = ()
        placement = request.placement
        if sampling.prompt_logprobs is not None:
            placement = Placement.AGGREGATED  # only a worker that computes the whole prompt has its log probabilities
        if request.pooling is not None:
            sampling, placement = structs.replace(sampling, max_tokens=0), Placement.AGGREGATED
        if (
            sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_tokens
            or sampling.prompt_logprobs is not None
            or sampling.thinking_tokens is not None
        ):
            # Workers whose engine lacks one of these fields are not candidates (`fleet.router.placement.wait_or_reject`, LACKS_FIELD).
            needs = engine_fields(sampling)
        keys: Mapping[int, tuple[int, ...]] = {}
        if request.images:
            placement, needs = Placement.AGGREGATED, (*needs, IMAGES)
            placeholders = self._codecs[meant.model].image_token_ids
            keys = {card.block_tokens: image_keys(tokens, card.block_tokens, meant.salt, digests, placeholders)}
        return Arrived(
            request_id=request.id,
            answer_key=answer_key,
            model=meant.model,
            adapter=meant.adapter,
            tokens=tokens,
            salt=meant.salt,
            tenant=request.tenant,
            sampling=sampling,
            priority=request.priority,
            deadline=request.deadline,
            session=request.session,
            placement=placement,
            kv_path=request.kv_path,
            expected_tokens=request.expected_tokens,
            pin=WorkerId(request.pin) if request.pin else None,
            labels=request.labels,
            whole=request.whole,
            needs=needs,
            parsing=parsing,
            pooling=request.pooling,
            keys=keys,
            images=request.images,
        )


def _digest(card: ModelCard, tokens: TokenBytes, images: Sequence[bytes], request: GenerateRequest) -> bytes:
    """Return the digest of what a resumption must have in common with the first request. It is a part of each resume token.

    The digest covers the model, the prompt, the images, and the fields that decide which text follows from the tokens of the answer. With
    other values of these fields, the client would get text twice, or miss text.
    """
    digest = prompt_digest(card.name, tokens + b"".join(images) if images else tokens)
    sampling = request.sampling
    plain = REASONING_ALONE if isinstance(request.prompt, ChatPrompt) else None
    if not (
        request.stop
        or sampling.stop_token_ids
        or sampling.ignore_eos
        or request.show_special_tokens
        or request.parsing != plain
    ):
        return digest  # without a shape: routers of earlier commits then accept the resume tokens of such requests, too
    shape = (
        request.stop,
        sampling.min_tokens if request.stop else 0,
        request.include_stop_string and bool(request.stop),
        sorted(sampling.stop_token_ids),
        sampling.ignore_eos,
        request.show_special_tokens,
        request.parsing,
    )
    return shaped_digest(digest, shape)


def _unknown_model(model: ModelName, cause: str) -> RequestRejected:
    """Return the error for a model that this router does not know, but may know once more workers have registered."""
    return RequestRejected(
        Reason.NO_WORKER,
        f"model: {_quoted(model)} is not known: {cause}",
        field="model",
        retry_after_ms=RETRY_AFTER_MS,
    )


class ModelTarget(Struct, frozen=True):
    """Placement target of a model card: the base model, the LoRA adapter if any, and the salt of the block hashes."""

    model: ModelName
    adapter: LoraAdapter | None
    salt: bytes


def resolve_model(card: ModelCard, salt: bytes) -> ModelTarget:
    """Return the target of a model card: the card's own model, or the base model with a LoRA adapter and the adapter's salt.

    Args:
        card: The model card that a request names.
        salt: The salt of the request's tenant, or the salt that was made of it and the request's `cache_salt`.
    """
    if not card.parent:
        return ModelTarget(card.name, None, salt)
    adapter = LoraAdapter(card.name, card.revision)
    return ModelTarget(card.parent, adapter, adapter_salt(adapter.identity, salt))


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas to one delta. Of several deltas, reasoning and tool calls are not joined, and none may have a vector."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join([each.text for each in deltas]),
        token_ids=tuple(chain.from_iterable(each.token_ids for each in deltas)),
        logprobs=tuple(chain.from_iterable(each.logprobs for each in deltas)),
        prompt_logprobs=deltas[0].prompt_logprobs,
        resume_token=next((each.resume_token for each in reversed(deltas) if each.resume_token), ""),
    )


def _joined_parts(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas of a parsed answer, with reasoning and tool calls, to one delta."""
    return structs.replace(
        _joined(deltas),
        reasoning="".join([each.reasoning for each in deltas]),
        calls=merge_calls([part for each in deltas for part in each.calls]),
    )


def _engine_sampling(request: GenerateRequest, codec: TextCodec, *, room: int) -> Sampling:
    """Return the sampling parameters for the engine, completed by the model's defaults, token limit and end-of-sequence tokens.

    `room` is the number of tokens that the model has left after the prompt.
    """
    sampling = request.sampling
    if request.unset and (defaults := codec.sampling_defaults):
        sampling = structs.replace(sampling, **{name: defaults[name] for name in request.unset if name in defaults})
    most = room if request.fill_context else sampling.max_tokens or 1
    ends = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *codec.eos_token_ids)
    return structs.replace(
        sampling,
        max_tokens=min(most, room),
        stop_token_ids=tuple(dict.fromkeys(ends)),
        bad_tokens=_bad_tokens(request.bad_words, codec) if request.bad_words else sampling.bad_tokens,
    )


def _bad_tokens(words: Sequence[str], codec: TextCodec) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each word: its tokens at the beginning of a text and, if these differ, its tokens after a space.

    Fleet computes these sequences itself, because vLLM's own `bad_words` miss a word that has another number of tokens after
    a space.

    Raises:
        RequestRejected: INVALID_ARGUMENT; a word has no tokens, or there are more than `MAX_BAD_SEQUENCES` sequences.
    """
    sequences = []
    for index, word in enumerate(words):
        first = _ids(codec.encode(word.lstrip(), False))
        spaced = _ids(codec.encode(f" {word.lstrip()}", False))
        if not first:
            raise invalid(f"bad_words[{index}]", "has no tokens")
        sequences.append(first)
        if spaced not in {(), first}:
            sequences.append(spaced)
    if len(sequences) > MAX_BAD_SEQUENCES:
        raise invalid("bad_words", f"are {len(sequences)} token sequences, and {MAX_BAD_SEQUENCES} are allowed")
    return tuple(sequences)


def _ids(tokens: TokenBytes) -> tuple[int, ...]:
    return tuple(memoryview(tokens).cast("I"))


def _truncated(request: GenerateRequest, card: ModelCard, tokens: TokenBytes) -> TokenBytes:
    """Return the last tokens of the prompt: as many as `truncate_prompt` says.

    If it is -1, they are as many as fit into the model's context together with `max_tokens` tokens of the answer, or with one token
    if the client set no limit. A request for a vector needs no room for an answer.

    Raises:
        RequestRejected: INVALID_ARGUMENT; no token would be left.
    """
    kept = request.truncate_prompt
    assert kept is not None
    if kept == -1:
        answer = 1 if request.fill_context else max(1, request.sampling.max_tokens)
        kept = card.max_model_len - (answer if request.pooling is None else 0)
    if kept < 1:
        raise invalid("truncate_prompt", f"{kept} leaves nothing of the prompt")
    return tokens[-kept * TOKEN_BYTES :]


def _quoted(name: str) -> str:
    return repr(name if len(name) <= 100 else f"{name[:100]}…")


class _RequestTimes:
    """Measures the times and the usage of one request, for the metrics, the access log and the trace of the request."""

    def __init__(self, clock: Clock, counts: ModelRequests, entry: AccessEntry | None) -> None:
        self._clock = clock
        self.counts = counts
        self._entry = entry
        self.trace: RequestTrace | None = None  # None: the request is not traced
        self.began = clock.now()
        self._first: Nanos | None = None
        self._latest = self.began
        self._longest = 0
        self._steps = 0
        self._over = False
        # The model that serves the request, even if the request names none; empty until the request was checked.
        self.served_model = ModelName("")
        self.usage: Usage | None = None  # None: the request is not admitted yet, so the tenant is not charged
        # What was left of the tenant's rate limits after admission; None: the request is not admitted yet, or has no such limits.
        self.allowance: RateLimitStatus | None = None
        self._kv: tuple[KvPhase, ...] = ()

    def begin_trace(self, tracing: RequestTracing, request: GenerateRequest) -> None:
        self.trace = tracing.begin(traced_request(request), self.began)
        if self._entry is not None:
            self._entry.trace_id = self.trace.trace_id

    def admitted(self, prompt_tokens: int, allowance: RateLimitStatus | None) -> None:
        self.allowance = allowance
        self.usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=0, cached_tokens=0)

    def used(self, completion_tokens: int, cached_tokens: int, kv: tuple[KvPhase, ...], image_tokens: int = 0) -> None:
        """Note the tokens that the request used, even if its answer is incomplete.

        `image_tokens` are prompt tokens of images, which were not known at admission.
        """
        assert self.usage is not None
        self._kv = kv
        self.usage = structs.replace(
            self.usage,
            prompt_tokens=self.usage.prompt_tokens + image_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
        )

    def tokens(self) -> None:
        now = self._clock.now()
        if self._first is None:
            self._first = now
            self.counts.first_token.observe((now - self.began) / SECOND)
            if self._entry is not None:
                self._entry.first_token()
        else:
            self._longest = max(self._longest, now - self._latest)
        self._latest = now
        self._steps += 1

    def ended(self, outcome: Finish | Reason) -> None:
        if self._over:  # closing the iterator after `Finished` does not count as a cancellation
            return
        self._over = True
        answered = self._first is not None or isinstance(outcome, Finish)
        seconds = (self._clock.now() - self.began) / SECOND
        self.counts.ended(outcome, self._kv, self.usage, seconds, answered=answered)
        per_token = longest_gap = None
        if self._first is not None and self._steps > 1 and self.usage is not None:
            per_token = (self._latest - self._first) / SECOND / max(1, self.usage.completion_tokens - 1)
            longest_gap = self._longest / SECOND
            self.counts.gaps(per_token, longest_gap)
        if self._entry is not None:
            first = None if self._first is None else (self._first - self.began) / SECOND
            times = RequestTimes(whole=seconds, first_token=first, per_token=per_token, longest_gap=longest_gap)
            self._entry.write(outcome, usage=self.usage, kv=self._kv, model=self.served_model, times=times)
        if self.trace is not None:
            self.trace.ended(RequestEnd(outcome=outcome, usage=self.usage, first_token=self._first))


def _new_stream() -> int:
    """Return a random number for `ResumeClaims.stream`.

    It is not 0, because 0 means no answer key. It is at most 2**63, because the router adds the number of failed attempts to
    it (`LiveRequest.answer_key`), and the sum must fit into 64 bits.
    """
    # The number must be hard to guess where resume tokens are signed with a key that is no secret (`fleet.frontend.resume_tokens`, rule 4).
    return 1 + secrets.randbits(63)
