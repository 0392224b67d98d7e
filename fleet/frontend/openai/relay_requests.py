"""Relayed requests: reads the fields of a body that placement needs, and selects the headers to forward.

In the most common body, a completion with one text, the fields are decoded immediately. In any other body, fields of variable
form stay undecoded JSON (`msgspec.Raw`), and the server validates them.
"""

from functools import lru_cache

import msgspec
from msgspec import Raw, Struct, structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import WorkerId
from fleet.core.requests import Sampling
from fleet.core.validation import check_hints
from fleet.frontend.openai.bodies import OPENAI_FIELD_NAMES, FleetOptions
from fleet.frontend.openai.prompt_keys import KeyedPrompt, PromptReader
from fleet.frontend.openai.relayed_paths import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from fleet.frontend.openai.requests import decode_body
from fleet.net.http.exchange import HttpHead
from fleet.net.status_codes import rename_field
from fleet.router.messages import Arrived

MAX_ANSWER_TOKENS = 2**30  # placement counts at most this many tokens of an answer, whatever length a body asks for

CREDENTIALS = (b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key")
"""Headers in which clients of OpenAI, Anthropic, Azure and Google send their keys."""

# Headers that concern only the client's connection (RFC 9110, 7.6.1), headers that the upstream connection sets, keys, and
# `accept-encoding`, because the router reads relayed answers.
_NOT_FORWARDED = frozenset(
    b"host connection keep-alive proxy-connection proxy-authorization te trailer transfer-encoding upgrade expect "
    b"content-length accept-encoding".split()
).union(CREDENTIALS)
_WITHOUT_ENGINE = frozenset({COUNT_TOKENS, "/tokenize", "/detokenize"})
_NOTHING = Raw(b"null")


class RelayBody(Struct, kw_only=True):
    """Fields that are read from the bodies of requests for all paths in `relayed_paths.PLACED`."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    cache_salt: Raw = Raw()
    fleet: FleetOptions | None = None


class RelayTextBody(RelayBody, kw_only=True):
    """Body of a completion whose prompt is one text."""

    prompt: str
    stream: bool | None = None


class RelayRawBody(RelayBody, kw_only=True):
    """Body of any other request. `Raw` fields contain undecoded JSON, which is decoded later or not at all."""

    prompt: Raw = Raw()
    stream: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()
    instructions: Raw = Raw()
    system: Raw = Raw()
    tools: Raw = Raw()


_TEXT = msgspec.json.Decoder(RelayTextBody)
_ANY = msgspec.json.Decoder(RelayRawBody)
_SALT = msgspec.json.Decoder(str)


def read_body(content: bytes, path: str) -> RelayTextBody | RelayRawBody:
    """Decode the fields of a body that placement needs.

    Raises:
        RequestRejected: INVALID_ARGUMENT. If one field is wrong, the error names it as the client wrote it.
    """
    if path == COMPLETIONS:
        try:
            return _TEXT.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # the body is invalid, or its prompt is not a single text: decode it as any other body
    return decode_body(_ANY, content)


def prompt_bytes(body: RelayTextBody | RelayRawBody) -> int:
    """Return the approximate size of the prompt in bytes."""
    if isinstance(body, RelayTextBody):
        return len(body.prompt)
    return max(len(memoryview(body.prompt)), len(memoryview(body.messages)), len(memoryview(body.input)))


def read_prompt(body: RelayTextBody | RelayRawBody, reader: PromptReader, path: str, content: bytes) -> KeyedPrompt:
    """Return the prompt and block keys of a request for one of `relayed_paths.PLACED`; `content` is the whole body."""
    if isinstance(body, RelayTextBody):
        read = reader.read_text(body.prompt)
    elif path in (CHAT, COMPLETIONS):
        read = reader.read(body.prompt, body.messages, body.tools)
    elif path == EMBEDDINGS:
        read = reader.uncached(body.input)
    elif path == RESPONSES:
        read = reader.read_response(body.instructions, body.input, body.tools)
    elif path == MESSAGES:
        read = reader.read_messages(body.system, body.messages, body.tools)
    else:
        read = reader.uncached(_NOTHING if path in _WITHOUT_ENGINE else Raw(content))
    return reader.salted(read, _salt_text(body.cache_salt)) if body.cache_salt else read


def _salt_text(salt: Raw) -> str:
    """Return the text of a cache salt. For a salt that is no text, return its JSON; the server will reject the request."""
    try:
        return _SALT.decode(salt)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return bytes(salt).decode("latin-1")


def apply_fleet_options(arrived: Arrived, options: FleetOptions, began_at: Nanos) -> Arrived:
    """Return the router's event, completed by the options of the object ``fleet``.

    The timeout of the options is counted from the instant `began_at`.

    Raises:
        RequestRejected: INVALID_ARGUMENT; the error names the field as the client wrote it.
    """
    try:
        check_hints(options)
    except RequestRejected as refused:
        raise rename_field(refused, OPENAI_FIELD_NAMES) from refused
    return structs.replace(
        arrived,
        priority=options.priority,
        deadline=Nanos(began_at + options.timeout_ms * MILLISECOND) if options.timeout_ms else None,
        session=options.session,
        expected_tokens=options.expected_tokens,
        pin=WorkerId(options.pin) if options.pin else None,
        labels=options.labels,
    )


@lru_cache(maxsize=1024)
def relay_sampling(max_tokens: int) -> Sampling:
    """Return the sampling parameters of a relayed request for the router; they have a seed.

    The router does not know the tokens of a relayed answer, so no other server can continue the answer. Two things keep the
    router from trying: `LiveRequest.may_continue`, and the seed. An answer with a seed is continued only by workers that can
    rebuild the state of its random generator, and external servers cannot rebuild it.
    """
    return Sampling(max_tokens=max(1, max_tokens), seed=0)


def forwarded_headers(head: HttpHead) -> bytes:
    """Return the header lines to forward; cache them and the credentials in `head`."""
    head.credentials = client_credentials(head)
    head.forwarded_headers = end_to_end_headers(head)
    return head.forwarded_headers


def end_to_end_headers(head: HttpHead, also: frozenset[bytes] = frozenset()) -> bytes:
    """Return all header lines except credentials and headers of the client's connection.

    Headers named in `also` are kept.
    """
    dropped = _NOT_FORWARDED.difference(also).union(
        name.strip() for name in head.headers.get(b"connection", b"").lower().split(b",")
    )
    lines = [name + b": " + value + b"\r\n" for name, value in head.headers.items() if name not in dropped]
    return b"".join(lines)


def client_credentials(head: HttpHead) -> bytes:
    """Return the header lines with the client's keys."""
    lines = b""
    for name in CREDENTIALS:
        if value := head.headers.get(name):
            lines += name + b": " + value + b"\r\n"
    return lines
