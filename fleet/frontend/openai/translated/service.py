"""Handlers of the translated APIs and of the token paths, for the HTTP port of a router."""

import uuid
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import partial
from http import HTTPStatus

import msgspec
from msgspec import structs

from fleet.core.clock import Clock
from fleet.core.errors import RequestRejected, draining_rejection
from fleet.core.ids import RequestId
from fleet.core.requests import Admitted, Delta, Finished, GenerateRequest, ModelCard, TokenPrompt
from fleet.core.system_clock import unix_seconds
from fleet.frontend.generation import Generation
from fleet.frontend.openai.bodies import HINT_HEADER_NAMES
from fleet.frontend.openai.relayed_paths import COUNT_TOKENS, MESSAGES, RESPONSES
from fleet.frontend.openai.requests import authorization_of, new_request_id, unused_id
from fleet.frontend.openai.resumable_stream import mark_last
from fleet.frontend.openai.translated.answer_events import AnswerEvents
from fleet.frontend.openai.translated.api import (
    AnswerStart,
    AnswerWriter,
    TranslatedApi,
    TranslatedRequest,
    rename_translated_field,
    without_needless_budget,
)
from fleet.frontend.openai.translated.messages import COUNT_TOKENS_API, MESSAGES_API
from fleet.frontend.openai.translated.responses import RESPONSES_API
from fleet.frontend.openai.translated.tokens import read_detokenize, read_tokenize, tokens_object
from fleet.net.http.errors import ErrorForm, send_http_error, send_rejection
from fleet.net.http.exchange import EVENT_STREAM, Exchange, rate_limit_headers
from fleet.net.http.server import RouteHandler
from fleet.net.status_codes import rename_field

JsonProblem = Callable[[Mapping[bytes, bytes]], str | None]
"""Function that returns an error message if a request's headers declare a body that is not uncompressed JSON; otherwise None."""


