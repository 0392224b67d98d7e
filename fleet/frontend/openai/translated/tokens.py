"""Token paths: ``/tokenize`` and ``/detokenize`` as vLLM's server has them, for Fleet's own models."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from fleet.core.clock import Nanos
from fleet.core.errors import invalid
from fleet.core.ids import ModelName, RequestId
from fleet.core.requests import GenerateRequest, TextPrompt, TokenBytes
from fleet.frontend.openai.bodies import unsupported
from fleet.frontend.openai.requests import decode_body
from fleet.frontend.openai.translated.api import Json, read_translated_chat

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """Body of ``POST /tokenize``: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    # `ACCEPTED_VALUES` lists the supported values of the following fields.
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: list[TokenId]
    model: str | None = None


ACCEPTED_VALUES: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
}
"""Fields that support only some values, each with these values. Null is always supported.

For a chat, `add_special_tokens` may only be false: the chat template adds the special tokens.
"""

_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    request: GenerateRequest
    """Request that holds the prompt to tokenize; it is never submitted."""

    with_strings: bool


def read_tokenize(content: bytes, request_id: RequestId, now: Nanos) -> TokenizeRequest:
    """Read the body of ``POST /tokenize``.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    body = decode_body(_TOKENIZE, content)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt" if body.prompt is None else "messages", "send either a prompt or messages")
    accepted = ACCEPTED_VALUES if body.messages is None else {**ACCEPTED_VALUES, "add_special_tokens": (False,)}
    for field, values in accepted.items():
        value = getattr(body, field)
        if value is not None and value not in values:
            raise unsupported(field, values)
    if body.prompt is not None:
        request = GenerateRequest(
            id=request_id,
            model=ModelName(body.model or ""),
            prompt=TextPrompt(body.prompt, special=body.add_special_tokens is not False),
        )
    else:
        chat: Json = {
            "model": body.model,
            "messages": body.messages,
            "tools": body.tools,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        request = read_translated_chat(chat, request_id, now).request
    return TokenizeRequest(request=request, with_strings=bool(body.return_token_strs))


def read_detokenize(content: bytes) -> tuple[ModelName, TokenBytes]:
    """Read the body of ``POST /detokenize``.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the field as the client wrote it.
    """
    body = decode_body(_DETOKENIZE, content)
    return ModelName(body.model or ""), np.asarray(body.tokens, "<u4").tobytes()


def tokens_object(token_ids: Sequence[int], max_model_len: int, strings: Sequence[str] | None) -> bytes:
    """Return the answer to ``POST /tokenize``. `strings` are the texts of the tokens; None: the client does not want them."""
    return msgspec.json.encode(
        {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
    )
