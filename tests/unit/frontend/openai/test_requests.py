import base64
import io
import json
import re

import pytest
from PIL import Image

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.errors import Reason, RequestRejected, invalid
from fleet.core.ids import RequestId
from fleet.core.requests import (
    AnswerParsing,
    AnyObject,
    ChatMessage,
    ChatPrompt,
    Choice,
    Grammar,
    JsonSchema,
    Pattern,
    Sampling,
    StructuralTag,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
)
from fleet.core.roles import KvPath, Placement
from fleet.frontend.openai.bodies import HINT_HEADERS, OPENAI_FIELD_NAMES, FleetOptions
from fleet.frontend.openai.requests import Details, read_chat, read_completion
from fleet.net.status_codes import rename_field
from tests.support.builders import token_bytes

ID = RequestId("r1")
NOW = Nanos(5 * SECOND)
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def an_image_file(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), color).save(file, "PNG")
    return file.getvalue()


def an_image_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def completion(**fields: object):
    return read_completion(json.dumps({"prompt": "x", **fields}).encode(), ID, NOW)


def chat(**fields: object):
    return read_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode(), ID, NOW)


def test_absent_and_null_fields_get_openai_defaults():
    nothing = dict.fromkeys(
        ("temperature", "max_tokens", "stop", "seed", "stream", "n", "tools", "logprobs", "fleet", "model")
    )

    for parsed in (completion(), completion(**nothing)):
        assert parsed.request.sampling == Sampling(max_tokens=16, temperature=1.0)
        assert (parsed.request.fill_context, parsed.stream, parsed.request.deadline) == (False, False, None)
    for parsed in (chat(), chat(**nothing)):
        assert parsed.request.fill_context


def test_all_sampling_fields_are_read():
    sent = {
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 3,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [1, 2],
        "logprobs": 5,
    }

    parsed = completion(**sent)

    assert parsed.request.sampling == Sampling(**{**sent, "stop_token_ids": (1, 2)})


@pytest.mark.parametrize(
    ("sent", "read"), [(-1, None), (0, 0), (-2, 2**64 - 2), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)]
)
def test_negative_seeds_are_read_as_by_vllm_and_pytorch(sent, read):
    assert completion(seed=sent).request.sampling.seed == read
    assert chat(seed=sent).request.sampling.seed == read


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 10**30])
def test_seed_beyond_64_bits_is_refused_with_its_range(seed):
    with pytest.raises(RequestRejected, match="must be from -9223372036854775808 to 18446744073709551615") as refused:
        chat(seed=seed)

    assert refused.value.field == "seed"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", TextPrompt("text")),
        (["text"], TextPrompt("text")),
        ([1, 2], TokenPrompt(token_bytes([1, 2]))),
        ([[1, 2]], TokenPrompt(token_bytes([1, 2]))),
        ([], TokenPrompt(b"")),
    ],
)
def test_prompt_may_be_text_or_tokens(prompt, read):
    assert completion(prompt=prompt).request.prompt == read


def test_message_content_may_be_parts():
    messages = [
        {"role": "system", "content": "be brief", "name": "Ada", "audio": "ignored"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]

    prompt = chat(messages=messages).request.prompt

    assert prompt == ChatPrompt(
        (ChatMessage(role="system", content="be brief", name="Ada"), ChatMessage(role="user", content="ab"))
    )


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        ({"content": None}, ""),
        ({"content": None, "reasoning_content": "cut"}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ],
)
def test_earlier_answer_may_have_no_content(answer, content):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **answer}, {"role": "user", "content": "y"}]

    assert chat(messages=messages).request.prompt.messages[1].content == content


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_only_answers_may_have_no_content(role):
    with pytest.raises(RequestRejected) as refused:
        chat(messages=[{"role": role, "content": None, "tool_call_id": "c"}])

    assert refused.value.field == "messages[0].content"


def test_images_are_read_in_the_order_of_their_places():
    one, other = (an_image_file(color) for color in ("red", "blue"))
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": an_image_url(one)}]},
        {"role": "assistant", "content": "Red."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And"},
                {"type": "image_url", "image_url": {"url": an_image_url(other), "detail": "low"}},
                {"type": "text", "text": "this?"},
            ],
        },
    ]

    request = chat(messages=messages).request

    assert request.images == (one, other)
    assert request.prompt == ChatPrompt(
        (
            ChatMessage(role="user", content="", parts=(None,)),
            ChatMessage(role="assistant", content="Red."),
            ChatMessage(role="user", content="Andthis?", parts=("And", None, "this?")),
        )
    )


