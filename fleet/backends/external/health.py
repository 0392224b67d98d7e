"""Health checks, trial requests and tokenizer check of an external backend.

`fleet.backends.external.backend` decides when a check is sent, and what follows from its result (rules 1 and 2 there).
A trial request asks for the shortest possible answer. It shows whether the engine behind the HTTP server still works.
"""

import logging

import msgspec
from msgspec import Struct

from fleet.backends.external.http_client import (
    FIRST_SERVER_ERROR,
    BackendUnreachable,
    OutOfSockets,
    ServerAddress,
    http_request,
)
from fleet.backends.external.silence import TrialOutcome
from fleet.core.ids import ModelName
from fleet.frontend.openai.relayed_paths import CHAT, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from fleet.frontend.text.tokenizer_check import SAMPLE_TEXTS, TokenizerMatch, compare_tokens, tokenize_request_body
from fleet.router.ports import TextCodec
from fleet.router.settings.router import OpenAiWorkerSettings

log = logging.getLogger(__name__)

NO_SUCH_PATH = frozenset({404, 405, 501})
OK = 200
TRIAL_TEXT = "Hi"

ListedModel = dict[str, object]
"""A model object from a server's list ``GET /v1/models``; the router passes it on to clients unchanged."""


class ModelList(Struct):
    """The answer to ``GET /v1/models``."""

    data: list[ListedModel]


_MODEL_LIST = msgspec.json.Decoder(ModelList)


class ServerHealth:
    """Sends health checks to one server, lists its models, and compares its tokenizer with the router's."""

    def __init__(
        self,
        settings: OpenAiWorkerSettings,
        address: ServerAddress,
        connect_timeout_seconds: float,
        codec: TextCodec | None,
    ) -> None:
        self._settings = settings
        self._address = address
        self._within_seconds = max(settings.probe_seconds, connect_timeout_seconds)
        self._codec = codec
        self.tokenises = TokenizerMatch.UNKNOWN
        self.cause = ""
        """Result of the last health check for log messages: the error, or the status of the answer; empty before the first check."""

    async def healthy(self) -> bool | None:
        """Send a health check.

        If the server does not know the path `health_path`, the check asks for its list of models instead. Return True if
        the server answered with a status below 500, False if it did not, and None if no socket was left.
        """
        try:
            status, _ = await self._ask("GET", self._settings.health_path)
            if status in NO_SUCH_PATH:
                status, _ = await self._ask("GET", "/v1/models")
        except OutOfSockets:
            return None
        except BackendUnreachable as error:
            self.cause = str(error)
            return False
        self.cause = f"it answered with status {status}"
        return status < FIRST_SERVER_ERROR

    async def compare_tokenizers(self) -> None:
        """Let the server tokenize the sample texts, compare its tokens with those of the router's codec, and set `tokenises`.

        Do nothing if the router has no codec for the model.
        """
        if (codec := self._codec) is None:
            return
        settings, tokenises = self._settings, TokenizerMatch.UNKNOWN
        for text in SAMPLE_TEXTS:
            try:
                status, answer = await self._ask(
                    "POST", "/tokenize", tokenize_request_body(ModelName(settings.model), text)
                )
            except BackendUnreachable:
                break
            if status != OK or (tokenises := compare_tokens(codec, text, answer)) is not TokenizerMatch.ALIKE:
                break
        self.tokenises = tokenises
        if tokenises is TokenizerMatch.OTHERWISE:
            context = {"worker": settings.worker_id, "url": settings.url, "tokenizer": settings.tokenizer}
            log.error(
                "tokenizer check failed, `tokenizer` differs from that of the server; set it to the server's",
                extra=context,
            )

    async def model_objects(self) -> list[ListedModel]:
        """Return the models that the server lists; an empty list if it does not answer or has no list."""
        try:
            status, answer = await self._ask("GET", "/v1/models")
            return _MODEL_LIST.decode(answer).data if status == OK else []
        except (BackendUnreachable, msgspec.DecodeError, UnicodeDecodeError):
            return []

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        return await http_request(self._address, method, path, body, within_seconds=self._within_seconds)


async def try_request(address: ServerAddress, path: str, model: str, within_seconds: float) -> TrialOutcome:
    """Send a trial request to `path`, with a body that fits the path, and return its outcome."""
    try:
        status, _ = await http_request(address, "POST", path, _trial_body(path, model), within_seconds=within_seconds)
    except BackendUnreachable:
        return TrialOutcome.FAILED
    if status == OK:
        return TrialOutcome.ANSWERED
    return TrialOutcome.FAILED if status >= FIRST_SERVER_ERROR else TrialOutcome.REFUSED


_INPUT: dict[str, object] = {"input": TRIAL_TEXT}
_RERANK: dict[str, object] = {"query": TRIAL_TEXT, "documents": [TRIAL_TEXT]}
_PAIR: dict[str, object] = {"text_1": TRIAL_TEXT, "text_2": TRIAL_TEXT}
_OTHER_TRIALS: dict[str, dict[str, object]] = {
    RESPONSES: _INPUT | {"max_output_tokens": 16},
    EMBEDDINGS: _INPUT,
    "/classify": _INPUT,
    "/pooling": _INPUT,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/score": _PAIR,
    "/v1/score": _PAIR,
    "/detokenize": {"tokens": [0]},
}


def _trial_body(path: str, model: str) -> bytes:
    if (body := _OTHER_TRIALS.get(path)) is not None:
        return msgspec.json.encode({"model": model, **body})
    in_messages = path in (CHAT, MESSAGES, COUNT_TOKENS)
    prompt = {"messages": [{"role": "user", "content": TRIAL_TEXT}]} if in_messages else {"prompt": TRIAL_TEXT}
    return msgspec.json.encode({"model": model, **prompt, "max_tokens": 1})