class TranslatedFrontend:
    """Serves the translated APIs (`api.py`) and the token paths (`tokens.py`)."""

    def __init__(
        self,
        generation: Generation,
        clock: Clock,
        is_draining: Callable[[], bool],
        json_problem: JsonProblem,
        *,
        refuses_unknown_fields: bool = False,
    ) -> None:
        self._generation = generation
        self._strict = refuses_unknown_fields
        self._clock = clock
        self._is_draining = is_draining
        self._json_problem = json_problem

    @property
    def routes(self) -> Mapping[str, Mapping[str, RouteHandler]]:
        """The handlers of the HTTP port, by path and method."""
        return {
            path: {"POST": partial(self._take, handler)}
            for path, handler in (
                (RESPONSES, self._respond),
                (MESSAGES, self._message),
                (COUNT_TOKENS, self._count_tokens),
                ("/tokenize", self._tokenize),
                ("/detokenize", self._detokenize),
            )
        }

    async def _take(self, handler: RouteHandler, exchange: Exchange) -> None:
        if (problem := self._json_problem(exchange.request.headers)) is not None:
            self._generation.metrics.unserved(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            send_http_error(exchange, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, problem)
        else:
            await handler(exchange)

    async def _respond(self, exchange: Exchange) -> None:
        await self._serve(exchange, RESPONSES_API)

    async def _message(self, exchange: Exchange) -> None:
        await self._serve(exchange, MESSAGES_API)

    async def _serve(self, exchange: Exchange, api: TranslatedApi) -> None:
        headers = exchange.request.headers
        request_id = new_request_id(headers, self._generation.serves)
        asked: TranslatedRequest | None = None
        events: AnswerEvents | None = None
        try:
            if self._is_draining():
                raise draining_rejection()
            hinted = None if HINT_HEADER_NAMES.isdisjoint(headers) else headers
            read, body = partial(api.read, strict=self._strict), exchange.request.body
            asked = await self._generation.read_body(read, body, request_id, self._clock.now(), hinted)
            unused = unused_id(asked.chat.request, request_id, self._generation.serves)
            if unused is not asked.chat.request:
                asked = structs.replace(asked, chat=structs.replace(asked.chat, request=unused))
            asked = without_needless_budget(asked, self._generation.limits_reasoning)
            if (tracing := self._generation.tracing) is not None:
                traced = structs.replace(asked.chat.request, trace=tracing.read(headers))
                asked = structs.replace(asked, chat=structs.replace(asked.chat, request=traced))
            if asked.chat.stream:
                events = AnswerEvents(asked.chat.seen, api=api.letter)
                await self._stream(exchange, asked, events)
            else:
                await self._collect(exchange, asked)
        except RequestRejected as refused:
            renamed = rename_field(refused, api.names)
            if asked is not None:
                renamed = rename_translated_field(refused, asked, api)
            sent = None if events is None else events.sent
            send_rejection(exchange, renamed, *exchange.id_headers(request_id), form=api.errors, events=sent)

    async def _stream(self, exchange: Exchange, asked: TranslatedRequest, written: AnswerEvents) -> None:
        request, seen = asked.chat.request, asked.chat.seen
        authorization = authorization_of(exchange.request.headers)
        if seen is not None and seen.is_whole:
            self._generation.check_resume_token(seen.resume, authorization, request.tenant)
            exchange.respond(HTTPStatus.NO_CONTENT, b"", headers=exchange.id_headers(request.id))
            return
        headers: tuple[tuple[str, str], ...] = (
            ("cache-control", "no-cache"),
            ("x-accel-buffering", "no"),  # without this header, nginx would buffer the events
        )
        async with aclosing(self._generation.generate(request, authorization)) as events:
            writer: AnswerWriter | None = None
            async for item in events:
                match item:
                    case Admitted():
                        written.follow(item)
                        writer = asked.writer(_start(item, written))
                        headers += (*exchange.id_headers(item.request_id), *rate_limit_headers(item.allowance))
                    case Delta():
                        assert writer is not None
                        written.follow(item)
                        if chunk := writer.chunk(item):
                            exchange.send(chunk, content_type=EVENT_STREAM, headers=headers)
                            await exchange.drained()
                    case Finished():
                        assert writer is not None
                        written.end()
                        exchange.end_events(mark_last(writer.last_chunks(item)), headers)

    async def _collect(self, exchange: Exchange, asked: TranslatedRequest) -> None:
        request = asked.chat.request
        headers = exchange.id_headers(request.id)
        async with aclosing(self._generation.generate(request, authorization_of(exchange.request.headers))) as events:
            writer: AnswerWriter | None = None
            async for item in events:
                match item:
                    case Admitted():
                        writer = asked.writer(_start(item, AnswerEvents()))
                        headers += rate_limit_headers(item.allowance)
                    case Delta():
                        assert writer is not None
                        writer.chunk(item)
                    case Finished():
                        assert writer is not None
                        exchange.respond(HTTPStatus.OK, writer.whole(item), headers=headers)

    async def _count_tokens(self, exchange: Exchange) -> None:
        request_id = RequestId(uuid.uuid4().hex)
        try:
            read = partial(COUNT_TOKENS_API.read, strict=self._strict)
            body, now = exchange.request.body, self._clock.now()
            asked = await self._generation.read_body(read, body, request_id, now, None)
            _, token_ids = await self._tokens(exchange, asked.chat.request)
        except RequestRejected as refused:
            _reject(exchange, refused, COUNT_TOKENS_API.errors)
            return
        exchange.respond(HTTPStatus.OK, msgspec.json.encode({"input_tokens": len(token_ids)}))

    async def _tokenize(self, exchange: Exchange) -> None:
        try:
            body, request_id = exchange.request.body, RequestId(uuid.uuid4().hex)
            asked = await self._generation.read_body(read_tokenize, body, request_id, self._clock.now())
            card, token_ids = await self._tokens(exchange, asked.request)
            strings = await self._generation.token_texts(card.name, token_ids) if asked.with_strings else None
        except RequestRejected as refused:
            _reject(exchange, refused)
            return
        exchange.respond(HTTPStatus.OK, tokens_object(token_ids, card.max_model_len, strings))

    async def _detokenize(self, exchange: Exchange) -> None:
        try:
            model, tokens = await self._generation.read_body(read_detokenize, exchange.request.body)
            asked = GenerateRequest(id=RequestId(uuid.uuid4().hex), model=model, prompt=TokenPrompt(tokens))
            text = await self._generation.text_of(asked, authorization_of(exchange.request.headers))
        except RequestRejected as refused:
            _reject(exchange, refused)
            return
        exchange.respond(HTTPStatus.OK, msgspec.json.encode({"prompt": text}))

    async def _tokens(self, exchange: Exchange, request: GenerateRequest) -> tuple[ModelCard, list[int]]:
        """Return the model card and the prompt's token ids of a request."""
        card, tokens = await self._generation.tokens_of(request, authorization_of(exchange.request.headers))
        return card, memoryview(tokens).cast("I").tolist()


FIELD_NAMES = {"text": "prompt", "token_ids": "tokens", "chat.messages": "messages", "chat.tools": "tools"}


def _reject(exchange: Exchange, refused: RequestRejected, form: ErrorForm | None = None) -> None:
    send_rejection(exchange, rename_field(refused, FIELD_NAMES), form=form)


def _start(admitted: Admitted, written: AnswerEvents) -> AnswerStart:
    assert admitted.sampling is not None
    return AnswerStart(
        request_id=admitted.resumes or admitted.request_id,
        model=admitted.model,
        prompt_tokens=admitted.prompt_tokens,
        sampling=admitted.sampling,
        created=admitted.began or int(unix_seconds()),
        events=written,
    )
