"""What a prompt for a foreign server has in common with others: its blocks, by key.

Rules:

1. With a tokenizer, a prompt is its token ids, cut into blocks, as the server will have it. Without one, and where no
   template of ours says what the server makes of a message (tools, images), it is the client's own bytes, 4 of which
   count as a token; prompts that begin alike still have blocks in common.
2. A key stands for a block and all that is before it. For servers that tell what they hold, keys are those of
   `kvstore.block.chain`; for others the router alone compares them, and 64 bits by XXH3, seeded with the key before, do.
3. What cannot be understood is not refused here: the server that gets it says better what is wrong with it.
"""

import array
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_64_intdigest

from fleet.adapters.openai_requests import ContentPart, MessageBody
from fleet.clock import MILLISECOND, Clock
from fleet.errors import Refused
from fleet.ids import ModelName
from fleet.requests import TOKEN_BYTES, ChatMessage, TokenBytes
from fleet.router.index import keys_of
from fleet.router.ports import TextCodec
from kvstore.block import HashAlgorithm, chain

ALGORITHM = HashAlgorithm.XXH3_128  # the names stay within this process
LONGEST_INLINE = 2 * MILLISECOND  # of tokenising, while other requests wait
SAMPLE = " ".join(f"sample {number} of_words, {number * 7919:x}" for number in range(256))  # 6 KiB, few words twice

_TEXT = msgspec.json.Decoder(str)
_MESSAGES = msgspec.json.Decoder(list[MessageBody])


class Read(Struct, frozen=True):
    """A prompt as placement sees it."""

    model: ModelName
    tokens: TokenBytes
    keys: Mapping[int, tuple[int, ...]]  # by block size


class PromptReader:
    """Reads the prompts for one model. `read` may be called from several threads."""

    def __init__(
        self,
        model: ModelName,
        block_sizes: Sequence[int],
        codec: TextCodec | None,
        clock: Clock,
        *,
        named_by_workers: bool = False,
    ) -> None:
        """Measures how fast the tokenizer is.

        Args:
            model: Whose prompts.
            block_sizes: Of its workers, in tokens.
            codec: Its tokenizer; None if there is none.
            clock: Times the tokenizer.
            named_by_workers: Whether workers tell which blocks they hold (rule 2).
        """
        self.model = model
        self._block_sizes = tuple(dict.fromkeys(block_sizes))
        self._codec = codec
        self._keys = _chain_keys if named_by_workers else _private_keys
        self._uncached: Mapping[int, tuple[int, ...]] = dict.fromkeys(self._block_sizes, ())
        self.inline_bytes = 1 << 30
        """Longer prompts are better read in a thread."""
        if codec is not None:
            began_at = clock.now()
            codec.encode(SAMPLE)
            spent = max(1, clock.now() - began_at)
            self.inline_bytes = len(SAMPLE) * LONGEST_INLINE // spent

    def read(self, prompt: Raw, messages: Raw, tools: Raw) -> Read:
        """The prompt of a completion, or of a chat."""
        tokens = None
        if self._codec is not None:
            tokens = self._chat(messages, tools, self._codec) if messages else self._completion(prompt, self._codec)
        if tokens is None:
            tokens = bytes(tools) + bytes(messages) + bytes(prompt)
        keys = self._keys
        return Read(self.model, tokens, {size: keys(tokens, size) for size in self._block_sizes})

    def uncached(self, content: Raw) -> Read:
        """What no server caches, such as the text of an embedding: so long, and with no blocks in common."""
        return Read(self.model, bytes(content), self._uncached)

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
        except Refused:
            return None


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


def _private_keys(tokens: TokenBytes, block_tokens: int) -> tuple[int, ...]:
    size = block_tokens * TOKEN_BYTES
    key = 0
    keys = []
    for start in range(0, len(tokens) - size + 1, size):
        key = xxh3_64_intdigest(tokens[start : start + size], key)
        keys.append(key)
    return tuple(keys)


def _chain_keys(tokens: TokenBytes, block_tokens: int) -> tuple[int, ...]:
    return keys_of(chain(tokens, block_tokens, algorithm=ALGORITHM))
