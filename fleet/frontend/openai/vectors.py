"""APIs for vectors of Fleet's own workers: ``/v1/embeddings``, ``/v1/rerank``, ``/v1/score``, ``/classify`` and ``/pooling``.

Rules:

1. To the router, each prompt of an HTTP request is a request of its own, with the same API key and deadline. It counts
   against the tenant's limits as one request. The first one has the id of the HTTP request. If one prompt fails, the
   other prompts are cancelled, and the HTTP request fails with the error of this prompt.
2. At most `CONCURRENT` prompts of one HTTP request are submitted at a time, so that a long list does not fill the
   admission queue. Prompts begin in several turns of the event loop (`PromptPace`), so that tokenizing them does not block
   the loop for long.
3. A model with the task classify reads each pair of texts as one prompt and gives its score. For a model with the task embed,
   the score of a pair is the cosine of the angle between the embeddings of both texts. Each text is embedded once.
"""

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Struct, structs

from fleet.core.clock import Clock, Nanos
from fleet.core.errors import Reason, RequestRejected, draining_rejection, invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    Admitted,
    Delta,
    Finished,
    GenerateRequest,
    ModelCard,
    PairForm,
    PoolingTask,
    TextPrompt,
    TokenPrompt,
    Vector,
)
from fleet.core.system_clock import unix_seconds
from fleet.core.validation import validate_task
from fleet.frontend.generation import Generation, PromptPace
from fleet.frontend.openai.answers import Json
from fleet.frontend.openai.bodies import HINT_HEADER_NAMES, OPENAI_FIELD_NAMES
from fleet.frontend.openai.branches import first_error
from fleet.frontend.openai.relayed_paths import CLASSIFY, EMBEDDINGS, POOLING, RERANK_PATHS, SCORE_PATHS
from fleet.frontend.openai.requests import authorization_of, new_request_id, numbered_request_id
from fleet.frontend.openai.vector_bodies import (
    Headers,
    InputsRequest,
    ScoringRequest,
    VectorRequest,
    read_classify,
    read_embeddings,
    read_pooling,
    read_rerank,
    read_score,
)
from fleet.net.http.errors import send_http_error, send_rejection
from fleet.net.http.exchange import Exchange, rate_limit_headers
from fleet.net.http.server import RouteHandler
from fleet.net.status_codes import rename_field

Read = TypeVar("Read", InputsRequest, ScoringRequest)

CONCURRENT = 64
NUMBER_BYTES = 4
NUMBERS_PER_ENTRY = 32  # writing this many numbers of a vector takes as long as writing one log probability

FIELD_NAMES = {**OPENAI_FIELD_NAMES, "pooling.dimensions": "dimensions", "pooling": "use_activation"}


class PromptVector(Struct, frozen=True, kw_only=True):
    """The vector that a worker has computed for one prompt."""

    vector: Vector
    admitted: Admitted
    tokens: int  # number of tokens of the prompt
    worker_id: str

    @property
    def numbers(self) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        return np.frombuffer(self.vector, "<f4")


