"""Tests of tool calls and reasoning through `fleet up` with the simulated engine, as `openai`'s client sees them."""

import json

import anthropic
import jsonschema
import openai
import pytest

from fleet.client import AnswerParsing, Client, Finish
from tests.support.fleet_processes import fleet_up

pytestmark = pytest.mark.integration

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 2}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "time"}}
QUESTION = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "How will the weather be?"}]
THOUGHT = "A short thought."


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with fleet_up(tmp_path_factory.mktemp("tools"), "--reasoning-parser", "qwen3") as up:
        yield up


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.endpoints['http']}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": QUESTION, "max_tokens": 200, **fields})


def streamed(chunks) -> tuple[str, str, list[tuple[str, str]], str]:
    """Put a stream together, as clients do."""
    reasoning = content = finish = ""
    calls: dict[int, list[str]] = {}
    ids = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            name, arguments = calls.setdefault(part.index, ["", ""])
            calls[part.index] = [name + (part.function.name or ""), arguments + (part.function.arguments or "")]
            if part.id:
                assert part.index not in ids, "the id comes once"
                ids[part.index] = part.id
        finish = choice.finish_reason or finish
    assert ids.keys() == calls.keys()
    return reasoning, content, [(name, arguments) for name, arguments in calls.values()], finish


def whole(answer) -> tuple[str, str, list[tuple[str, str]], str]:
    (choice,) = answer.choices
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return getattr(message, "reasoning_content", ""), message.content or "", calls, choice.finish_reason


@pytest.mark.parametrize("placement", ["aggregated", "disaggregated"])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "weather"),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "weather"),
        ({"tool_choice": "required"}, "weather"),
        ({"tool_choice": NAMED}, "time"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "weather"),
    ],
)
def test_declared_tool_is_called_streamed_and_whole(client, fields, name, placement):
    fields = {"tools": TOOLS, "extra_body": {"fleet": {"placement": placement}}, **fields}

    answer = whole(ask(client, **fields))

    reasoning, content, [(called, arguments)], finish = answer
    assert (reasoning, content, called, finish) == (THOUGHT, "", name, "tool_calls")
    jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object"})
    assert streamed(ask(client, stream=True, **fields)) == answer


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_each_of_several_answers_has_the_demanded_call(client, choice):
    answer = ask(client, tools=TOOLS, tool_choice=choice, n=3)

    name = "time" if choice is NAMED else "weather"
    assert [each.finish_reason for each in answer.choices] == ["tool_calls"] * 3
    assert [call.function.name for each in answer.choices for call in each.message.tool_calls] == [name] * 3
    assert len({call.id for each in answer.choices for call in each.message.tool_calls}) == 3


def test_agent_gets_text_after_the_result_of_its_tool(client):
    message = ask(client, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun."}
    conversation = [*QUESTION, message.model_dump(exclude_none=True), result]

    reasoning, content, calls, finish = whole(ask(client, tools=TOOLS, messages=conversation, max_tokens=20))

    assert (reasoning, calls, finish) == (THOUGHT, [], "length")
    assert content


def test_tool_choice_none_gives_text(client):
    _, content, calls, finish = whole(ask(client, tools=TOOLS, tool_choice="none", max_tokens=20))

    assert (calls, finish) == ([], "length")
    assert content


def test_call_that_is_cut_is_text_and_says_length(client):
    _, content, calls, finish = whole(ask(client, tools=TOOLS, max_tokens=25))

    assert (calls, finish) == ([], "length")
    assert content.startswith("<tool_call>")


def test_json_schema_is_kept(client):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}

    _, content, _, finish = whole(ask(client, response_format=form))

    jsonschema.validate(json.loads(content), WEATHER)
    assert finish == "stop"


FUNCTION = {"name": "f"}
MALFORMED = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {**FUNCTION, "parameters": [1]}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {**FUNCTION, "parameters": {"type": "wizard"}}}]}, "tools"),
    (
        {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": {"properties": 3}}}]},
        "tools[0].function.parameters.properties",
    ),
    (
        {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": {"items": {"anyOf": [3]}}}}]},
        "tools[0].function.parameters.items.anyOf[0]",
    ),
    (
        {"tools": [{"type": "function", "function": {**FUNCTION, "parameters": {"required": [3]}}}]},
        "tools[0].function.parameters.required[0]",
    ),
    ({"tools": [{"type": "function", "function": FUNCTION}] * 10_000}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice.function.name"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs"),
    ({"extra_body": {"chat_template_kwargs": {"enable_thought": True}}}, "chat_template_kwargs"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
]


@pytest.mark.parametrize(("fields", "param"), MALFORMED)
def test_malformed_tools_are_refused_by_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)

    assert refused.value.param == param


def test_thinking_can_be_turned_off(cluster, client):
    assert whole(ask(client, max_tokens=40))[0] == THOUGHT
    reasoning, content, _, finish = whole(ask(client, reasoning_effort="none", max_tokens=40))
    assert (reasoning, THOUGHT in content, finish) == ("", False, "length")

    def kinds(**fields) -> list[str]:
        question = [{"role": "user", "content": "How will the weather be?"}]
        message = anthropic_client.messages.create(model="tiny", max_tokens=40, messages=question, **fields)
        return [block.type for block in message.content]

    with anthropic.Anthropic(base_url=cluster.endpoints["http"], api_key="none") as anthropic_client:
        assert kinds() == ["thinking", "text"]
        assert kinds(thinking={"type": "disabled"}) == ["text"]


def test_tools_are_refused_where_no_parser_is_known(tmp_path):
    with fleet_up(tmp_path, "--tool-call-parser", "", "--prefill", "0") as up:
        client = openai.OpenAI(base_url=f"{up.endpoints['http']}/v1", api_key="none", max_retries=0, timeout=60)
        with pytest.raises(openai.BadRequestError, match="set tool_call_parser of its workers") as refused:
            ask(client, tools=TOOLS)

        assert refused.value.param == "tools"
        assert whole(ask(client, max_tokens=5))[3] == "length"


def test_client_of_grpc_gets_calls_apart_from_the_text(cluster):
    question = [{"role": "user", "content": "How will the weather be?"}]
    with Client(cluster.grpc) as client:
        parsed = client.complete(question, tools=TOOLS, parsing=AnswerParsing(), max_tokens=200)
        plain = client.complete(question, tools=TOOLS, max_tokens=200)

    assert (parsed.finish, parsed.reasoning, parsed.text) == (Finish.TOOL_CALLS, THOUGHT, "")
    assert [call.name for call in parsed.tool_calls] == ["weather"]
    assert plain.tool_calls == ()
