"""Bodies of the APIs for vectors: embeddings as in the OpenAI API, reranking as in Jina's and Cohere's, scores as in vLLM's.

A field that would change the answer and is not supported is refused, unless its value has no effect.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import (
    MAX_VECTOR_NUMBERS,
    GenerateRequest,
    Pooling,
    PoolingTask,
    Prompt,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from fleet.core.validation import checked_request_id
from fleet.frontend.openai.bodies import FleetOptions, header_hints, unsupported
from fleet.frontend.openai.requests import combined_priority, decode_body, invalid_body, read_token_ids
from kvstore.tracing.context import TraceContext

MAX_INPUTS = 2048  # OpenAI's limit for the number of inputs of one request; a request with more is refused


class VectorBody(Struct, frozen=True, kw_only=True):
    """Fields that the bodies of all APIs for vectors share. Null means the same as an absent field."""

    model: str | None = None
    priority: int | None = None  # vLLM's field: a request with a lower number runs earlier
    request_id: str | None = None
    use_activation: bool | None = None  # vLLM's field; false: embeddings are not normalised, and scores are logits
    fleet: FleetOptions | None = None
    # Fields that are accepted and ignored.
    user: Any = None
    # Fields that are not supported: a value that `ACCEPTED_VALUES` does not list is refused.
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    padding: Any = None
    mm_processor_kwargs: Any = None
    cache_salt: Any = None


class ClassifyBody(VectorBody, frozen=True, kw_only=True):
    input: str | list[Any]
    add_special_tokens: bool | None = None
    messages: Any = None  # not supported: only null is accepted


class EmbeddingsBody(ClassifyBody, frozen=True, kw_only=True):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_VECTOR_NUMBERS)] | None = None
    # Fields that are not supported, except with the values in `ACCEPTED_VALUES`.
    embed_dtype: Any = None
    endianness: Any = None
    normalize: Any = None


class PoolingBody(EmbeddingsBody, frozen=True, kw_only=True):
    task: str | None = None


class RerankBody(VectorBody, frozen=True, kw_only=True):
    query: str
    documents: list[Any]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    # Fields that are not supported, except with the values in `ACCEPTED_VALUES`.
    max_tokens_per_doc: Any = None
    max_tokens_per_query: Any = None
    max_chunks_per_doc: Any = None
    rank_fields: Any = None
    instruction: Any = None
    chat_template_kwargs: Any = None


class ScoreBody(VectorBody, frozen=True, kw_only=True):
    """Body of ``POST /v1/score``: two lists of texts, under a pair of names that vLLM accepts (`SCORE_FIELDS`)."""

    text_1: str | list[Any] | None = None
    text_2: str | list[Any] | None = None
    queries: str | list[Any] | None = None
    documents: str | list[Any] | None = None
    items: str | list[Any] | None = None
    data_1: str | list[Any] | None = None
    data_2: str | list[Any] | None = None
    # Fields that are not supported, except with the values in `ACCEPTED_VALUES`.
    max_tokens_per_doc: Any = None
    max_tokens_per_query: Any = None
    instruction: Any = None
    chat_template_kwargs: Any = None


SCORE_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

ACCEPTED_VALUES: Mapping[str, tuple[object, ...]] = {
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
    "cache_salt": (),
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (True,),
    "max_tokens_per_doc": (0,),
    "max_tokens_per_query": (0,),
    "max_chunks_per_doc": (),
    "rank_fields": (["text"], []),
    "instruction": (),
    "chat_template_kwargs": ({},),
}
"""Unsupported fields, each with the values that are accepted because they have no effect. Null is always accepted."""

_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)
_CLASSIFY = msgspec.json.Decoder(ClassifyBody)
_POOLING = msgspec.json.Decoder(PoolingBody)
_RERANK = msgspec.json.Decoder(RerankBody)
_SCORE = msgspec.json.Decoder(ScoreBody)
_NO_OPTIONS = FleetOptions()

Headers = Mapping[bytes, bytes]


class VectorRequest(Struct, frozen=True, kw_only=True):
    """Values that all prompts of one HTTP request share."""

    id: RequestId
    model: ModelName
    options: FleetOptions
    priority: int
    deadline: Nanos | None
    activation: bool | None
    trace: TraceContext | None = None  # None: the router does not trace

    def prompted(self, prompt: Prompt, task: PoolingTask, **pooling: Any) -> GenerateRequest:
        """Return the request to the router for one prompt, with the id of the HTTP request.

        Args:
            prompt: The prompt.
            task: What the model has to compute for the prompt.
            pooling: Further fields of `Pooling`.
        """
        return GenerateRequest(
            id=self.id,
            model=self.model,
            prompt=prompt,
            sampling=Sampling(max_tokens=0),
            pooling=Pooling(task=task, activation=self.activation, **pooling),
            priority=self.priority,
            deadline=self.deadline,
            session=self.options.session,
            tenant=self.options.tenant,
            pin=self.options.pin,
            labels=self.options.labels,
            trace=self.trace,
            whole=True,
        )


class InputsRequest(Struct, frozen=True, kw_only=True):
    """Prompts, for each of which the client wants a vector."""

    shared: VectorRequest
    prompts: tuple[Prompt, ...]
    base64: bool = False
    dimensions: int = 0  # number of elements to return of each embedding; 0: all
    task: str = ""  # task that the model must have; empty: any


class ScoringRequest(Struct, frozen=True, kw_only=True):
    """Pairs of texts to score: each text of `firsts` with that of `seconds` at the same index.

    If `firsts` has a single text, it forms a pair with each text of `seconds`.
    """

    shared: VectorRequest
    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    second_field: str  # name of the field with `seconds` in the body, for errors
    top: int = 0  # number of the best documents to return; 0: all
    returns_documents: bool = True


def read_embeddings(body: bytes, request_id: RequestId, now: Nanos, headers: Headers | None) -> InputsRequest:
    """Read the body of ``POST /v1/embeddings``.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    return _inputs(decode_body(_EMBEDDINGS, body), request_id, now, headers)


