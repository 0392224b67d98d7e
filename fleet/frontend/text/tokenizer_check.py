"""Tokenizer check: compares how a worker and the router tokenize, render and name samples, before the worker gets work.

Rules:

1. A worker reports three digests: of the token ids of sample texts, of sample conversations rendered by its chat
   template, and of the block hashes of sample blocks (without a salt, with a tenant's salt, and with a LoRA adapter's
   salt). A worker without a tokenizer, or whose model has no template, reports an empty digest. An empty digest is not
   compared.
2. A worker whose token ids or block hashes differ is not used. With different token ids it would compute wrong prompts; with
   different block hashes the router could not find its cached blocks. A different template is only logged, because the
   router renders the prompts.
3. An external server that can tokenize (``/tokenize`` of vLLM, SGLang and llama.cpp) is asked to tokenize the sample
   texts. A different result is only reported, because such a server tokenizes the clients' own text itself. The router then does not
   use token ids to predict what this server caches.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from itertools import product
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
"""Texts for which tokenizers often give different ids: words, scripts, indentation, digits, spaces, long repetitions, and
texts that look like special tokens."""

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
    """Compute the three digests of rule 1 with a tokenizer of this process. `codec` is None if there is no tokenizer."""
    return TokenizerDigests(
        tokens="" if codec is None else _digest([codec.encode(text) for text in SAMPLE_TEXTS]),
        template="" if codec is None else _template(codec),
        blocks=_blocks(block_tokens),
    )


def folder_tokenizer_digests(model_dir: str, block_tokens: int) -> TokenizerDigests:
    """Compute the three digests of rule 1 with the tokenizer of a model folder, or without one if none there can be loaded."""
    codec = None
    if model_dir and (Path(model_dir) / "tokenizer.json").is_file():
        try:
            codec = load_codec(model_dir)
        except ConfigurationRefused as error:
            log.warning("tokenizer check skipped, the tokenizer cannot be loaded", extra={"cause": str(error)})
    return tokenizer_digests(codec, block_tokens)


class TokenizerMatch(StrEnum):
    """Result of the comparison with an external server's tokenizer. The values are labels of a public metric."""

    ALIKE = "alike"
    OTHERWISE = "otherwise"
    UNKNOWN = "unknown"  # the server returns no tokens, or the router has no tokenizer for the server's model


def tokenize_request_body(model: ModelName, text: str) -> bytes:
    """Return the body of a request to ``/tokenize``. It has the text twice: llama.cpp reads `content`, others read `prompt`."""
    return msgspec.json.encode({"model": model, "prompt": text, "content": text})


class _Tokenised(Struct):
    tokens: list[int]


def compare_tokens(codec: TextCodec, text: str, answer: bytes) -> TokenizerMatch:
    """Compare the tokens in a server's answer with those of this router; return UNKNOWN if the answer has no tokens.

    The first token may be missing in the answer, because llama.cpp's answer lacks the special token at the beginning.
    """
    try:
        theirs = msgspec.json.decode(answer, type=_Tokenised).tokens
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return TokenizerMatch.UNKNOWN
    ours = np.frombuffer(codec.encode(text), "<u4").tolist()
    return TokenizerMatch.ALIKE if theirs in (ours, ours[1:]) else TokenizerMatch.OTHERWISE


class TokenizerCheck:
    """Compares the digests of workers with those of this router."""

    def __init__(self, codecs: Mapping[ModelName, TextCodec]) -> None:
        self._codecs = codecs
        self._known: dict[tuple[ModelName, int], TokenizerDigests] = {}
        self._refused: dict[WorkerId, tuple[ModelName, str]] = {}

    def accepts(self, description: WorkerDescription) -> bool:
        """Return whether a worker that joins may be used; log how it differs. A worker that reports no digests is accepted."""
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
        self._refused[description.worker_id] = (description.model, different[0])
        return False

    def refused(self) -> dict[tuple[str, ...], float]:
        """Return the number of workers that are refused, by model and by the first digest that differs (`tokens` or `blocks`)."""
        counts: dict[tuple[str, ...], float] = dict.fromkeys(product(self._codecs, ("tokens", "blocks")), 0.0)
        counts.update(Counter(self._refused.values()))
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
        return ""  # the model has no template, or one that cannot render the samples


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
