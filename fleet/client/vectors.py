"""Vectors: build the requests of a client for the vectors of texts, and read the vectors from the answers."""

from collections.abc import Iterator, Sequence
from typing import TypedDict, cast

import numpy as np
from msgspec import Struct

from fleet.client.errors import InvalidRequest, ServerError
from fleet.client.requests import Options, build_message, refuse_unknown
from fleet.client.results import StreamedAnswer
from fleet.core.errors import Reason
from fleet.core.requests import Pooling, PoolingTask
from fleet.v1 import inference_pb2 as pb

AT_ONCE = 64
"""Maximum number of requests of one call that run at the same time, so that a long list does not fill the admission queue."""


class VectorOptions(TypedDict, total=False):
    """Lists the keyword arguments of `embed` and `classify`; proto/fleet/v1/inference.proto explains them."""

    model: str
    priority: int
    session: str
    tenant: str
    pin: str
    labels: Sequence[str]
    timeout_seconds: float | None  # time limit for each text; None means no limit


class VectorResult(Struct, frozen=True, kw_only=True):
    """Holds the vector of one text."""

    request_id: str
    model: str
    vector: tuple[float, ...]  # the embedding, or a number for each class
    prompt_tokens: int
    worker_id: str


def build_vector_messages(
    texts: Sequence[str | Sequence[int]], pooling: Pooling, options: VectorOptions
) -> Iterator[pb.GenerateRequest]:
    """Yield the request message for each text, in the order of `texts`.

    Raises:
        InvalidRequest: `texts` is not a list of texts or lists of token ids, an option does not exist, or a value does not
            fit its field.
    """
    dimensions = ("dimensions",) if pooling.task is PoolingTask.EMBED else ()
    refuse_unknown(options, (*VectorOptions.__annotations__, "activation", *dimensions))
    if not _is_list(texts) or not all(isinstance(text, str) or _is_token_ids(text) for text in texts):
        message = "texts: must be a list of texts, or of lists of token ids"
        raise InvalidRequest(message, Reason.INVALID_ARGUMENT, field="text")
    for text in texts:
        yield build_message(text, cast(Options, options), pooling)


def _is_token_ids(value: object) -> bool:
    return _is_list(value) and all(isinstance(token, int | np.integer) for token in cast(Sequence[object], value))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | bytearray | memoryview)


def vector_result(answer: StreamedAnswer) -> VectorResult:
    """Return the vector of a complete answer.

    Raises:
        ServerError: The router does not know requests for vectors, and has generated text.
    """
    result = answer.result
    vector = answer.vector
    if not vector:
        raise ServerError("the router answered without a vector; it is older than this client")
    return VectorResult(
        request_id=result.request_id,
        model=result.model,
        vector=tuple(np.frombuffer(vector, "<f4").tolist()),
        prompt_tokens=result.usage.prompt_tokens,
        worker_id=result.kv[-1].worker_id if result.kv else "",
    )