def read_classify(body: bytes, request_id: RequestId, now: Nanos, headers: Headers | None) -> InputsRequest:
    """Read the body of ``POST /classify``; arguments and errors are those of `read_embeddings`."""
    return _inputs(decode_body(_CLASSIFY, body), request_id, now, headers)


def read_pooling(body: bytes, request_id: RequestId, now: Nanos, headers: Headers | None) -> InputsRequest:
    """Read the body of ``POST /pooling``; arguments and errors are those of `read_embeddings`."""
    return _inputs(decode_body(_POOLING, body), request_id, now, headers)


def _inputs(asked: ClassifyBody, request_id: RequestId, now: Nanos, headers: Headers | None) -> InputsRequest:
    _refuse_unsupported(asked)
    read = InputsRequest(
        shared=_shared(asked, request_id, now, headers),
        prompts=_prompts(asked.input, special=asked.add_special_tokens is not False),
    )
    if isinstance(asked, EmbeddingsBody):
        task = (asked.task or "") if isinstance(asked, PoolingBody) else ""
        base64 = asked.encoding_format == "base64"
        read = structs.replace(read, base64=base64, dimensions=asked.dimensions or 0, task=task)
    return read


def read_rerank(body: bytes, request_id: RequestId, now: Nanos, headers: Headers | None) -> ScoringRequest:
    """Read the body of ``POST /v1/rerank``.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    asked = decode_body(_RERANK, body)
    _refuse_unsupported(asked)
    documents = tuple(_document(index, each) for index, each in enumerate(_within_limit("documents", asked.documents)))
    return ScoringRequest(
        shared=_shared(asked, request_id, now, headers),
        firsts=_filled("query", (asked.query,)),
        seconds=_filled("documents", documents),
        second_field="documents",
        top=asked.top_n or 0,
        returns_documents=asked.return_documents is not False,
    )


def read_score(body: bytes, request_id: RequestId, now: Nanos, headers: Headers | None) -> ScoringRequest:
    """Read the body of ``POST /v1/score``.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    asked = decode_body(_SCORE, body)
    _refuse_unsupported(asked)
    given = [names for names in SCORE_FIELDS if all(getattr(asked, name) is not None for name in names)]
    if len(given) != 1:
        raise invalid("text_1", f"send one of the pairs {', '.join(f'{one} and {two}' for one, two in SCORE_FIELDS)}")
    firsts, seconds = (_texts(name, getattr(asked, name)) for name in given[0])
    if len(firsts) not in (1, len(seconds)):
        raise invalid(given[0][0], f"has {len(firsts)} texts, and {given[0][1]} {len(seconds)}; send one, or as many")
    return ScoringRequest(
        shared=_shared(asked, request_id, now, headers), firsts=firsts, seconds=seconds, second_field=given[0][1]
    )


def _shared(body: VectorBody, request_id: RequestId, now: Nanos, headers: Headers | None) -> VectorRequest:
    options = (body.fleet or _NO_OPTIONS) if headers is None else header_hints(headers, body.fleet)[0]
    return VectorRequest(
        id=request_id if body.request_id is None else checked_request_id(body.request_id),
        model=ModelName(body.model or ""),
        options=options,
        priority=options.priority if body.priority is None else combined_priority(body.priority, options),
        deadline=Nanos(now + options.timeout_ms * MILLISECOND) if options.timeout_ms else None,
        activation=body.use_activation,
    )


def _refuse_unsupported(body: VectorBody) -> None:
    for field, accepted in ACCEPTED_VALUES.items():
        value = getattr(body, field, None)
        if value is not None and value not in accepted:
            raise unsupported(field, accepted)


def _prompts(given: str | list[Any], *, special: bool) -> tuple[Prompt, ...]:
    """Return the prompts of an embeddings request: a text, a list of texts, token ids, or a list of lists of token ids."""
    match given:
        case str():
            return (TextPrompt(_filled("input", (given,))[0], special),)
        case [str(), *_]:
            return tuple(TextPrompt(each, special) for each in _texts("input", given))
        case [list(), *_]:
            _within_limit("input", given)
            return tuple(_tokens(each, f"input[{index}]") for index, each in enumerate(given))
        case _:
            return (_tokens(given, "input"),)


def _tokens(ids: object, field: str) -> TokenPrompt:
    if not isinstance(ids, list):
        raise invalid(field, "must be a list of token ids, as the first input")
    if not ids:
        raise invalid(field, "must not be empty")
    return TokenPrompt(read_token_ids(ids, field))


def _texts(field: str, given: str | list[Any]) -> tuple[str, ...]:
    try:
        texts = msgspec.convert([given] if isinstance(given, str) else _within_limit(field, given), tuple[str, ...])
    except msgspec.ValidationError as error:
        raise invalid_body(error, field) from error
    return _filled(field, texts)


def _document(index: int, document: object) -> str:
    match document:
        case str(text) | {"text": str(text)}:
            return text
        case _:
            raise invalid(f"documents[{index}]", 'must be a text, or an object as {"text": TEXT}')


def _within_limit(field: str, given: list[Any]) -> list[Any]:
    if len(given) > MAX_INPUTS:
        raise invalid(field, f"has {len(given)} entries, and {MAX_INPUTS} are allowed")
    return given


def _filled(field: str, texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        raise invalid(field, "must not be empty")
    for index, text in enumerate(texts):
        if not text:
            raise invalid(field if len(texts) == 1 else f"{field}[{index}]", "must not be empty")
    return tuple(texts)
