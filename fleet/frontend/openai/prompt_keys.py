"""Prompt keys: block keys of prompts for external backends.

Rules:

1. With a tokenizer, a prompt is divided into blocks of token ids, as the external server divides it. Without a tokenizer,
   4 bytes of the client's text or JSON take the place of each token. The same holds for a prompt that the router cannot
   render itself, for example because the prompt has tools or images. Prompts with the same beginning always share blocks.
2. A key stands for a block and all blocks before it in the prompt. For servers with KV events, the keys come from
   `kvstore.block.chain`, so that they equal the keys that the router computes from the tokens in the events. For other
   servers, only routers compare keys, so 64 bits are enough (`fleet.router.native.twin.block_keys`). Routers with the same
   secret compute the same keys; without a secret each process has different keys.
3. Prompts with different LoRA adapters or different salts (``cache_salt`` in vLLM and SGLang) share no block.
4. An unreadable prompt is not rejected here, because the external server can describe the error more exactly.
"""

import array
import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import msgspec
import numpy as np
from msgspec import Raw, Struct, structs

from fleet.core.clock import MILLISECOND, Clock, Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import ModelName
from fleet.core.requests import TOKEN_BYTES, ChatMessage, TokenBytes
from fleet.core.work import LoraAdapter
from fleet.frontend.openai.bodies import ContentPart, MessageBody
from fleet.router.kv_index.prefix_index import KEY_BYTES, keys_of
from fleet.router.native.costs import block_keys
from fleet.router.ports import TextCodec
from kvstore.block import HashAlgorithm, adapter_salt, chain

# Any hash algorithm is suitable here, because the router computes both the hashes of prompts and those of KV events with it.
ALGORITHM = HashAlgorithm.XXH3_128
RUNS = 5  # how often the tokenizer's speed is measured; the fastest run counts
# Maximum time for which tokenizing one prompt may block the event loop. A prompt that takes longer is tokenized in a
# thread.
MAX_INLINE_TIME = 2 * MILLISECOND

PURPOSE = b"fleet.prompt_keys.v1"
"""Context of the key derivation from the secret. Other modules derive keys from the same secret with other contexts, so that
no two of these keys are equal."""

_TEXT = msgspec.json.Decoder(str)
_MESSAGES = msgspec.json.Decoder(list[MessageBody])
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class ConversationTurn(Struct):
    """A message of the Responses or the Messages API, with only the fields that plain text needs."""

    role: str
    content: str | list[ContentPart]
    type: str = "message"


_INSTRUCTIONS = msgspec.json.Decoder(str | list[ContentPart] | None)
_TURNS = msgspec.json.Decoder(str | list[ConversationTurn])


class KeyedPrompt(Struct, frozen=True):
    """A prompt for an external backend, with its block keys."""

    model: ModelName
    tokens: TokenBytes
    keys: Mapping[int, tuple[int, ...]]  # block keys by block size in tokens
    adapter: LoraAdapter | None = None


class SecretBlockKeys:
    """Computes block keys with factors that are derived from a secret. Several threads may call one object.

    The secret is kept from workers and clients, because the factors make it possible to construct two prompts with
    equal keys.
    """

    def __init__(self, secret: str = "") -> None:
        """Derive the root of all factors from the secret, or draw it at random if the secret is empty.

        Processes with the same secret compute equal keys.
        """
        # SHA-512, because workers know the tenants' salts, which may be derived from the same secret by SHA-256
        # (`kvstore.block.tenant_salt`). With another hash function, no tenant's name can give a salt that equals the
        # root.
        self._root = hmac.digest(secret.encode(), PURPOSE, "sha512") if secret else secrets.token_bytes(64)
        self.fingerprint = int.from_bytes(self._expanded("fingerprint", 8), "little") if secret else 0
        """A number of 64 bits by which routers notice that their secrets differ; 0 if the root is random."""
        self._factors: dict[int, bytes] = {}  # the derived factors, by block size in tokens

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
        return hashlib.shake_256(self._root + what.encode()).digest(count)


def client_salt(adapter: str, cache_salt: str) -> bytes:
    """Return the salt of the block hashes of a prompt for an external server; empty without adapter and without `cache_salt`.

    Args:
        adapter: Name of the request's LoRA adapter; empty if there is none.
        cache_salt: Salt from the client, which may be any text; empty if there is none.
    """
    salt = (
        hashlib.sha256(b"fleet.client-salt.v1\0" + cache_salt.encode("utf-8", "surrogatepass")).digest()
        if cache_salt
        else b""
    )
    return adapter_salt(adapter, salt) if adapter else salt


