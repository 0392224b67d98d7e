"""Text codec of a Hugging Face model folder: prompts become tokens, and tokens become the text of an answer, which a stop string may end.

Text is encoded by the library `fastokens`, which is at least ten times faster than Hugging Face's library `tokenizers`. When the model is
loaded, both libraries encode samples. If `fastokens` fails or gives other ids, `tokenizers` encodes all text. Pairs of texts are always
encoded, and tokens always decoded, by `tokenizers`.

The chat template comes from ``chat_template.jinja`` or else from ``tokenizer_config.json``. It is code that is delivered with
the weights. So Jinja renders it in a sandbox, in which the template can reach nothing but the conversation, its variables and the
functions that templates expect.

Rules for the text of an answer:

1. A token that ends generation (end of sequence, or a stop token) counts as a token, but gives no text. As in vLLM, this
   also holds if special tokens are shown.
2. Stop strings are ignored until more than `min_tokens` tokens have come.
3. The text ends before the stop string that is complete first. If several are complete at the same character, it ends before
   the longest one. So the answer does not depend on how the text was cut into pieces. A client may ask for the stop string
   as a part of the text.
4. Text is only held back while it may be the beginning of a stop string, or until a character is complete.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import fastokens
import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from fleet.core.errors import ConfigurationRefused, invalid
from fleet.core.requests import DEFAULT_FIELDS, ChatMessage, Delta, Logprobs, TokenBytes
from fleet.core.validation import is_valid_default
from fleet.router.ports import TextCodec, TextDecoder

log = logging.getLogger(__name__)

TEMPLATE_GLOBALS = ("raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner")
"""Functions that a chat template can call."""

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", *TEMPLATE_GLOBALS})
"""Variables of a chat template that a request must not set."""

REASONING_OFF = (("enable_thinking", False), ("thinking", False), ("reasoning_effort", "none"))
"""Variables of templates, each with the value that turns reasoning off.

