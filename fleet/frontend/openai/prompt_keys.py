"""What a prompt for a foreign server has in common with others: its blocks, by key.

Rules:

1. With a tokenizer, a prompt is its token ids, cut into blocks, as the server will have it. Without one, and where no
   template of ours says what the server makes of a message (tools, images), it is the client's own bytes, 4 of which
   count as a token; prompts that begin alike still have blocks in common.
2. A key stands for a block and all that is before it. For servers that tell what they hold, keys are those of
   `kvstore.block.chain`; for others routers alone compare them, and 64 bits do (`fleet.router.native.twin.block_keys`). Routers
   that are given the same secret have these in common; with none they are this process's own.
3. Prompts with different adapters, or different salts (``cache_salt``, as vLLM and SGLang call it), have no block in common.
4. What cannot be understood is not refused here: the server that gets it says better what is wrong with it.
"""

import array
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from hashlib import shake_256

import msgspec
import numpy as np
from msgspec import Raw, Struct, structs

from fleet.backends.kv_events.translator import salt_of_client
from fleet.core.clock import MILLISECOND, Clock, Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import ModelName
from fleet.core.requests import TOKEN_BYTES, ChatMessage, TokenBytes
from fleet.core.work import LoraAdapter
from fleet.frontend.openai.bodies import ContentPart, MessageBody
from fleet.router.kv_index.prefix_index import KEY_BYTES, keys_of
from fleet.router.native.costs import block_keys
from fleet.router.ports import TextCodec
from kvstore.block import HashAlgorithm, chain

ALGORITHM = HashAlgorithm.XXH3_128  # the names stay within this process
RUNS = 5  # of the tokenizer; the quickest counts: what else the machine does then says nothing about it
MAX_INLINE_TIME = 2 * MILLISECOND  # of tokenising, while other requests wait

PURPOSE = b"fleet.prompt_keys.v1"
"""Of what is derived from a secret. Another way to name blocks needs another one: what it names is nothing to routers with this one."""

_TEXT = msgspec.json.Decoder(str)
_MESSAGES = msgspec.json.Decoder(list[MessageBody])


class KeyedPrompt(Struct, frozen=True):
    """A prompt as placement sees it."""

    model: ModelName
    tokens: TokenBytes
    keys: Mapping[int, tuple[int, ...]]  # by block size
    adapter: LoraAdapter | None = None


