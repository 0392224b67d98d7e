"""Scripts of the simulated engine: JSON values follow their schemas, and tool calls are made as the request demands."""

import json

import jsonschema
import pytest

from fleet.core.requests import AnswerParsers, Choice, Grammar, JsonSchema, Sampling, ToolCallForm, ToolChoice
from fleet.core.work import ParsingTask
from tests.support.builders import a_start, token_bytes
from workers.engines.simulated.schema_values import value_of
from workers.engines.simulated.scripts import REASONING, ScriptWriter

SCHEMAS = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]},
    {"properties": {"a": {"enum": ["x", "y"]}, "b": {"const": 3}, "c": {"type": ["null", "string"]}}},
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.25}, "minItems": 3},
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "string"}, "minItems": 2},
    {"type": "string", "minLength": 9, "maxLength": 9},
    {"type": "string", "format": "date-time"},
    {"type": "integer", "minimum": 5, "exclusiveMaximum": 7},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "optional"},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, {"$ref": "#/$defs/b"}],
     "$defs": {"b": {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}}},
    {"type": "object", "properties": {"p": {"$ref": "#/$defs/Point"}}, "required": ["p"],
     "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}},
    {"$ref": "#/$defs/Tree", "$defs": {"Tree": {"type": "object", "required": ["left", "right"], "properties": {
        side: {"type": "array", "items": {"$ref": "#/$defs/Tree"}} for side in ("left", "right")}}}},
    {"$ref": "#/$defs/Link", "$defs": {"Link": {"type": "object", "required": ["next"], "properties": {
        "next": {"anyOf": [{"$ref": "#/$defs/Link"}, {"type": "null"}]}}}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_value_is_allowed_by_its_schema(schema):
    jsonschema.validate(value_of(schema), schema, cls=jsonschema.Draft202012Validator)


ENDLESS = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        3,
        {"type": "wizard"},
        {"enum": []},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
        {"properties": 3},
        {"type": "integer", "minimum": "low"},
        {"type": "integer", "multipleOf": 0, "minimum": 1},
        ENDLESS,
    ],
)
def test_malformed_schema_is_refused(schema):
    with pytest.raises(ValueError, match=r"schema|JSON"):
        value_of(schema)


def doubling(levels: int):
    """Return a schema whose smallest value has two to the power of `levels` leaves."""
    names = [f"a{level}" for level in range(levels)]
    pairs = {
        name: {"type": "array", "minItems": 2, "items": {"$ref": f"#/$defs/{after}"}}
        for name, after in zip(names, [*names[1:], "leaf"], strict=True)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**pairs, "leaf": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "string", "minLength": 10**12},
        {"type": "array", "items": {"const": "x" * 1000}, "minItems": 100},
        doubling(14),
    ],
)
def test_schema_that_demands_a_huge_value_is_refused(schema):
    with pytest.raises(ValueError, match="more than 65536 characters"):
        value_of(schema)


TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "stop"}},
    ]
)  # fmt: skip
HERMES = AnswerParsers(tool_calls="hermes", reasoning="")
ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
STOP = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


def written(
    model_dir, parsers: AnswerParsers = HERMES, prompt: str = "x", form=None, **parsing
) -> tuple[str, bool] | None:
    writer = ScriptWriter.open(str(model_dir), 10**6, parsers)
    task = ParsingTask(**parsing) if parsing else None
    tokens = b"".join(i.to_bytes(4, "little") for i in writer.tokenizer.encode(prompt, add_special_tokens=False).ids)
    script = writer.write(a_start(tokens=tokens, sampling=Sampling(form=form), parsing=task))
    return None if script is None else (writer.tokenizer.decode(script.tokens), script.is_whole)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"form": JsonSchema('{"type": "integer"}')}, ("1", True)),
        ({"form": Choice(("yes", "no"))}, ("yes", True)),
        ({"tools": TOOLS}, (ADD, True)),
        ({"tools": TOOLS, "earlier_calls": 1}, None),
        ({"tools": TOOLS, "tool_choice": ToolChoice.REQUIRED, "form": ToolCallForm()}, (ADD, True)),
        ({"tools": TOOLS, "tool_choice": ToolChoice.REQUIRED, "form": ToolCallForm(), "earlier_calls": 1}, (STOP, True)),
        ({"tools": TOOLS, "tool_choice": ToolChoice.REQUIRED, "form": ToolCallForm(), "earlier_calls": 5}, (STOP, True)),
        ({"tools": TOOLS, "tool_choice": ToolChoice.NAMED, "function": "stop", "form": ToolCallForm()}, (STOP, True)),
        ({"tools": TOOLS, "parsers": AnswerParsers(tool_calls="qwen3_coder")},
         ("<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>", True)),
    ],
)  # fmt: skip
def test_script_is_what_the_request_demands(model_dir, fields, expected):
    assert written(model_dir, **fields) == expected


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("x", f"<think>{REASONING}</think>"), ("x<think>", f"{REASONING}</think>"), ("<think></think>", None)],
)
def test_worker_with_a_reasoning_parser_reasons_first(model_dir, prompt, text):
    parsers = AnswerParsers(reasoning="qwen3")

    script = written(model_dir, parsers, prompt, tool_choice=ToolChoice.NONE)

    assert script == (None if text is None else (text, False))


@pytest.mark.parametrize("most", [0, 2, 1000])
def test_reasoning_is_cut_at_its_limit(model_dir, most):
    writer = ScriptWriter.open(str(model_dir), 10**6, AnswerParsers(reasoning="qwen3"))
    whole, end = [writer.tokenizer.encode(text, add_special_tokens=False).ids for text in (REASONING, "</think>")]
    start = a_start(
        tokens=token_bytes(writer.tokenizer.encode("x<think>").ids),
        parsing=ParsingTask(tool_choice=ToolChoice.NONE),
        sampling=Sampling(thinking_tokens=most),
    )

    script = writer.write(start)

    assert script is not None
    assert list(script.tokens) == [*whole[:most], *end]


def test_begun_answer_is_no_part_of_the_prompts_reasoning(model_dir):
    writer = ScriptWriter.open(str(model_dir), 10**6, AnswerParsers(reasoning="qwen3"))
    prompt, begun = [writer.tokenizer.encode(text).ids for text in ("x", f"<think>{REASONING}</think>and")]
    task = ParsingTask(tool_choice=ToolChoice.NONE)

    script = writer.write(a_start(tokens=token_bytes(prompt), parsing=task))
    again = writer.write(a_start(tokens=token_bytes(prompt + begun), parsing=task, generated_tokens=len(begun)))

    assert script is not None
    assert again == script


@pytest.mark.parametrize("form", [Grammar('root ::= "a"'), ToolCallForm(), JsonSchema("false")])
def test_form_that_the_engine_does_not_keep_is_refused(model_dir, form):
    with pytest.raises(ValueError, match=r"form|tools|allows nothing"):
        written(model_dir, form=form)


def test_folder_without_a_fitting_tokenizer_has_no_writer(model_dir, tmp_path):
    assert ScriptWriter.open(str(tmp_path), 10**6, None) is None
    assert ScriptWriter.open("", 10**6, None) is None
    assert ScriptWriter.open(str(model_dir), 10, None) is None