If a client sends such a value and the template lacks the variable, the value is ignored, because the model is taken not to reason.
"""


class ChatTemplate:
    """Renders conversations by the compiled chat template of one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: Path) -> None:
        """Compile the template.

        Raises:
            ConfigurationRefused: The template is invalid; the message names `origin`.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
            syntax = environment.parse(source)
        except jinja2.TemplateError as error:
            raise ConfigurationRefused(f"{origin}: the chat template is not valid: {error}") from error
        self._variables = jinja2.meta.find_undeclared_variables(syntax)
        self._takes_tools = "tools" in self._variables
        names = [node.attr for node in syntax.find_all(jinja2.nodes.Getattr)]
        names += [node.value for node in syntax.find_all(jinja2.nodes.Const)]
        self._takes_calls = "tool_calls" in names
        self._takes_developer = "developer" in source
        # Only a template with a loop over the parts of a message can write a placeholder for each image.
        self._takes_parts = any(_reads_content(loop.iter) for loop in syntax.find_all(jinja2.nodes.For))
        self._takes_images = self._takes_parts and "image" in source
        self._needs_parts = self._takes_images and all(
            test.name != "string" for test in syntax.find_all(jinja2.nodes.Test)
        )
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage], tools: str = "", template_args: str = "") -> str:
        """Render the conversation as text, which ends where the assistant's answer begins.

        Args:
            messages: At least one message. A template that does not know the role ``developer`` gets ``system``.
            tools: A JSON list as in `ChatPrompt.tools`; empty: none.
            template_args: A JSON object with further variables; empty: none.

        Raises:
            RequestRejected: INVALID_ARGUMENT; the template cannot render these messages, would silently drop tools, tool calls,
                images or variables, or the client sets a variable that the router sets.
        """
        if tools and not self._takes_tools:
            raise invalid("chat.tools", "the model's chat template does not support tools; leave them out")
        for index, message in enumerate(messages):
            if message.tool_calls and not self._takes_calls:
                field = f"chat.messages[{index}].tool_calls"
                raise invalid(field, "the model's chat template does not support tool calls; leave them out")
            if message.parts and not self._takes_images:
                raise invalid(f"chat.messages[{index}].content", "the model's chat template does not support images")
        try:
            variables = self._further_variables(template_args) if template_args else {}
            declared = json.loads(tools) if tools else None
            try:
                text = self._rendered(messages, declared, variables)
            except (jinja2.UndefinedError, TypeError):
                # The template of gpt-oss fails on functions whose description is absent or null, which OpenAI's API allows.
                if not declared or all(each["function"].get("description") is not None for each in declared):
                    raise
                text = self._rendered(messages, [_described(each) for each in declared], variables)
            text.encode()  # fails on half a surrogate pair, which the arguments of a call may have as a JSON escape
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise invalid("chat.messages", f"the model's chat template does not accept them: {error}") from error
        return text

    def _rendered(self, messages: Sequence[ChatMessage], tools: Any, variables: Mapping[str, Any]) -> str:
        return self._template.render(
            messages=[self._message(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=True,
            **self._special_tokens,
            **variables,
        )

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message as `transformers` passes it to templates: arguments of calls are objects, and empty fields are absent."""
        role = "system" if message.role == "developer" and not self._takes_developer else message.role
        fields: dict[str, Any] = {"role": role, "content": message.content}
        if message.parts:
            fields["content"] = [
                {"type": "image"} if part is None else {"type": "text", "text": part} for part in message.parts
            ]
        elif self._needs_parts:
            fields["content"] = [{"type": "text", "text": message.content}]
        if message.tool_calls:
            fields["tool_calls"] = [_with_parsed_arguments(call) for call in json.loads(message.tool_calls)]
        for field in ("tool_call_id", "name"):
            if value := getattr(message, field):
                fields[field] = value
        return fields

    def _further_variables(self, template_args: str) -> dict[str, Any]:
        """Return the client's variables that the template uses.

        Raises:
            RequestRejected: INVALID_ARGUMENT; a variable is reserved, or the template lacks it and its value would not turn reasoning off.
        """
        variables: dict[str, Any] = json.loads(template_args)
        known = {}
        for name, value in variables.items():
            if name in RESERVED_VARIABLES or name in self._special_tokens:
                raise invalid("chat.template_args", f"{name[:100]!r} is a variable that the router sets; leave it out")
            if name in self._variables:
                known[name] = value
            elif name == "enable_thinking" and "reasoning_effort" in variables.keys() & self._variables:
                pass  # the client also sets `reasoning_effort`, which the template has and which says the same
            elif (name, value) not in REASONING_OFF:
                takes = sorted(self._variables - {*RESERVED_VARIABLES, *self._special_tokens, *TEMPLATE_GLOBALS})
                raise invalid(
                    "chat.template_args",
                    f"the model's chat template has no variable {name[:100]!r}; it has {', '.join(takes) or 'none'}",
                )
        return known


def _reads_content(expression: jinja2.nodes.Node) -> bool:
    """Return whether an expression of a template reads the content of a message."""
    read = (
        node.attr
        if isinstance(node, jinja2.nodes.Getattr)
        else node.value
        if isinstance(node, jinja2.nodes.Const)
        else node.name
        if isinstance(node, jinja2.nodes.Name)
        else None
        for node in (expression, *expression.find_all(jinja2.nodes.Expr))
    )
    return "content" in read


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are parsed, because OpenAI's clients send them as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool whose function has a description, empty if the client gave none."""
    function = tool["function"]
    return {**tool, "function": {**function, "description": function.get("description") or ""}}


class _GenerationTag(jinja2.ext.Extension):
    """Renders the content of the tag ``{% generation %}`` and ignores the tag, which only matters for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise to JSON as Hugging Face's filter does; Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


GENERATION_CONFIG = "generation_config.json"
IMAGE_TOKENS = ("image_token_id", "image_token_index", "boi_token_index", "boi_token_id")
"""Fields of config.json with the id of the token that chat templates write for an image: the image token itself, or the token
that begins an image."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REPLACEMENT = "\ufffd"
# If this many tokens are held back because no character is complete, they are returned with U+FFFD. A character has at most 4 bytes, so
# they cannot become valid text any more.
MAX_HELD = 16
CONTEXT = 4, 8  # minimum and maximum number of tokens at the prompt's end with which the decoder starts