class SecretBlockKeys:
    """Names of blocks that no worker knows. Several threads may ask for them.

    They follow from factors which are nobody else's to know: who knows them can write two prompts with the same names.
    """

    def __init__(self, secret: str = "") -> None:
        """Draws what the factors are made of.

        Args:
            secret: What it follows from; all who have that have the same names. Empty: it is drawn at random.
        """
        # No salt of a tenant (`kvstore.block.tenant_salt`), which others are told, comes of the same secret by SHA-512.
        self._root = hmac.digest(secret.encode(), PURPOSE, "sha512") if secret else secrets.token_bytes(64)
        self.fingerprint = int.from_bytes(self._expanded("fingerprint", 8), "little") if secret else 0
        """In 64 bits, tells names by one secret from those by another; 0: nobody else has them."""
        self._factors: dict[int, bytes] = {}  # by tokens of a block

    def __call__(self, tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:
        factors = self._factors.get(block_tokens)
        if factors is None:
            drawn = np.frombuffer(self._expanded(f"factors {block_tokens}", 8 * block_tokens), "<u8")
            factors = self._factors[block_tokens] = (drawn | np.uint64(1)).tobytes()
        keys = block_keys(tokens, block_tokens * TOKEN_BYTES, factors)
        if not salt:
            return keys
        mask = int.from_bytes(salt[:KEY_BYTES], "little")
        return tuple(key ^ mask for key in keys)

    def _expanded(self, what: str, count: int) -> bytes:
        return shake_256(self._root + what.encode()).digest(count)


class PromptReader:
    """Reads the prompts for one model. `read` may be called from several threads."""

    def __init__(
        self,
        model: ModelName,
        block_sizes: Sequence[int],
        codec: TextCodec | None,
        clock: Clock,
        private: SecretBlockKeys | None,
    ) -> None:
        """Measures how fast the tokenizer is.

        Args:
            model: Whose prompts.
            block_sizes: Of its workers, in tokens.
            codec: Its tokenizer; None if there is none.
            clock: Times the tokenizer.
            private: Names blocks. None: workers tell which they hold, and so name them (rule 2).
        """
        self.model = model
        self._block_sizes = tuple(dict.fromkeys(block_sizes))
        self._codec = codec
        self._keys = private or _chain_keys
        self._salt = b""
        self.adapter: LoraAdapter | None = None
        self._uncached: Mapping[int, tuple[int, ...]] = dict.fromkeys(self._block_sizes, ())
        self.inline_bytes = 1 << 30
        """Longer prompts are better read in a thread."""
        if codec is not None:
            self.inline_bytes = max(
                len(sample) * MAX_INLINE_TIME // _tokenizing_time(codec, sample, clock) for sample in _samples()
            )

    def for_adapter(self, name: ModelName) -> "PromptReader":
        """One for requests that name an adapter of this model."""
        reader = copy(self)
        reader.adapter = LoraAdapter(name)
        reader._salt = salt_of_client(name, "")  # noqa: SLF001 - our own
        return reader

    def salted(self, read: KeyedPrompt, told: str) -> KeyedPrompt:
        """A prompt of ours, of a client that keeps it apart from others' with a salt."""
        if not any(read.keys.values()):
            return read
        salt = salt_of_client("" if self.adapter is None else self.adapter.name, told)
        keys = {size: self._keys(read.tokens, size, salt) for size in self._block_sizes}
        return structs.replace(read, keys=keys)

    def read_text(self, prompt: str) -> KeyedPrompt:
        """The prompt of a completion, where it is one text."""
        return self._named(prompt.encode() if self._codec is None else self._codec.encode(prompt))

    def read(self, prompt: Raw, messages: Raw, tools: Raw) -> KeyedPrompt:
        """The prompt of a completion, or of a chat, whatever it is."""
        tokens = None
        if self._codec is not None:
            tokens = self._chat(messages, tools, self._codec) if messages else self._completion(prompt, self._codec)
        if tokens is None:
            tokens = bytes(tools) + bytes(messages) + bytes(prompt)
        return self._named(tokens)

    def uncached(self, content: Raw) -> KeyedPrompt:
        """What no server caches, such as the text of an embedding: so long, and with no blocks in common."""
        return KeyedPrompt(self.model, bytes(content), self._uncached, self.adapter)

    def _named(self, tokens: TokenBytes) -> KeyedPrompt:
        keys, salt = self._keys, self._salt
        return KeyedPrompt(
            self.model, tokens, {size: keys(tokens, size, salt) for size in self._block_sizes}, self.adapter
        )

    def _completion(self, prompt: Raw, codec: TextCodec) -> TokenBytes | None:
        try:
            if bytes(memoryview(prompt)[:1]) == b'"':
                return codec.encode(_TEXT.decode(prompt))
            return _pack(msgspec.json.decode(prompt, type=list[int]))
        except (msgspec.DecodeError, OverflowError, UnicodeDecodeError, RecursionError):
            return None  # several prompts, or none

    def _chat(self, messages: Raw, tools: Raw, codec: TextCodec) -> TokenBytes | None:
        if tools and bytes(tools) not in (b"null", b"[]"):
            return None
        try:
            bodies = _MESSAGES.decode(messages)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        plain = []
        for body in bodies:
            content = _text(body)
            if content is None:
                return None
            plain.append(ChatMessage(role=body.role, content=content))
        try:
            return codec.render(plain)
        except RequestRejected:
            return None


def _samples() -> Iterator[str]:
    """Texts of some 6 KiB, none of whose words comes twice or nearly none: tokenizers remember words."""
    for run in range(RUNS):
        numbers = range(256 * run, 256 * (run + 1))
        yield " ".join(f"sample {number} of_words, {number * 7919:x}" for number in numbers)


def _tokenizing_time(codec: TextCodec, text: str, clock: Clock) -> Nanos:
    """On tokenising it."""
    began_at = clock.now()
    codec.encode(text)
    return Nanos(max(1, clock.now() - began_at))


def _text(body: MessageBody) -> str | None:
    """What a message says, if text is all that it says."""
    if body.tool_calls or body.function_call:
        return None
    match body.content:
        case None | str():
            return body.content
        case parts:
            texts = [part.text for part in parts if _is_text(part)]
            return "".join(text for text in texts if text) if len(texts) == len(parts) else None


def _is_text(part: ContentPart) -> bool:
    return part.type == "text" and part.text is not None


def _pack(ids: Sequence[int]) -> TokenBytes:
    return array.array("I", ids).tobytes()


def _chain_keys(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:
    return keys_of(chain(tokens, block_tokens, salt=salt, algorithm=ALGORITHM))
