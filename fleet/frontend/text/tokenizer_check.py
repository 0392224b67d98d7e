"""Tokenizer check: compares how a worker and the router tokenize, render and name samples, before the worker gets work.

Rules:

1. A worker reports three digests: of the token ids of the sample texts, of the sample conversations rendered by its
   template, and of the names of sample blocks without a salt, with a tenant's and with a LoRA adapter's. An empty
   digest is not compared, for example for a worker without a tokenizer or a model without a template.
2. Different token ids would give the worker wrong prompts, and different names would hide everything that it caches, so
   the worker is not used. A different template is only logged, because the router renders.
3. An external server is asked to tokenize the sample texts if it can (``/tokenize`` of vLLM, SGLang and llama.cpp). A
   different result is only reported, because the server gets the clients' own bytes; the router then does not know its
   cache by token ids.
"""

import hashlib
import logging
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from fleet.core.errors import ConfigurationRefused, RequestRejected
from fleet.core.ids import ModelName, WorkerId
from fleet.core.requests import ChatMessage
from fleet.core.work import TokenizerDigests, WorkerDescription
from fleet.frontend.text.codec import load_codec
from fleet.router.ports import TextCodec
from kvstore.block import TOKEN_BYTES, adapter_salt, chain, tenant_salt

log = logging.getLogger(__name__)

SAMPLE_TEXTS = (
    "Where did the train from Antwerp stop, and who got off?",
    "Grüße aus Łódź: naïve cafés, 東京の夜, Привет, 🚀🧪 and a\u00a0fixed space",
    "def f(x: int) -> int:\n\tif x < 0:\n\t\traise ValueError(x)\n    return x ** 2  # twice\n\n\n",
    "3.14159e-10, 0xDEADBEEF, 1_000_000, 2026-11-22T02:12:00Z, $99.95",
    "      many      spaces      " + "a" * 70,
    '<|user|></s>[INST]{"key": ["value", null, true]}',
)
"""Samples on which tokenizers differ: words, scripts, indentation, digits, spaces, long runs, and look-alikes of
special tokens."""

SAMPLE_CONVERSATIONS = (
    (ChatMessage(role="user", content="Is it raining?"),),
    (
        ChatMessage(role="user", content="Name a river."),
        ChatMessage(role="assistant", content="The Oder."),
        ChatMessage(role="user", content="Another\none, please."),
    ),
)

BLOCKS = 4


def tokenizer_digests(codec: TextCodec | None, block_tokens: int) -> TokenizerDigests:
    """Return the digests of the samples in this process."""
    return TokenizerDigests(
        tokens="" if codec is None else _digest([codec.encode(text) for text in SAMPLE_TEXTS]),
        template="" if codec is None else _template(codec),
        blocks=_blocks(block_tokens),
    )


def folder_tokenizer_digests(model_dir: str, block_tokens: int) -> TokenizerDigests:
    """Return the digests with the tokenizer of a model folder, if there is one."""
    codec = None
    if model_dir and (Path(model_dir) / "tokenizer.json").is_file():
        try:
            codec = load_codec(model_dir)
        except ConfigurationRefused as error:
            log.warning("tokenizer check skipped, the tokenizer cannot be loaded", extra={"cause": str(error)})
    return tokenizer_digests(codec, block_tokens)


class TokenizerMatch(StrEnum):
    """Result of the comparison with an external server; it is a public metric label."""

    ALIKE = "alike"
    OTHERWISE = "otherwise"
    UNKNOWN = "unknown"  # the server cannot tokenize, or the router has no tokenizer for it


def tokenize_request_body(model: ModelName, text: str) -> bytes:
    """Return the body of a request to ``/tokenize``; llama.cpp has another name for the text."""
    return msgspec.json.encode({"model": model, "prompt": text, "content": text})


class _Tokenised(Struct):
    tokens: list[int]


def compare_tokens(codec: TextCodec, text: str, answer: bytes) -> TokenizerMatch:
    """Compare the answer to `tokenize_request_body`, without the leading special token that llama.cpp adds later."""
    try:
        theirs = msgspec.json.decode(answer, type=_Tokenised).tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return TokenizerMatch.UNKNOWN
    ours = np.frombuffer(codec.encode(text), "<u4").tolist()
    return TokenizerMatch.ALIKE if theirs in (ours, ours[1:]) else TokenizerMatch.OTHERWISE


class TokenizerCheck:
    """Compares workers with this router."""

    def __init__(self, codecs: Mapping[ModelName, TextCodec]) -> None:
        self._codecs = codecs
        self._known: dict[tuple[ModelName, int], TokenizerDigests] = {}
        self._refused: dict[WorkerId, str] = {}

    def accepts(self, description: WorkerDescription) -> bool:
        """Return whether a worker that joins may be used; log the reason if not."""
        self._refused.pop(description.worker_id, None)
        if description.tokenizer_digests is None:
            return True
        ours, theirs = self._digests_for(description), description.tokenizer_digests
        different = [
            field
            for field in ("tokens", "blocks", "template")
            if (mine := getattr(ours, field)) and (its := getattr(theirs, field)) and mine != its
        ]
        details = {"worker": description.worker_id, "model": description.model, "different": ", ".join(different)}
        if not different:
            return True
        if different == ["template"]:
            log.warning("worker has another chat template than the router", extra=details)
            return True
        log.error("worker refused by the tokenizer check", extra=details)
        self._refused[description.worker_id] = different[0]
        return False

    def refused(self) -> dict[str, float]:
        """Return, for each comparison, how many workers were refused because it failed."""
        counts = {"tokens": 0.0, "blocks": 0.0}
        for field in self._refused.values():
            counts[field] += 1
        return counts

    def _digests_for(self, description: WorkerDescription) -> TokenizerDigests:
        key = (description.model, description.block_tokens)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = tokenizer_digests(self._codecs.get(description.model), description.block_tokens)
        return known


def _template(codec: TextCodec) -> str:
    try:
        return _digest([codec.render(messages) for messages in SAMPLE_CONVERSATIONS])
    except RequestRejected:
        return ""  # no template, or one that cannot render these conversations


def _blocks(block_tokens: int) -> str:
    tokens = b"".join(number.to_bytes(TOKEN_BYTES, "little") for number in range(1, BLOCKS * block_tokens + 2))
    tenant = tenant_salt(b"golden", "tenant")
    salts = (b"", tenant, adapter_salt("adapter@1", tenant))
    return _digest([name for salt in salts for name in chain(tokens, block_tokens, salt=salt)])


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(4, "little") + part)
    return digest.hexdigest()[:32]
