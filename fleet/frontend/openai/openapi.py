"""OpenAPI 3.1 document of the HTTP port, made from the types of the request bodies."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from fleet.frontend.openai import vector_bodies
from fleet.frontend.openai.bodies import ACCEPTED_VALUES, COMPLETION_FIELDS, ChatBody, CompletionBody
from fleet.frontend.openai.translated import messages, responses, tokens
from fleet.frontend.openai.translated.messages import CountTokensBody, MessagesBody
from fleet.frontend.openai.translated.responses import ResponsesBody
from fleet.frontend.openai.translated.tokens import DetokenizeBody, TokenizeBody
from fleet.frontend.openai.vector_bodies import ClassifyBody, EmbeddingsBody, PoolingBody, RerankBody, ScoreBody

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "cause": {"type": "string"},
            },
        }
    },
}
MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
OBJECT = {"type": "object"}
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
    "description": "Each event.",
}

OBJECT_ALONE = {"application/json": {"schema": OBJECT}}
OBJECT_OR_EVENTS = {**OBJECT_ALONE, "text/event-stream": {"schema": EVENT}}


_EFFECTLESS: dict[str, Mapping[str, tuple[object, ...]]] = {
    "ResponsesBody": responses.ACCEPTED_VALUES,
    "MessagesBody": messages.ACCEPTED_VALUES,
    "CountTokensBody": messages.ACCEPTED_VALUES,
    "TokenizeBody": tokens.ACCEPTED_VALUES,
    "ClassifyBody": vector_bodies.ACCEPTED_VALUES,
    "EmbeddingsBody": vector_bodies.ACCEPTED_VALUES,
    "PoolingBody": vector_bodies.ACCEPTED_VALUES,
    "RerankBody": vector_bodies.ACCEPTED_VALUES,
    "ScoreBody": vector_bodies.ACCEPTED_VALUES,
}


@cache
def openapi_document() -> bytes:
    """Return the OpenAPI document as JSON."""
    bodies, components = msgspec.json.schema_components(
        (
            CompletionBody,
            ChatBody,
            ResponsesBody,
            MessagesBody,
            CountTokensBody,
            TokenizeBody,
            DetokenizeBody,
            EmbeddingsBody,
            RerankBody,
            ScoreBody,
            ClassifyBody,
            PoolingBody,
        ),
        ref_template="#/components/schemas/{name}",
    )
    for body, schema in components.items():
        supported = COMPLETION_FIELDS if body == CompletionBody.__name__ else ()
        for name, values in _EFFECTLESS.get(body, ACCEPTED_VALUES).items():
            if name in schema.get("properties", {}) and name not in supported:
                schema["properties"][name] = {
                    "enum": [None, *values],
                    "description": "Accepted if it has no effect.",
                }
    completion, chat, response, message, counted, tokenized, detokenized, embedded, ranked, scored, *others = bodies
    classified, pooled = others
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Fleet", "version": "1", "description": "The OpenAI API, as Fleet serves it."},
            "paths": {
                "/v1/completions": {"post": _posting("complete", completion, OBJECT_OR_EVENTS)},
                "/v1/chat/completions": {"post": _posting("chat", chat, OBJECT_OR_EVENTS)},
                "/v1/responses": {"post": _posting("respond", response, OBJECT_OR_EVENTS)},
                "/v1/messages": {"post": _posting("message", message, OBJECT_OR_EVENTS, messages=True)},
                "/v1/messages/count_tokens": {"post": _posting("count_tokens", counted, OBJECT_ALONE, messages=True)},
                "/tokenize": {"post": _posting("tokenize", tokenized, OBJECT_ALONE)},
                "/detokenize": {"post": _posting("detokenize", detokenized, OBJECT_ALONE)},
                "/v1/embeddings": {"post": _posting("embed", embedded, OBJECT_ALONE)},
                "/v1/rerank": {"post": _posting("rerank", ranked, OBJECT_ALONE)},
                "/v1/score": {"post": _posting("score", scored, OBJECT_ALONE)},
                "/classify": {"post": _posting("classify", classified, OBJECT_ALONE)},
                "/pooling": {"post": _posting("pool", pooled, OBJECT_ALONE)},
                "/v1/models": {"get": _getting("models", 401)},
                "/v1/models/{model}": {
                    "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
                    "get": _getting("model", 401, 404),
                },
                "/health": {"get": _getting("health")},
            },
            "components": {
                "schemas": {**components, "Error": ERROR, "MessagesError": MESSAGES_ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _posting(name: str, body: dict[str, Any], answers: dict[str, Any], *, messages: bool = False) -> dict[str, Any]:
    failures = (400, 401, 404, 408, 411, 413, 415, 429, 431, 500, 503, 504)
    return {
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            **_failing(*failures, messages=messages),
        },
    }


def _getting(name: str, *failures: int) -> dict[str, Any]:
    return {
        "operationId": name,
        "responses": {
            "200": {"description": "What there is.", "content": OBJECT_ALONE},
            **_failing(*failures, 400, 431),
        },
    }


def _failing(*statuses: int, messages: bool = False) -> dict[str, Any]:
    """Describe the answers of failed requests with these statuses.

    If `messages` is true, errors have the form of the Messages API, or OpenAI's form if the HTTP request itself is malformed.
    """
    schema: dict[str, Any] = {"$ref": "#/components/schemas/Error"}
    if messages:
        schema = {"anyOf": [schema, {"$ref": "#/components/schemas/MessagesError"}]}
    content = {"application/json": {"schema": schema}}
    return {str(status): {"description": "Refused.", "content": content} for status in statuses}