class PromptReader:
    """Reads the prompts for one model. Several threads may call the methods that read prompts."""

    def __init__(
        self,
        model: ModelName,
        block_sizes: Sequence[int],
        codec: TextCodec | None,
        clock: Clock,
        private: SecretBlockKeys | None,
    ) -> None:
        """Create the reader and measure the tokenizer's speed.

        Args:
            model: Name of the model.
            block_sizes: Block sizes of the model's workers, in tokens.
            codec: Tokenizer of the model; None if there is none.
            clock: Clock that measures the tokenizer's speed.
            private: Computes the keys for servers without KV events; None if the servers have KV events (rule 2).
        """
        self.model = model
        self._block_sizes = tuple(dict.fromkeys(block_sizes))
        self._codec = codec
        self._keys = private or _chain_keys
        self._salt = b""
        self.adapter: LoraAdapter | None = None
        self._uncached: Mapping[int, tuple[int, ...]] = dict.fromkeys(self._block_sizes, ())
        self.inline_bytes = 1 << 30
        """Prompts of more bytes are read in a thread, because they would block the event loop for more than `MAX_INLINE_TIME`."""
        if codec is not None:
            self.inline_bytes = max(
                len(sample) * MAX_INLINE_TIME // _tokenizing_time(codec, sample, clock) for sample in _samples()
            )

    def for_adapter(self, name: ModelName) -> "PromptReader":
        """Return a reader for requests that name a LoRA adapter of this model."""
        reader = copy(self)
        reader.adapter = LoraAdapter(name)
        reader._salt = client_salt(name, "")  # noqa: SLF001 - the object is a copy made here
        return reader

    def salted(self, read: KeyedPrompt, cache_salt: str) -> KeyedPrompt:
        """Return the prompt with keys that include the client's cache salt; a prompt without keys is returned unchanged."""
        if not any(read.keys.values()):
            return read
        salt = client_salt("" if self.adapter is None else self.adapter.name, cache_salt)
        keys = {size: self._keys(read.tokens, size, salt) for size in self._block_sizes}
        return structs.replace(read, keys=keys)

    def read_text(self, prompt: str) -> KeyedPrompt:
        """Read the prompt of a completion whose prompt is one text."""
        return self._named(prompt.encode() if self._codec is None else self._codec.encode(prompt))

    def read(self, prompt: Raw, messages: Raw, tools: Raw) -> KeyedPrompt:
        """Read the prompt of a completion or a chat from its unparsed JSON fields. A field that the body lacks is empty."""
        tokens = None
        if self._codec is not None:
            tokens = self._chat(messages, tools, self._codec) if messages else self._completion(prompt, self._codec)
        if tokens is None:
            tokens = bytes(tools) + bytes(messages) + bytes(prompt)
        return self._named(tokens)

    def read_response(self, instructions: Raw, turns: Raw, tools: Raw) -> KeyedPrompt:
        """Read the prompt of the Responses API: the instructions, and a text or the items of the conversation so far.

        vLLM's server adds the tokenizer's special tokens before the rendered template, although the template already contains
        them. So the same tokens are added here.
        """
        return self._conversation(instructions, turns, tools, b"" if self._codec is None else self._codec.encode(""))

    def read_messages(self, system: Raw, turns: Raw, tools: Raw) -> KeyedPrompt:
        """Read the prompt of the Messages API: the system prompt, and the messages so far."""
        return self._conversation(system, turns, tools, b"")

    def _conversation(self, instructions: Raw, turns: Raw, tools: Raw, special: TokenBytes) -> KeyedPrompt:
        tokens = None
        if self._codec is not None and bytes(tools) in (b"", b"null", b"[]"):
            tokens = _rendered_conversation(instructions, turns, self._codec)
            if tokens is not None:
                tokens = special + tokens
        if tokens is None:
            tokens = bytes(tools) + bytes(instructions) + bytes(turns)
        return self._named(tokens)

    def uncached(self, content: Raw) -> KeyedPrompt:
        """Return a prompt without block keys, for content that no server caches, such as the text of an embedding."""
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
            return None  # the body has several prompts, or none

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
    """Yield texts of about 6 KiB, with which the tokenizer's speed is measured.

    The words of these texts hardly repeat. A tokenizer caches words, so it would seem too fast with repeated words.
    """
    for run in range(RUNS):
        numbers = range(256 * run, 256 * (run + 1))
        yield " ".join(f"sample {number} of_words, {number * 7919:x}" for number in numbers)


def _tokenizing_time(codec: TextCodec, text: str, clock: Clock) -> Nanos:
    """Return the time that tokenizing a text takes, at least 1 ns."""
    began_at = clock.now()
    codec.encode(text)
    return Nanos(max(1, clock.now() - began_at))


def _text(body: MessageBody) -> str | None:
    """Return the text of a message; None if the message has more than text, or no content."""
    if body.tool_calls or body.function_call:
        return None
    match body.content:
        case None | str():
            return body.content
        case parts:
            texts = [part.text for part in parts if _is_text(part)]
            return "".join(text for text in texts if text) if len(texts) == len(parts) else None


def _is_text(part: ContentPart) -> bool:
    return part.type in _TEXT_PARTS and part.text is not None


def _rendered_conversation(instructions: Raw, turns: Raw, codec: TextCodec) -> TokenBytes | None:
    """Return the tokens of a conversation, rendered as by its server; None if it has more than text or cannot be rendered."""
    try:
        leading = _INSTRUCTIONS.decode(instructions) if instructions else None
        following = _TURNS.decode(turns)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    bodies = [MessageBody(role="system", content=leading)] if leading else []
    if isinstance(following, str):
        bodies.append(MessageBody(role="user", content=following))
    else:
        if any(turn.type != "message" for turn in following):
            return None
        bodies += [MessageBody(role=turn.role, content=turn.content) for turn in following]
    messages = []
    for body in bodies:
        if (content := _text(body)) is None:
            return None
        messages.append(ChatMessage(role=body.role, content=content))
    try:
        return codec.render(messages)
    except RequestRejected:
        return None


def _pack(ids: Sequence[int]) -> TokenBytes:
    return array.array("I", ids).tobytes()


def _chain_keys(tokens: TokenBytes, block_tokens: int, salt: bytes) -> tuple[int, ...]:
    return keys_of(chain(tokens, block_tokens, salt=salt, algorithm=ALGORITHM))
