"""Tests of docs/api.md: it lists each field and header that the code knows, and says truly how Fleet treats it."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import RequestRejected
from fleet.core.ids import RequestId
from fleet.frontend.openai import vector_bodies
from fleet.frontend.openai.bodies import (
    ACCEPTED_VALUES,
    COMPLETION_FIELDS,
    HINT_HEADERS,
    ChatBody,
    CompletionBody,
    OpenAiBody,
)
from fleet.frontend.openai.requests import OpenAiRequest, read_chat, read_completion
from fleet.frontend.openai.translated import messages, responses, tokens
from fleet.frontend.openai.translated.messages import CountTokensBody, MessagesBody, read_messages
from fleet.frontend.openai.translated.responses import ResponsesBody, read_responses
from fleet.frontend.openai.translated.tokens import TokenizeBody, read_tokenize

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()
OF_CHATS = ("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort")
SHARED = {*OpenAiBody.__struct_fields__}
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


class Listing(Struct, frozen=True):
    """One table of fields, and how the fields are read."""

    fields: set[str]
    accepted: Mapping[str, tuple[object, ...]]  # accepted values of unsupported fields
    read: Callable[[dict], object]  # parses a body
    least: dict  # the smallest valid body


def completion(body: dict) -> OpenAiRequest:
    return read_completion(json.dumps(body).encode(), RequestId("r"), Nanos(0))


def chat(body: dict) -> OpenAiRequest:
    return read_chat(json.dumps(body).encode(), RequestId("r"), Nanos(0))


def tokenize(body: dict) -> object:
    return read_tokenize(json.dumps(body).encode(), RequestId("r"), Nanos(0))


def response(body: dict) -> OpenAiRequest:
    return read_responses(json.dumps(body).encode(), RequestId("r"), Nanos(0)).chat


def message(body: dict) -> OpenAiRequest:
    return read_messages(json.dumps(body).encode(), RequestId("r"), Nanos(0)).chat


LISTINGS = {
    "Fields of both endpoints": Listing(SHARED - COMPLETION_FIELDS, ACCEPTED_VALUES, completion, {"prompt": "x"}),
    "Fields of completions": Listing(
        ({*CompletionBody.__struct_fields__} - SHARED) | COMPLETION_FIELDS,
        dict.fromkeys(OF_CHATS, ()),
        completion,
        {"prompt": "x"},
    ),
    "Fields of chats": Listing(
        ({*ChatBody.__struct_fields__} - SHARED) | COMPLETION_FIELDS, ACCEPTED_VALUES, chat, {"messages": USER}
    ),
    "Fields of responses": Listing(
        {*ResponsesBody.__struct_fields__}, responses.ACCEPTED_VALUES, response, {"input": "hi"}
    ),
    "Fields of messages": Listing(
        {*MessagesBody.__struct_fields__},
        messages.ACCEPTED_VALUES,
        message,
        {"model": "m", "max_tokens": 9, "messages": USER},
    ),
    "Fields of tokenize": Listing(
        {*TokenizeBody.__struct_fields__},
        {field: values for field, values in tokens.ACCEPTED_VALUES.items() if field != "add_special_tokens"},
        tokenize,
        {"prompt": "x"},
    ),
}
VALUES = {
    "add_special_tokens": False,
    "allowed_token_ids": [3],
    "bad_words": ["x"],
    "best_of": 2,
    "cache_salt": "x",
    "chat_template_kwargs": {"x": 1},
    "ebnf": "x",
    "echo": True,
    "fleet": {"session": "x"},
    "frequency_penalty": 1,
    "guided_choice": ["x"],
    "guided_grammar": "x",
    "guided_json": SCHEMA,
    "guided_regex": "x",
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "input": "other",
    "instructions": "x",
    "json_schema": SCHEMA,
    "logit_bias": {"3": 1},
    "logprobs": 2,
    "max_completion_tokens": 7,
    "max_output_tokens": 7,
    "max_tokens": 7,
    "messages": [{"role": "user", "content": "other"}],
    "min_p": 0.5,
    "min_tokens": 3,
    "model": "x",
    "n": 2,
    "no_stop_trim": True,
    "output_config": {"effort": "high"},
    "presence_penalty": 1,
    "priority": 3,
    "prompt": "other",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "regex": "x",
    "repetition_penalty": 1.5,
    "request_id": "x",
    "response_format": FORMAT,
    "return_token_ids": True,
    "return_token_strs": True,
    "return_tokens_as_token_ids": True,
    "seed": 3,
    "session_id": "x",
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_sequences": ["x"],
    "stop_token_ids": [3],
    "stream": True,
    "structured_outputs": {"regex": "x"},
    "system": "x",
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "disabled"},
    "thinking_token_budget": 5,
    "tools": [FUNCTION],
    "top_k": 3,
    "top_p": 0.5,
    "truncate_prompt_tokens": 3,
}
"""For each field that the page calls taken, a value that changes what the request means."""

TOOLS = {
    "Fields of chats": {"tools": [FUNCTION]},
    "Fields of responses": {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
    "Fields of messages": {"tools": [{"name": "f", "input_schema": SCHEMA}]},
}
WITH_OTHERS = {
    "stream_options": ({"stream": True}, {"continuous_usage_stats": True}),
    "top_logprobs": ({"logprobs": True}, 2),
    "parallel_tool_calls": ("tools", False),
    "tool_choice": ("tools", "required"),
}
"""Fields that have an effect only together with other fields: the other fields, and the value."""


def rows(title: str) -> list[list[str]]:
    section = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)
    (text,) = [each for each in section if each.startswith(f"{title}\n")]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("title", LISTINGS)
def test_page_lists_every_field_with_its_treatment(title):
    listing, listed = LISTINGS[title], {row[0].strip("`"): row[1] for row in rows(title)}

    assert listed.keys() == listing.fields
    assert len(rows(title)) == len(listed), "a field is listed twice"
    for field, taken in listed.items():
        if field in listing.accepted and not (title == "Fields of completions" and field in COMPLETION_FIELDS):
            accepted = ", ".join(f"`{json.dumps(value)}`" for value in listing.accepted[field])
            assert taken == (f"only {accepted}" if accepted else "no"), field
        else:
            assert taken in {"yes", "ignored"}, field


def meaning(listing: Listing, fields: dict) -> object:
    """Return the parsed request of the smallest body with these fields; if it is refused, the name of the refused field."""
    try:
        return listing.read(listing.least | fields)
    except RequestRejected as refused:
        return refused.field


@pytest.mark.parametrize("title", LISTINGS)
def test_fields_that_the_page_calls_taken_have_an_effect(title):
    """Set each field: a field that the page calls ignored must not change the parsed request, and a field called taken must."""
    listing = LISTINGS[title]
    for row in rows(title):
        field = row[0].strip("`")
        beside, value = WITH_OTHERS.get(field, ({}, VALUES.get(field)))
        others = TOOLS.get(title, {}) if beside == "tools" else beside
        if title == "Fields of tokenize" and field in ("messages", "tools", "chat_template_kwargs"):
            others = {"prompt": None} if field == "messages" else {"prompt": None, "messages": USER}
        if field == "tools":
            value = TOOLS.get(title, {"tools": [FUNCTION]})["tools"]
        elif field == "tool_choice" and title == "Fields of messages":
            value = {"type": "any"}
        elif field == "logprobs" and title == "Fields of chats":
            value = True
        if row[1] == "ignored":
            ignored = "x" if field == "user" else {"some": "thing"}
            with_field = meaning(listing, {field: ignored})
            assert not isinstance(with_field, str), f"{field}: refused for {with_field}"
            assert with_field == meaning(listing, {}), field
        elif row[1] == "yes":
            with_field = meaning(listing, others | {field: value})
            assert not isinstance(with_field, str), f"{field}: refused for {with_field}"
            assert with_field != meaning(listing, others), field


def test_page_names_every_field_of_counts_of_tokens():
    (line,) = [line for line in PAGE.splitlines() if line.startswith("`/v1/messages/count_tokens` takes")]
    taken, ignored, refused = ({*re.findall("`([a-z_]+)`", part)} for part in re.split("It ignores|it refuses", line))

    assert ignored == {"cache_control"}
    assert refused == {*CountTokensBody.__struct_fields__} & messages.ACCEPTED_VALUES.keys()
    assert taken == {*CountTokensBody.__struct_fields__} - ignored - refused


def test_page_lists_every_field_of_the_paths_for_vectors():
    kinds = (vector_bodies.ClassifyBody, vector_bodies.PoolingBody, vector_bodies.RerankBody, vector_bodies.ScoreBody)
    known = {field for kind in kinds for field in kind.__struct_fields__}
    table = [row for row in rows("Embeddings, reranking and scores") if len(row) == 3]
    listed = {name: row[2] for row in table for name in re.findall("`([a-z_0-9]+)`", row[0])}

    assert listed.keys() == known
    for field, taken in listed.items():
        if field in vector_bodies.ACCEPTED_VALUES:
            accepted = ", ".join(f"`{json.dumps(value)}`" for value in vector_bodies.ACCEPTED_VALUES[field])
            assert taken == (f"only {accepted}" if accepted else "no"), field
        else:
            assert not taken.startswith(("only", "no ")), field


def test_page_lists_every_header_with_its_field():
    listed = [(row[0].strip("`"), row[1].strip("`")) for row in rows("Hints in headers")]

    assert listed == [(name.decode(), hint.field) for name, hint in HINT_HEADERS.items()]
