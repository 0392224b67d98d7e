"""Tests of tool calls with a real vLLM engine on the CPU."""

import json
from importlib.util import find_spec

import jsonschema
import openai
import pytest

from tests.support.fleet_processes import fleet_up

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

READY_SECONDS = 300  # 25 to 60 on two idle cores
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "water")]
NAMED = {"type": "function", "function": {"name": "water"}}

# A model without a meaning may write white space for ever where a grammar allows it.
TOPOLOGY = """
[[pools]]
role = "both"
vllm = {extra_args = {structured_outputs_config = {backend = "xgrammar", disable_any_whitespace = true}}}
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    (folder / "topology.toml").write_text(TOPOLOGY)
    with (
        fleet_up(folder, "--config", str(folder / "topology.toml"), engine="vllm", ready_seconds=READY_SECONDS) as up,
        openai.OpenAI(base_url=f"{up.endpoints['http']}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def ask(client, **fields):
    messages = [{"role": "user", "content": "How warm is it?"}]
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "tools": TOOLS, "max_tokens": 300, "temperature": 0, **fields}
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("choice", "names"), [("required", {"weather", "water"}), (NAMED, {"water"})])
def test_demanded_call_has_arguments_of_its_schema(client, choice, names, seed):
    fields = {"tool_choice": choice, "temperature": 1, "seed": seed, "parallel_tool_calls": False}

    answer = ask(client, **fields).choices[0]

    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_streamed_call_is_that_of_the_whole_answer(client, choice):
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    whole = ask(client, **fields).choices[0].message.tool_calls[0].function

    name = arguments = ""
    for chunk in ask(client, stream=True, **fields):
        for part in chunk.choices[0].delta.tool_calls or ():
            name += part.function.name or ""
            arguments += part.function.arguments or ""

    assert (name, arguments) == (whole.name, whole.arguments)


def test_text_of_a_model_that_calls_nothing_is_passed_on(client):
    free = ask(client, max_tokens=20).choices[0].message
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, max_tokens=20, stream=True))

    assert free.content
    assert free.tool_calls is None
    assert streamed == free.content


@pytest.mark.parametrize("parameters", [{"type": "wizard"}, {"type": "object", "properties": {"x": {"$ref": "#/no"}}}])
def test_schema_that_no_grammar_can_keep_harms_nobody(client, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    answer = ask(client, tools=tools, tool_choice="required", max_tokens=40).choices[0]

    assert answer.finish_reason in {"tool_calls", "length"}
    assert {call.function.name for call in answer.message.tool_calls or ()} <= {"f"}