class VectorFrontend:
    """Serves the HTTP paths of the APIs for vectors, for Fleet's own workers."""

    def __init__(
        self,
        generation: Generation,
        clock: Clock,
        is_draining: Callable[[], bool],
        json_problem: Callable[[Mapping[bytes, bytes]], str | None],
    ) -> None:
        """Create the frontend.

        Args:
            generation: Serves the requests.
            clock: Clock for deadlines.
            is_draining: Returns whether no more requests are taken.
            json_problem: Returns an error message if a request's headers declare a body that is not uncompressed JSON; otherwise None.
        """
        self._generation = generation
        self._clock = clock
        self._is_draining = is_draining
        self._json_problem = json_problem

    @property
    def routes(self) -> Mapping[str, Mapping[str, RouteHandler]]:
        """The handlers of the HTTP port, by path and method."""
        handlers = {EMBEDDINGS: self._embed, CLASSIFY: self._classify, POOLING: self._pool}
        handlers |= dict.fromkeys(RERANK_PATHS, self._rerank)
        return {
            path: {"POST": handler} for path, handler in (handlers | dict.fromkeys(SCORE_PATHS, self._score)).items()
        }

    async def _embed(self, exchange: Exchange) -> None:
        async with self._answering(exchange) as asked:
            if asked is None:
                return
            request = await self._read(exchange, read_embeddings, asked)
            found = await self._vectors_of(exchange, request, PoolingTask.EMBED)
            write = _base64 if request.base64 else _floats

            def answer() -> Json:
                data = [
                    {"index": index, "object": "embedding", "embedding": write(each)}
                    for index, each in enumerate(found)
                ]
                return {"object": "list", "data": data}

            await self._respond(exchange, found, answer)

    async def _classify(self, exchange: Exchange) -> None:
        async with self._answering(exchange) as asked:
            if asked is None:
                return
            request = await self._read(exchange, read_classify, asked)
            found = await self._vectors_of(exchange, request, PoolingTask.CLASSIFY)
            names = self._generation.class_names(found[0].admitted.model)

            def answer() -> Json:
                return {"object": "list", "data": [_classified(index, each, names) for index, each in enumerate(found)]}

            await self._respond(exchange, found, answer)

    async def _pool(self, exchange: Exchange) -> None:
        async with self._answering(exchange) as asked:
            if asked is None:
                return
            request = await self._read(exchange, read_pooling, asked)
            card = self._card(exchange, request.shared)
            task = PoolingTask.EMBED if card.pooling is None else card.pooling.task
            if request.task not in ("", task) and card.pooling is not None:
                raise invalid(
                    "task", f"{request.task!r} is not the task of {card.name!r}, which is {task}; leave it out"
                )
            found = await self._vectors_of(exchange, request, task)
            write = _base64 if request.base64 else _floats

            def answer() -> Json:
                data = [{"index": index, "object": "pooling", "data": write(each)} for index, each in enumerate(found)]
                return {"object": "list", "data": data}

            await self._respond(exchange, found, answer)

    async def _vectors_of(self, exchange: Exchange, asked: InputsRequest, task: PoolingTask) -> Sequence[PromptVector]:
        """Return the vectors of the inputs, in their order.

        Raises:
            RequestRejected: The API key is wrong, the model is unknown or has another task, the tenant may not send so many inputs, or an
                input failed.
        """
        requests = [asked.shared.prompted(prompt, task, dimensions=asked.dimensions) for prompt in asked.prompts]
        validate_task(requests[0].pooling, self._card(exchange, asked.shared))
        self._check_count(exchange, requests[0], len(requests), "input")
        return await self._vectors(exchange, requests, "input")

    async def _rerank(self, exchange: Exchange) -> None:
        async with self._answering(exchange) as asked:
            if asked is None:
                return
            request = await self._read(exchange, read_rerank, asked)
            scores, found = await self._scores(exchange, request)
            order = sorted(range(len(scores)), key=lambda index: -scores[index])
            results: list[Json] = []
            for index in order[: request.top or None]:
                document = {"document": {"text": request.seconds[index]}} if request.returns_documents else {}
                results.append({"index": index, **document, "relevance_score": scores[index]})
            await self._respond(exchange, found, lambda: {"results": results})

    async def _score(self, exchange: Exchange) -> None:
        async with self._answering(exchange) as asked:
            if asked is None:
                return
            request = await self._read(exchange, read_score, asked)
            scores, found = await self._scores(exchange, request)
            data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
            await self._respond(exchange, found, lambda: {"object": "list", "data": data})

    @asynccontextmanager
    async def _answering(self, exchange: Exchange) -> AsyncIterator[tuple[RequestId, Nanos, Headers | None] | None]:
        """Yield the arguments for the reader of a body, or None if the request was already answered.

        The arguments are the request id, the instant of arrival, and the headers if there are hints among them. A
        rejection that is raised within the context is sent as the answer.

        Raises:
            RequestRejected: DRAINING; the router takes no more requests.
        """
        if self._is_draining():
            raise draining_rejection()
        headers = exchange.request.headers
        if (problem := self._json_problem(headers)) is not None:
            self._generation.metrics.unserved(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
            send_http_error(exchange, HTTPStatus.UNSUPPORTED_MEDIA_TYPE, problem)
            yield None
            return
        request_id = new_request_id(headers, self._generation.serves)
        try:
            yield request_id, self._clock.now(), None if HINT_HEADER_NAMES.isdisjoint(headers) else headers
        except RequestRejected as refused:
            send_rejection(exchange, rename_field(refused, FIELD_NAMES), ("x-request-id", request_id))

    async def _read(
        self, exchange: Exchange, read: Callable[..., Read], asked: tuple[RequestId, Nanos, Headers | None]
    ) -> Read:
        """Return the request in the body, with its trace and an id that no other request has taken meanwhile."""
        request = await self._generation.read_body(read, exchange.request.body, *asked)
        if request.shared.id == asked[0] and self._generation.serves(asked[0]):
            shared = structs.replace(request.shared, id=RequestId(uuid.uuid4().hex))
            request = structs.replace(request, shared=shared)
        if (tracing := self._generation.tracing) is not None:
            shared = structs.replace(request.shared, trace=tracing.read(exchange.request.headers))
            request = structs.replace(request, shared=shared)
        return request

    def _card(self, exchange: Exchange, shared: VectorRequest) -> ModelCard:
        authorization = authorization_of(exchange.request.headers)
        return self._generation.card_of(shared.model, authorization, shared.options.tenant)

    def _check_count(self, exchange: Exchange, first: GenerateRequest, count: int, field: str) -> None:
        """Check that the tenant's limit of requests per minute allows `count` prompts, before any is tokenized.

        `first` is the request for the first prompt.
        """
        self._generation.check_count(first, authorization_of(exchange.request.headers), count, field)

    async def _scores(
        self, exchange: Exchange, asked: ScoringRequest
    ) -> tuple[Sequence[float], Sequence[PromptVector]]:
        """Return the scores of the pairs, and the vectors from which the scores were computed."""
        card = self._card(exchange, asked.shared)
        if card.pooling is not None and card.pooling.task is PoolingTask.CLASSIFY:
            return await self._scores_of_pairs(exchange, asked, card)
        texts = list(dict.fromkeys((*asked.firsts, *asked.seconds)))
        requests = [asked.shared.prompted(TextPrompt(text), PoolingTask.EMBED) for text in texts]
        validate_task(requests[0].pooling, card)
        self._check_count(exchange, requests[0], len(requests), asked.second_field)
        found = await self._vectors(exchange, requests, "")
        by_text = dict(zip(texts, (each.numbers for each in found), strict=True))
        firsts = asked.firsts * (len(asked.seconds) if len(asked.firsts) == 1 else 1)
        return [_cosine(by_text[one], by_text[other]) for one, other in zip(firsts, asked.seconds, strict=True)], found

    async def _scores_of_pairs(
        self, exchange: Exchange, asked: ScoringRequest, card: ModelCard
    ) -> tuple[Sequence[float], Sequence[PromptVector]]:
        assert card.pooling is not None
        if card.pooling.pairs is PairForm.NONE:
            raise invalid(
                "model", f"{card.name!r} scores no pairs: it has several classes, or needs a template of its own"
            )
        firsts = asked.firsts * (len(asked.seconds) if len(asked.firsts) == 1 else 1)
        pairs = list(zip(firsts, asked.seconds, strict=True))
        first = asked.shared.prompted(TextPrompt("".join(pairs[0])), PoolingTask.CLASSIFY)
        self._check_count(exchange, first, len(pairs), asked.second_field)
        if card.pooling.pairs is PairForm.JOINED:
            requests = [asked.shared.prompted(TextPrompt(one + other), PoolingTask.CLASSIFY) for one, other in pairs]
        else:
            requests = [
                asked.shared.prompted(TokenPrompt(tokens), PoolingTask.CLASSIFY, first_tokens=boundary)
                for tokens, boundary in await self._generation.pair_tokens(ModelName(card.name), pairs)
            ]
        found = await self._vectors(exchange, requests, "")
        return [float(each.numbers[0]) for each in found], found

    async def _vectors(
        self, exchange: Exchange, requests: Sequence[GenerateRequest], field: str
    ) -> Sequence[PromptVector]:
        """Return the vectors of all prompts, in their order.

        Args:
            exchange: The exchange, with the client's key.
            requests: The request of each prompt.
            field: Name of the list of prompts in the body, for errors; empty if the body has no such list.

        Raises:
            RequestRejected: A prompt failed, and the others have ended.
        """
        room, pace = asyncio.Semaphore(CONCURRENT), PromptPace()
        requests = [
            structs.replace(each, id=numbered_request_id(each.id, number, self._generation.serves)) if number else each
            for number, each in enumerate(requests)
        ]
        authorization = authorization_of(exchange.request.headers)

        async def serve(number: int) -> PromptVector:
            try:
                return await self._vector(requests[number], authorization)
            except RequestRejected as refused:
                named = field if len(requests) == 1 else f"{field}[{number}]"
                raise rename_field(refused, {"text": named, "token_ids": named} if field else {}) from refused
            finally:
                room.release()

        running = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, each in enumerate(requests):
                    await room.acquire()
                    await pace.before(each.prompt)
                    running.append(tasks.create_task(serve(number)))
        except ExceptionGroup as group:
            raise first_error(group) from None
        return [each.result() for each in running]

    async def _vector(self, request: GenerateRequest, authorization: str) -> PromptVector:
        admitted: Admitted | None = None
        vector = b""
        async with aclosing(self._generation.generate(request, authorization)) as events:
            async for event in events:
                match event:
                    case Admitted():
                        admitted = event
                    case Delta():
                        vector = event.vector
                    case Finished(usage=usage, kv=phases):
                        if admitted is None or not vector:
                            raise RequestRejected(Reason.INTERNAL, "the worker ended without a vector")
                        return PromptVector(
                            vector=vector,
                            admitted=admitted,
                            tokens=usage.prompt_tokens,
                            worker_id=phases[-1].worker_id if phases else "",
                        )
        raise AssertionError("a request ends with `Finished`")

    async def _respond(self, exchange: Exchange, found: Sequence[PromptVector], answer: Callable[[], Json]) -> None:
        """Send an answer: the fields that all paths share, and the fields that `answer` returns.

        If there are many vectors, they are converted to JSON in a thread.
        """
        admitted = found[0].admitted
        tokens = sum(each.tokens for each in found)

        def content() -> bytes:
            return msgspec.json.encode(
                {
                    "id": admitted.request_id,
                    "created": int(unix_seconds()),
                    "model": admitted.model,
                    **answer(),
                    "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                    "fleet": {"workers": list(dict.fromkeys(each.worker_id for each in found))},
                }
            )

        headers = (("x-request-id", admitted.request_id), *rate_limit_headers(found[-1].admitted.allowance))
        numbers = sum(len(each.vector) for each in found) // NUMBER_BYTES
        formatted = await self._generation.format_answer(content, numbers // NUMBERS_PER_ENTRY)
        exchange.respond(HTTPStatus.OK, formatted, headers=headers)


def _classified(index: int, found: PromptVector, names: Mapping[int, str]) -> Json:
    """Return the classes of one input as vLLM does; a class without a name gets Hugging Face's name, such as ``LABEL_0``."""
    best = int(np.argmax(found.numbers))
    label = names.get(best, f"LABEL_{best}")
    return {"index": index, "label": label, "probs": _floats(found), "num_classes": len(found.numbers)}


def _floats(found: PromptVector) -> list[float]:
    return found.numbers.tolist()


def _base64(found: PromptVector) -> str:
    return base64.b64encode(found.vector).decode()


def _cosine(
    one: "np.ndarray[tuple[int], np.dtype[np.float32]]", other: "np.ndarray[tuple[int], np.dtype[np.float32]]"
) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them has the length 0."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.dot(one, other)) / lengths if lengths else 0.0