def test_max_completion_tokens_wins_over_max_tokens():
    parsed = chat(max_tokens=5, max_completion_tokens=6)

    assert parsed.request.sampling.max_tokens == 6
    assert parsed.names["sampling.max_tokens"] == "max_completion_tokens"
    assert chat(max_tokens=5).names["sampling.max_tokens"] == "max_tokens"


def test_top_logprobs_needs_logprobs():
    assert chat(logprobs=True).request.sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).request.sampling.logprobs == 3
    assert chat(logprobs=False).request.sampling.logprobs is None
    with pytest.raises(RequestRejected) as refused:
        chat(top_logprobs=3)
    assert refused.value.field == "top_logprobs"


def test_stop_may_be_one_string_or_several():
    assert completion(stop="a").request.stop == ("a",)
    assert completion(stop=["a", "b"]).request.stop == ("a", "b")


def test_options_of_the_fleet_object_are_read():
    options = {
        "placement": "disaggregated",
        "kv_path": "store",
        "session": "s",
        "tenant": "t",
        "priority": 3,
        "timeout_ms": 250,
        "return_token_ids": True,
    }

    parsed = completion(fleet=options)

    request = parsed.request
    assert (request.placement, request.kv_path) == (Placement.DISAGGREGATED, KvPath.STORE)
    assert (request.session, request.tenant, request.priority) == ("s", "t", 3)
    assert request.deadline == NOW + 250 * MILLISECOND
    assert parsed.return_token_ids


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{}}}'


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(
    ("fields", "form", "called"),
    [
        ({"response_format": {"type": "text"}}, None, "form"),
        ({"response_format": {"type": "json_object"}}, AnyObject(), "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            JsonSchema(SCHEMA_TEXT),
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(SCHEMA_TEXT), "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, AnyObject(), "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, Pattern("a+"), "structured_outputs.regex"),
        ({"guided_json": SCHEMA_TEXT}, JsonSchema(SCHEMA_TEXT), "guided_json"),
        ({"guided_choice": ["a", "b"]}, Choice(("a", "b")), "guided_choice"),
        ({"guided_grammar": "root ::= x"}, Grammar("root ::= x"), "guided_grammar"),
        ({"json_schema": SCHEMA_TEXT}, JsonSchema(SCHEMA_TEXT), "json_schema"),
        ({"regex": "a+"}, Pattern("a+"), "regex"),
        ({"ebnf": "root ::= x"}, Grammar("root ::= x"), "ebnf"),
        ({"structured_outputs": {"structural_tag": "{}"}}, StructuralTag("{}"), "structured_outputs.structural_tag"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            StructuralTag('{"type":"structural_tag","format":{"type":"any_text"}}'),
            "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<f"]}},
            StructuralTag('{"type":"structural_tag","structures":[],"triggers":["<f"]}'),
            "response_format",
        ),
    ],
)
def test_structured_output_is_read_from_openai_and_vllm_fields(read, fields, form, called):
    parsed = read(**fields)

    assert parsed.request.sampling.form == form
    assert parsed.names.get("sampling.form") == called
    assert parsed.request.sampling.stateless == (form is None)


@pytest.mark.parametrize(
    ("fields", "parsing"),
    [
        ({}, AnswerParsing(tool_choice=ToolChoice.NONE)),
        ({"tools": TOOLS}, AnswerParsing()),
        ({"tools": TOOLS, "tool_choice": "none"}, AnswerParsing(tool_choice=ToolChoice.NONE)),
        ({"tools": TOOLS, "tool_choice": "required"}, AnswerParsing(tool_choice=ToolChoice.REQUIRED)),
        ({"tools": TOOLS, "parallel_tool_calls": False}, AnswerParsing(parallel_calls=False)),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            AnswerParsing(tool_choice=ToolChoice.NAMED, function="f"),
        ),
    ],
)
def test_tool_choice_says_which_calls_an_answer_may_have(fields, parsing):
    assert chat(**fields).request.parsing == parsing


F, G, H = ({"type": "function", "function": {"name": name}} for name in "fgh")