# Texts on which the two encoders are compared: white space, digits, scripts, combining marks, code, emoji.
SAMPLES = (
    "Hello, world! It's 12345.67 o'clock; don't you'LL   see?\n\n\tdef f(x):\r\n        return x**2  # ok\n",
    "   leading and trailing   ",
    "Größe naïve façade e\u0301 \u1e9b\u0323 Ελληνικά русский עברית العربية हिन्दी ไทย 日本語のテキスト 한국어 漢字",
    "emoji 👩‍👩‍👧‍👦 🇺🇳 \U0001f3f3\ufe0f zero\u200bwidth \u00a0nbsp \u3000wide \x00\x07 \ufffd \U0010ffff",
    '{"json": [1, 2.5e-3, null], "path": "C:\\\\x"}</s><s>[INST]<|endoftext|><|im_start|>user\n',
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 0000000000000000 ================ \n\n\n\n\n\n",
)

# Size of the cache in which fastokens keeps encoded pieces of text. It helps because each turn of a conversation repeats the
# earlier turns.
REMEMBERED_BYTES = 16 << 20

EncodeText = Callable[[str, bool], TokenBytes]
"""Function that encodes a text; if the flag is true, it also adds the model's special tokens."""


def load_codec(model_dir: str | Path, *, model_defaults: bool = False) -> TextCodec:
    """Read the tokenizer, the chat template and the end-of-sequence ids of a model folder.

    This blocks for up to a second if the vocabulary is large.

    Args:
        model_dir: The folder.
        model_defaults: Whether to read the sampling defaults, too.

    Raises:
        ConfigurationRefused: The folder is not a usable model folder; the message says which file is missing or wrong.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ConfigurationRefused(f"{folder}: is not a folder; a model is a Hugging Face model folder")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigurationRefused(f"{folder}: is not a Hugging Face model folder: {name} is missing")
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    config = _load_object(folder / "config.json")
    settings = _load_object(folder / "tokenizer_config.json")
    special_tokens = _special_tokens({**_load_object(folder / "special_tokens_map.json"), **settings})
    templates = _load_templates(folder, settings, special_tokens)
    return HuggingFaceCodec(
        tokenizer,
        _choose_encoder(folder / "tokenizer.json", tokenizer),
        template=templates.get("default"),
        tool_template=templates.get("tool_use"),
        vocab_size=_vocab_size(config, tokenizer),
        eos_token_ids=_eos_token_ids(folder, config, special_tokens, tokenizer),
        sampling_defaults=_sampling_defaults(folder) if model_defaults else {},
        image_token_ids=tuple(
            token_id for name in IMAGE_TOKENS if isinstance(token_id := config.get(name), int) and token_id >= 0
        ),
        class_names=_class_names(config),
        response_template=settings.get("response_template"),
        created=int((folder / "config.json").stat().st_mtime),
    )


class HuggingFaceCodec:
    """Encodes, decodes and renders text with the tokenizer and the chat template of a Hugging Face model folder.

    Implements `fleet.router.ports.TextCodec`. Several threads may call one object.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode: EncodeText,
        *,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None = None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        sampling_defaults: Mapping[str, float] | None = None,
        image_token_ids: tuple[int, ...] = (),
        class_names: Mapping[int, str] | None = None,
        response_template: Mapping[str, Any] | None = None,
        created: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._encode = encode
        self._template = template
        self._tool_template = tool_template  # chat template for requests with tools; None: the default template is used
        self.response_template = response_template
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.sampling_defaults = sampling_defaults or {}
        self._image_token_ids = image_token_ids
        self._class_names = class_names or {}
        self._created = created
        # `token_text` puts this token before a single token, because decoders drop a leading space of the first token.
        self._lead = _ids(encode("a", False))[-1:]
        self._lead_text = self._decode(self._lead)
        self._token_texts: dict[int, str] = {}  # cache of the texts of single tokens

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def class_names(self) -> Mapping[int, str]:
        return self._class_names

    @property
    def created(self) -> int:
        return self._created

    @property
    def image_token_ids(self) -> tuple[int, ...]:
        return self._image_token_ids

    def encode(self, text: str, special: bool = True) -> TokenBytes:
        return self._encode(text, special)

    def encode_pair(self, first: str, second: str) -> tuple[TokenBytes, int]:
        encoding = self._tokenizer.encode(first, second)
        types: list[int] = encoding.type_ids
        return _pack(encoding.ids), types.index(1) if 1 in types else len(types)

    def render(self, messages: Sequence[ChatMessage], tools: str = "", template_args: str = "") -> TokenBytes:
        template = self._tool_template if tools and self._tool_template is not None else self._template
        if template is None:
            raise invalid("chat.messages", "the model has no chat template; send a prompt instead")
        return self._encode(template.render(messages, tools, template_args), False)

    def decoder(self, prompt: TokenBytes = b"", *, special: bool = False) -> TextDecoder:
        context = _ids(prompt[-64:])  # 64 bytes are 16 tokens; the decoder uses at most the last 8 (`CONTEXT`)
        return IncrementalDecoder(self._tokenizer, context, special=special)

    def decode(self, tokens: TokenBytes) -> str:
        return self._decode(_ids(tokens))

    def token_text(self, token_id: int) -> str:
        if (text := self._token_texts.get(token_id)) is None:
            text = self._decode([*self._lead, token_id]).removeprefix(self._lead_text)
            if 0 <= token_id < self._vocab_size:
                self._token_texts[token_id] = text
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _pack(token_ids: Sequence[int]) -> TokenBytes:
    return np.asarray(token_ids, "<u4").tobytes()


def _ids(tokens: TokenBytes) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, "<u4").tolist()
    return ids


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises `Exception` itself, and no subclass that could be caught instead
        raise ConfigurationRefused(f"{path}: is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _choose_encoder(path: Path, tokenizer: Tokenizer) -> EncodeText:
    def encode(text: str, special: bool) -> TokenBytes:
        return _pack(tokenizer.encode(text, add_special_tokens=special).ids)

    try:
        fast = fastokens.Tokenizer.from_file(str(path))
        fast.no_truncation()
        fast.no_padding()
        fast.enable_segment_cache(REMEMBERED_BYTES)

        def encode_fast(text: str, special: bool) -> TokenBytes:
            return fast.encode_batch_flat([text], special)[0]  # type: ignore[no-any-return]  # untyped library

        differs = _first_difference(encode_fast, encode, tokenizer)
    except (ValueError, RuntimeError, TypeError, OSError, NotImplementedError) as error:
        log.info(
            "fastokens rejects the tokenizer, using tokenizers",
            extra={"path": str(path), "cause": str(error)},
        )
        return encode
    if differs is not None:
        log.warning("fastokens gives different ids, using tokenizers", extra={"path": str(path), "text": differs})
        return encode
    return encode_fast


def _first_difference(one: EncodeText, other: EncodeText, tokenizer: Tokenizer) -> str | None:
    """Return the first sample for which the two encoders give different ids; None if there is none."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:64]
    samples: Iterable[str] = (*SAMPLES, *(f"a {content} b{content}c" for content in added), " ".join(SAMPLES) * 4)
    for text in samples:
        for special in (False, True):
            if one(text, special) != other(text, special):
                return text
    return None


def _load_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object; return an empty one if there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationRefused(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationRefused(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationRefused(f"{path}: must hold a JSON object")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token, by the variable's name in templates."""
    found = {}
    for name in SPECIAL_TOKENS:
        match settings.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
            case _:  # the settings do not declare the token, or declare it as null
                pass
    return found


def _load_templates(
    folder: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> dict[str, ChatTemplate]:
    """Return templates by name: ``default``, and ``tool_use`` for some models."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": ChatTemplate(path.read_text(encoding="utf-8"), special_tokens, origin=path)}
    declared = settings.get("chat_template")
    named = declared if isinstance(declared, list) else [{"name": "default", "template": declared}]
    origin = folder / "tokenizer_config.json"
    found = {}
    for one in named:
        match one:
            case {"name": "default" | "tool_use" as name, "template": str(source)}:
                found[name] = ChatTemplate(source, special_tokens, origin=origin)
            case _:  # a template for another purpose, or none
                pass
    return found


def _vocab_size(config: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Return the number of token ids that the model accepts.

    It may exceed the tokenizer's vocabulary, because embeddings are padded. The additional ids do no harm.
    """
    declared = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return declared if isinstance(declared, int) else int(tokenizer.get_vocab_size(with_added_tokens=True))


def _class_names(config: Mapping[str, Any]) -> Mapping[int, str]:
    named = config.get("id2label")
    if not isinstance(named, dict):
        return {}
    return {int(number): name for number, name in named.items() if str(number).isdecimal() and isinstance(name, str)}


def _eos_token_ids(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Return the end-of-sequence ids that engines would find in the model folder.

    They are in generation_config.json or, if that file has none, in config.json. The tokenizer's settings name a further id.
    """
    declared = _load_object(folder / GENERATION_CONFIG).get("eos_token_id", config.get("eos_token_id"))
    ids = declared if isinstance(declared, list) else [declared]
    if (text := special_tokens.get("eos_token")) is not None:
        ids = [*ids, tokenizer.token_to_id(text)]
    return tuple(sorted({token_id for token_id in ids if isinstance(token_id, int)}))


def _sampling_defaults(folder: Path) -> Mapping[str, float]:
    """Return the sampling parameters that a model's generation_config.json names, without those that no request may have.

    vLLM and SGLang take the same values for parameters that a client leaves out. Limits of lengths, such as `max_new_tokens`, are no
    part of them.
    """
    file = folder / GENERATION_CONFIG
    declared = _load_object(file)
    found: dict[str, float] = {}
    for name in sorted(DEFAULT_FIELDS):
        value = declared.get(name)
        if value is not None and is_valid_default(name, value):
            found[name] = value
        elif value is not None:
            log.warning(
                "sampling default ignored: no request may have it",
                extra={"file": str(file), "field": name, "value": value},
            )
    if found:
        log.info("sampling defaults read", extra={"file": str(file), "defaults": found})
    return found


class IncrementalDecoder:
    """Decodes the tokens of one request to text, step by step, and never splits a character.

    `tokenizers.decoders.DecodeStream` decodes the last tokens again with each new token, and returns the added text once this
    text does not end in U+FFFD. This class adds three things. It returns the text that is held back at the end of the answer.
    It limits the number of tokens that are held back. And it continues after bytes that are not UTF-8, at which `DecodeStream`
    raises an error. Implements `fleet.router.ports.TextDecoder`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, special: bool = False) -> None:
        """Create the decoder of an answer that follows a prompt.

        Args:
            tokenizer: The tokenizer.
            prompt: The last tokens of the prompt.
            special: Whether special tokens give text.
        """
        self._tokenizer = tokenizer
        self._skip = not special
        context, text = self._end_of(prompt)
        self._stream = DecodeStream(context, self._skip)
        whole = not text.endswith(REPLACEMENT)
        self._context = context if whole else []
        # Text of the context, if the context ends within a character. The stream will return this text again, so `add` removes it.
        self._known = "" if whole else text.rstrip(REPLACEMENT)
        self._held: tuple[int, ...] = ()

    def add(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # noqa: BLE001 - raised for bytes that are no UTF-8; the library has no narrower error
            self._held = (*self._held, token_id)
            return self._restart()
        if text is None:
            self._held = (*self._held, token_id)
            return self._restart() if len(self._held) >= MAX_HELD else ""
        self._held = ()
        if self._known:
            text, self._known = text.removeprefix(self._known), ""
        return text

    def flush(self) -> str:
        return self._restart() if self._held else ""

    def _restart(self) -> str:
        """Return the text of the held tokens, with U+FFFD for incomplete characters, and restart the stream after the context."""
        known = self._decode(self._context)
        text = self._decode([*self._context, *self._held])
        # A byte-fallback decoder joins the last bytes of the context with the held bytes. If they are no UTF-8 together, it replaces all of
        # them, also a whole character of the context.
        if not text.startswith(known):
            text, known = self._decode(self._held), ""
        self._stream, self._held, self._known = DecodeStream(self._context, self._skip), (), ""
        return text[len(known) :]

    def _end_of(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Return the shortest end of the prompt whose text begins with a whole character, and this text.

        The length of this end in tokens is within the limits of `CONTEXT`. If no such end begins with a whole character, the longest
        one is returned.
        """
        context: list[int] = []
        text = ""
        fewest, most = (min(size, len(prompt)) for size in CONTEXT)
        for size in range(fewest, most + 1):
            context = list(prompt[len(prompt) - size :])
            text = self._decode(context)
            if text and not text.startswith(REPLACEMENT):
                break
        return context, text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip))


class AnswerText:
    """Decodes the answer of one request and looks for its stop strings."""

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        stop: Sequence[str] = (),
        end_token_ids: frozenset[int],
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stop, included=include_stop) if stop else None
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.stopped = False  # True once a stop string has ended the answer

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; empty if none did."""
        return self._stops.found if self.stopped and self._stops is not None else ""

    def add(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> Delta:
        """Add the tokens of an engine step; return the text that can be sent, and the tokens up to a stop string."""
        assert not self.stopped
        if len(token_ids) == 1 and self._stops is None:  # the most frequent case
            self.num_tokens += 1
            text = "" if token_ids[0] in self._end_token_ids else self._decoder.add(token_ids[0])
            return Delta(text=text, token_ids=tuple(token_ids), logprobs=tuple(logprobs[:1]))
        texts = []
        taken = 0
        for token_id in token_ids:
            taken += 1
            if token_id in self._end_token_ids:
                continue
            text = self._decoder.add(token_id)
            if self._stops is not None and self.num_tokens + taken > self._min_tokens:
                text, self.stopped = self._stops.add(text)
            texts.append(text)
            if self.stopped:
                break
        self.num_tokens += taken
        return Delta(text="".join(texts), token_ids=tuple(token_ids[:taken]), logprobs=tuple(logprobs[:taken]))

    def finish(self) -> str:
        """Return the text that was held back, when no more tokens come; empty after a stop string."""
        if self.stopped:
            return ""
        rest = self._decoder.flush()
        if self._stops is None:
            return rest
        text, self.stopped = self._stops.add(rest)
        return text if self.stopped else text + self._stops.flush()


class StopStrings:
    """Finds the first stop string of one request in text that arrives in pieces."""

    def __init__(self, strings: Sequence[str], *, included: bool = False) -> None:
        self._strings = tuple(strings)
        self._included = included  # True if the text keeps the stop string at its end
        self._first_characters = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""
        self.found = ""
        """The stop string that ended the text; empty if none did yet."""

    @property
    def held(self) -> str:
        """The text that is held back, because it may be the beginning of a stop string."""
        return self._held

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that can be sent now, and whether a stop string has ended the answer."""
        text = self._held + text
        # End and beginning of the stop string that is complete first; None: none was found.
        first: tuple[int, int] | None = None
        for string in self._strings:
            begin = text.find(string)
            if begin >= 0 and (first is None or (begin + len(string), begin) < first):
                first = (begin + len(string), begin)
                self.found = string
        if first is not None:
            self._held = ""
            return text[: first[0] if self._included else first[1]], True
        begin = self._beginning(text)
        self._held = text[begin:]
        return text[:begin], False

    def flush(self) -> str:
        """Return the text that is held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return where the longest suffix of `text` begins that is a prefix of a stop string; without one, return the length."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[begin] in self._first_characters:
                tail = text[begin:]
                if any(string.startswith(tail) for string in self._strings):
                    return begin
        return len(text)