def allowed(*tools: dict, mode: str = "auto") -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_model_knows_only_the_allowed_tools(mode):
    described = [{**tool, "function": {**tool["function"], "description": "does it"}} for tool in (F, G, H)]
    request = chat(tools=described, tool_choice=allowed(H, F, F, mode=mode), parallel_tool_calls=False).request

    assert json.loads(request.prompt.tools) == [described[0], described[2]]
    assert request.parsing == AnswerParsing(tool_choice=ToolChoice(mode), parallel_calls=False)


@pytest.mark.parametrize(
    ("tools", "choice", "field", "said"),
    [
        ([F, G], allowed(F, H), "tool_choice.allowed_tools.tools[1]", "'h' is none of the tools: f, g"),
        ([], allowed(F), "tool_choice.allowed_tools.tools[0]", "there are none"),
        ([F], allowed(), "tool_choice.allowed_tools.tools", "must not be empty"),
        ([F], allowed({"type": "custom"}), "tool_choice.allowed_tools.tools[0]", "of type 'function'"),
        ([F], allowed(F, mode="none"), "tool_choice.allowed_tools.mode", '"auto" or "required"'),
        ([{"type": "function", "function": "f"}], allowed(F), "tool_choice.allowed_tools.tools[0]", "there are none"),
        ([F], {"type": "allowed_tools"}, "tool_choice", "allowed_tools"),
        (
            [F],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
            "tool_choice.allowed_tools.tools",
            "missing",
        ),
    ],
)
def test_allowed_tools_that_cannot_be_obeyed_are_refused(tools, choice, field, said):
    with pytest.raises(RequestRejected, match=re.escape(said)) as refused:
        chat(tools=tools, tool_choice=choice)
    assert refused.value.field == field


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_response_format_has_no_effect_on_demanded_calls(choice):
    """Send a response format together with a demanded tool call, as instructor and some agents do: the format is ignored."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

    assert chat(tools=TOOLS, tool_choice=choice, response_format=form).request.sampling.form is None
    assert chat(tools=TOOLS, tool_choice="auto", response_format=form).request.sampling.form == JsonSchema(SCHEMA_TEXT)
    assert chat(tools=TOOLS, tool_choice=choice, guided_regex="a").request.sampling.form == Pattern("a")


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": False, "x": [1]}}, {"enable_thinking": False, "x": [1]}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_reasoning_effort_and_template_arguments_are_variables(fields, variables):
    assert json.loads(chat(**fields).request.prompt.template_args) == variables


def test_tools_are_part_of_the_prompt_unless_choice_is_none():
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]

    for fields in ({}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
        assert json.loads(chat(tools=tools, **fields).request.prompt.tools) == tools
    assert chat(tools=tools, tool_choice="none").request.prompt.tools == ""
    assert chat(tools=[]).request.prompt.tools == ""


def test_tool_message_names_the_call_that_it_answers():
    with pytest.raises(RequestRejected) as refused:
        chat(messages=[{"role": "user", "content": "x"}, {"role": "tool", "content": "2"}])
    assert refused.value.field == "messages[1].tool_call_id"


@pytest.mark.parametrize("metadata", ["text", [1], 5])
def test_metadata_that_is_no_object_is_refused_by_name(metadata):
    chat(metadata={"user": "u"})
    with pytest.raises(RequestRejected) as refused:
        chat(metadata=metadata)
    assert refused.value.field == "metadata"


def test_tool_calls_and_results_are_part_of_the_prompt():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

    prompt = chat(
        messages=[
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
        ]
    ).request.prompt

    assert json.loads(prompt.messages[1].tool_calls) == [call]
    assert (prompt.messages[1].content, prompt.messages[2].tool_call_id, prompt.messages[2].name) == ("", "c1", "f")


def test_unknown_fields_and_values_without_effect_are_accepted():
    parsed = completion(
        user="u", metadata={"a": 1}, n=1, best_of=1, echo=False, suffix="", logit_bias={}, something_new=[1]
    )
    assert parsed.details is None
    chat(tools=[], response_format={"type": "text"}, parallel_tool_calls=True, store=False, modalities=["text"])
    chat(service_tier="auto", safety_identifier="s", prompt_cache_key="k")


@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_unknown_fields_are_refused_by_name_on_demand(read):
    body = {"prompt": "x", "messages": [], "something_new": 1}
    del body["messages" if read is read_completion else "prompt"]

    with pytest.raises(RequestRejected) as refused:
        read(json.dumps(body).encode(), ID, NOW, strict=True)

    assert refused.value.field == "something_new"


@pytest.mark.parametrize(("given", "limit"), [(7, 7), (0, 0), (-1, None), (None, None)])
def test_thinking_token_budget_limits_the_reasoning(given, limit):
    assert chat(thinking_token_budget=given).request.sampling.thinking_tokens == limit
    assert completion(thinking_token_budget=given).request.sampling.thinking_tokens == limit


def test_details_are_read_only_where_wanted():
    stream = {"stream": True, "stream_options": {"continuous_usage_stats": True}}

    assert completion(n=3).details == Details(n=3, best_of=3)
    assert completion(n=2, best_of=5).details == Details(n=2, best_of=5)
    assert completion(echo=True, logprobs=2).details == Details(echo=True)
    assert completion(echo=True, logprobs=2).request.sampling.prompt_logprobs == 2
    assert completion(echo=True, logprobs=2, prompt_logprobs=5).request.sampling.prompt_logprobs == 5
    assert completion(echo=True).request.sampling.prompt_logprobs is None
    assert completion(prompt=["a", [1]]).details == Details(more_prompts=(TokenPrompt(token_bytes([1])),))
    assert chat(return_token_ids=True, return_tokens_as_token_ids=True).details == Details(
        token_ids=True, token_names=True
    )
    assert chat(prompt_logprobs=0).details == Details(prompt_logprobs=True)
    assert chat(**stream).details == Details(continuous_usage=True)
    assert chat().details is None


def test_vllm_fields_of_the_text_and_the_prompt_are_read():
    request = completion(
        bad_words=["a"],
        cache_salt="s",
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        truncate_prompt_tokens=5,
        allowed_token_ids=[1],
        logit_bias={"7": -1.5},
        add_special_tokens=False,
        priority=3,
        session_id="c1",
        request_id="mine",
    ).request

    assert (request.bad_words, request.cache_salt, request.truncate_prompt) == (("a",), "s", 5)
    assert (request.include_stop_string, request.show_special_tokens) == (True, True)
    assert (request.sampling.allowed_token_ids, request.sampling.logit_bias) == ((1,), ((7, -1.5),))
    assert (request.prompt, request.priority, request.session) == (TextPrompt("x", special=False), -3, "c1")
    assert request.id == "mine"
    assert chat(no_stop_trim=True).request.include_stop_string


def test_headers_complete_the_fleet_object():
    headers = {
        b"x-session-id": b"s",
        b"x-vllm-priority": b"5",
        b"x-fleet-expected-tokens": b"70",
        b"x-fleet-tenant": b"t",
    }
    body = json.dumps({"prompt": "x", "fleet": {"session": "own", "labels": ["a"]}}).encode()

    parsed = read_completion(body, ID, NOW, headers | {b"x-fleet-timeout-ms": b"250"})
    alone = read_completion(b'{"prompt": "x"}', ID, NOW, headers)

    request = parsed.request
    assert (request.session, request.priority, request.expected_tokens) == ("own", -5, 70)
    assert (request.tenant, request.labels, request.deadline) == ("t", ("a",), NOW + 250 * MILLISECOND)
    assert (alone.request.session, alone.request.deadline) == ("s", None)


def test_rejection_of_a_hint_names_the_header_that_had_it():
    body = b'{"prompt": "x", "fleet": {"session": "own"}}'
    parsed = read_completion(body, ID, NOW, {b"x-session-id": b"s", b"x-fleet-tenant": b"t"})

    refused = [rename_field(invalid(field, "is wrong"), parsed.names).field for field in ("tenant", "session", "pin")]

    assert refused == ["x-fleet-tenant", "fleet.session", "fleet.pin"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"x-fleet-priority", b"high"),
        (b"x-fleet-priority", b"101"),
        (b"x-fleet-priority", b"9" * 5000),
        (b"x-fleet-timeout-ms", b"0"),
        (b"x-fleet-expected-tokens", b"-1"),
        (b"x-session-id", b"\xff"),
        (b"x-session-id", b"s" * 257),
        (b"x-fleet-tenant", b"t" * 257),
    ],
)
def test_wrong_hint_is_refused_under_its_headers_name(name, value):
    with pytest.raises(RequestRejected) as refused:
        read_completion(b'{"prompt": "x"}', ID, NOW, {name: value})

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, name.decode())


def test_first_header_of_a_field_counts():
    headers = {b"x-dynamo-session-id": b"b", b"x-fleet-session": b"a", b"x-smg-routing-key": b"c"}

    assert read_completion(b'{"prompt": "x"}', ID, NOW, headers).request.session == "a"
    assert {hint.field for hint in HINT_HEADERS.values()} <= set(FleetOptions.__struct_fields__)


REFUSED = [
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 129}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"truncation_side": "right"}, "truncation_side"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"priority": 101}, "priority"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ({"suffix": "x"}, "suffix"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"bad_words": "x"}, "bad_words"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"functions": [{}]}, "functions"),
    ({"tool_choice": "perhaps"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"reasoning_effort": "colossal"}, "reasoning_effort"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"stop": [1]}, "stop[0]"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
    ({"fleet": {"placement": "somewhere"}}, "fleet.placement"),
    ({"fleet": {"timeout_ms": -1}}, "fleet.timeout_ms"),
    ({"fleet": {"colour": "red"}}, "fleet.colour"),
]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"service_tier": "flex"}, 'only "auto" or "default" is supported'),
        ({"length_penalty": 2}, "only 1 is supported"),
        ({"lora_path": "x"}, "is not supported"),
    ],
)
def test_unsupported_value_is_refused_with_the_allowed_ones(fields, said):
    with pytest.raises(RequestRejected, match=said):
        chat(**fields)


@pytest.mark.parametrize("read", [completion, chat])
@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_rejection_names_the_field_as_the_client_wrote_it(read, fields, field):
    with pytest.raises(RequestRejected) as refused:
        read(**fields)

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)
    assert refused.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("read", "fields", "field"),
    [
        (completion, {"prompt": None}, "prompt"),
        (completion, {"prompt": 5}, "prompt"),
        (completion, {"prompt": ["a", 1]}, "prompt[1]"),
        (completion, {"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        (completion, {"prompt": ["a"] * 1025}, "prompt"),
        (completion, {"prompt": ["a"] * 9, "n": 120}, "n"),
        (chat, {"echo": True}, "echo"),
        (chat, {"add_special_tokens": True}, "add_special_tokens"),
        (completion, {"prompt": [1, -2]}, "prompt[1]"),
        (completion, {"prompt": [1, 2**32]}, "prompt[1]"),
        (completion, {"prompt": [1, "a"]}, "prompt[1]"),
        (completion, {"prompt": [1, True]}, "prompt[1]"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"request_id": "a\r\nset-cookie: b"}, "request_id"),
        (chat, {"request_id": "ä"}, "request_id"),
        (completion, {"tools": [{}]}, "tools"),
        (chat, {"tools": [1]}, "tools[0]"),
        (chat, {"parallel_tool_calls": 1}, "parallel_tool_calls"),
        (completion, {"tool_choice": "auto"}, "tool_choice"),
        (completion, {"reasoning_effort": "low"}, "reasoning_effort"),
        (chat, {"messages": "hi"}, "messages"),
        (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (chat, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (chat, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (chat, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
        (chat, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages[0].content[0]",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_invalid_prompt_is_rejected_with_its_path(read, fields, field):
    with pytest.raises(RequestRejected) as refused:
        read(**fields)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": ', "not valid JSON"),
        (b'{"prompt": "x"} trailing', "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b"[]", "expected `object`"),
        (b"[" * 100_000, "expected `object`"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
        (b"null", "expected `object`"),
        (b"{}", "prompt: object missing required field"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature: number out of range"),
    ],
)
def test_unreadable_body_is_rejected_with_its_cause(body, said):
    with pytest.raises(RequestRejected, match=said) as refused:
        read_completion(body, ID, NOW)

    assert refused.value.reason is Reason.INVALID_ARGUMENT


def test_later_rejection_uses_the_names_of_the_client():
    for path, name in (
        ("text", "prompt"),
        ("token_ids[3]", "prompt[3]"),
        ("chat.messages[1].role", "messages[1].role"),
        ("chat.tools[1].function.name", "tools[1].function.name"),
        ("sampling.temperature", "temperature"),
        ("sampling.stop_token_ids[2]", "stop_token_ids[2]"),
        ("priority", "fleet.priority"),
        ("stop[0]", "stop[0]"),
        ("model", "model"),
    ):
        refused = rename_field(invalid(path, "is wrong"), OPENAI_FIELD_NAMES)
        assert (refused.field, refused.message) == (name, f"{name}: is wrong")
