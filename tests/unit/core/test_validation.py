import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.core.errors import Reason, RequestRejected
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
    ToolCallForm,
    ToolChoice,
)
from fleet.core.roles import Placement
from fleet.core.validation import MAX_IMAGE_BYTES, MAX_IMAGES, validate, validate_images
from tests.support.builders import a_prompt, a_request, token_bytes
from tests.support.router.fake_router import a_model_card

ALLOWED = [
    ("max_tokens", 0),
    ("temperature", 0),
    ("temperature", 2.0),
    ("top_p", 1e-9),
    ("top_p", 1),
    ("top_k", 0),
    ("top_k", 2**31 - 1),
    ("min_p", 0),
    ("min_p", 1),
    ("seed", 0),
    ("seed", 2**64 - 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 2),
    ("min_tokens", 0),
    ("logprobs", 0),
    ("logprobs", 20),
    ("prompt_logprobs", 20),
    ("thinking_tokens", 0),
    ("logit_bias", ((0, -100.0), (499, 100.0))),
    ("allowed_token_ids", (0, 499)),
]
REFUSED = [
    ("max_tokens", -1),
    ("max_tokens", 10**30),
    ("temperature", -0.01),
    ("temperature", 2.01),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("seed", -1),
    ("seed", 2**64),
    ("presence_penalty", -2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -math.inf),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.1),
    ("repetition_penalty", math.nan),
    ("min_tokens", -1),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("thinking_tokens", -1),
    ("thinking_tokens", 2**31),
    ("logit_bias", ((500, 1.0),)),
    ("logit_bias", ((-1, 1.0),)),
    ("logit_bias", ((1, 100.1),)),
    ("logit_bias", ((1, math.nan),)),
    ("logit_bias", tuple((token, 1.0) for token in range(1025))),
]


@pytest.mark.parametrize(("name", "value"), ALLOWED)
def test_the_ends_of_every_range_are_allowed(name, value):
    validate(a_request(sampling=Sampling(**{name: value})), a_model_card(), 10, vocab_size=500)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_value_outside_its_range_is_rejected_with_its_field(name, value):
    with pytest.raises(RequestRejected) as refused:
        validate(a_request(sampling=Sampling(**{name: value})), a_model_card(), 10, vocab_size=500)

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, f"sampling.{name}")
    assert refused.value.message.startswith(f"sampling.{name}: ")
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"id": ""}, "request_id"),
        ({"id": "a b"}, "request_id"),
        ({"id": "a\n"}, "request_id"),
        ({"id": "x" * 129}, "request_id"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"session": "s" * 257}, "session"),
        ({"pin": "w" * 257}, "pin"),
        ({"labels": ("l",) * 17}, "labels"),
        ({"labels": ("fast", "l" * 257)}, "labels[1]"),
        ({"expected_tokens": -1}, "expected_tokens"),
        ({"expected_tokens": 2**31}, "expected_tokens"),
        ({"tenant": "t" * 257}, "tenant"),
        ({"stop": ("",)}, "stop[0]"),
        ({"stop": ("a", "b" * 257)}, "stop[1]"),
        ({"stop": ("a",) * 17}, "stop"),
        ({"prompt": TextPrompt("")}, "text"),
        ({"prompt": TokenPrompt(b"")}, "token_ids"),
        ({"prompt": ChatPrompt(())}, "chat.messages"),
        ({"prompt": ChatPrompt((ChatMessage(role="", content="x"),))}, "chat.messages[0].role"),
        ({"prompt": TokenPrompt(token_bytes([1, 500, 2]))}, "token_ids[1]"),
        ({"sampling": Sampling(stop_token_ids=(1, 500))}, "sampling.stop_token_ids[1]"),
        ({"sampling": Sampling(stop_token_ids=(-1,))}, "sampling.stop_token_ids[0]"),
        ({"sampling": Sampling(stop_token_ids=(1,) * 1025)}, "sampling.stop_token_ids"),
        ({"sampling": Sampling(min_tokens=17, max_tokens=16)}, "sampling.min_tokens"),
        ({"sampling": Sampling(allowed_token_ids=(1, 500))}, "sampling.allowed_token_ids[1]"),
        ({"bad_words": ("",)}, "bad_words[0]"),
        ({"bad_words": ("b" * 257,)}, "bad_words[0]"),
        ({"bad_words": ("a",) * 129}, "bad_words"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
        ({"sampling": Sampling(prompt_logprobs=1), "placement": Placement.DISAGGREGATED}, "placement"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(fields, field):
    with pytest.raises(RequestRejected) as refused:
        validate(a_request(**fields), a_model_card(), 10, vocab_size=500)

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)


FORMS = [
    (JsonSchema(""), "sampling.form", "0 characters"),
    (JsonSchema("{"), "sampling.form", "not valid JSON"),
    (JsonSchema("[]"), "sampling.form", "expected `object`"),
    (StructuralTag("{"), "sampling.form", "not valid JSON"),
    (StructuralTag("{" * 131_073), "sampling.form", "131073 characters"),
    (JsonSchema('{"a":' * 100_000), "sampling.form", "131072 are allowed"),
    (JsonSchema('{"a":' * 20_000), "sampling.form", "nested too deeply"),
    (Pattern("a" * 16_385), "sampling.form", "16384 are allowed"),
    (Grammar("a" * 131_073), "sampling.form", "131072 are allowed"),
    (Choice(()), "sampling.form", "0 choices"),
    (Choice(("a",) * 257), "sampling.form", "257 choices"),
    (Choice(("a", "")), "sampling.form", "0 characters"),
    (Choice(("a" * 1025,)), "sampling.form", "1024 are allowed"),
]


@pytest.mark.parametrize(("form", "field", "said"), FORMS)
def test_a_form_of_no_size_or_sense_is_refused_in_words(form, field, said):
    with pytest.raises(RequestRejected, match=said) as refused:
        validate(a_request(sampling=Sampling(form=form)), a_model_card(), 10)

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize(
    "form", [AnyObject(), JsonSchema("{}"), Pattern("a" * 16_384), Grammar("root ::= x"), Choice(("a" * 1024,) * 256)]
)
def test_forms_of_a_sound_size_are_left_to_the_engine(form):
    validate(a_request(sampling=Sampling(form=form)), a_model_card(), 10)


def test_form_of_tool_calls_is_for_routers_alone():
    with pytest.raises(RequestRejected, match=r"set parsing\.tool_choice") as refused:
        validate(a_request(sampling=Sampling(form=ToolCallForm())), a_model_card(), 10)

    assert refused.value.field == "sampling.form"


SPOKEN = ChatMessage(role="user", content="x")
A_TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": true}}'


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (ChatPrompt((SPOKEN,), tools="["), "chat.tools"),
        (ChatPrompt((SPOKEN,), tools="{}"), "chat.tools"),
        (ChatPrompt((SPOKEN,), tools='[{"type": "function"}]'), "chat.tools[0].function"),
        (ChatPrompt((SPOKEN,), tools='[{"type": "browser", "function": {"name": "f"}}]'), "chat.tools[0].type"),
        (ChatPrompt((SPOKEN,), tools=f'[{A_TOOL}, {{"type": "function", "function": {{"name": ""}}}}]'),
         "chat.tools[1].function.name"),
        (ChatPrompt((SPOKEN,), tools=f'[{A_TOOL}, {{"type": "function", "function": {{"name": "get weather"}}}}]'),
         "chat.tools[1].function.name"),
        (ChatPrompt((SPOKEN,), tools='[{"function": {"parameters": {"x": ' + "[" * 99_999), "chat.tools"),
        (ChatPrompt((SPOKEN, ChatMessage(role="assistant", content="", tool_calls="[{}]"))),
         "chat.messages[1].tool_calls[0].function"),
        (ChatPrompt((ChatMessage(role="assistant", content="", tool_calls='[{"function": {"name": "f"}}]'),)),
         "chat.messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_tools_and_calls_that_are_none_are_refused_by_their_path(prompt, field):
    with pytest.raises(RequestRejected) as refused:
        validate(a_request(prompt=prompt), a_model_card(), 10)

    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)


def test_wrong_type_of_a_tool_is_refused_with_the_allowed_one():
    tools = '[{"type": "custom", "function": {"name": "f"}}]'

    with pytest.raises(RequestRejected, match="'custom'; use function"):
        validate(a_request(prompt=ChatPrompt((SPOKEN,), tools=tools)), a_model_card(), 10)


def test_tools_and_calls_as_the_openai_api_has_them_are_allowed():
    call = '[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]'
    calling = ChatMessage(role="assistant", content="", tool_calls=call)
    answering = ChatMessage(role="tool", content="1", tool_call_id="c1")

    validate(a_request(prompt=ChatPrompt((SPOKEN, calling, answering), tools=f"[{A_TOOL}]")), a_model_card(), 10)


def test_the_limits_themselves_are_allowed():
    request = a_request(
        id="x" * 128,
        priority=-100,
        session="s" * 256,
        tenant="t" * 256,
        stop=("b" * 256,) * 16,
        prompt=TokenPrompt(token_bytes([0, 499])),
        sampling=Sampling(stop_token_ids=(0, 499) * 512, min_tokens=16, max_tokens=16),
    )

    validate(request, a_model_card(), 2, vocab_size=500)


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers():
    with pytest.raises(RequestRejected, match=r"101 tokens.* 100") as refused:
        validate(a_request(prompt=TokenPrompt(a_prompt(101))), a_model_card(max_model_len=100), 101)

    assert refused.value.field == "token_ids"


def test_a_prompt_that_leaves_no_room_is_refused():
    with pytest.raises(RequestRejected) as refused:
        validate(a_request(fill_context=True), a_model_card(max_model_len=100), 100)

    assert refused.value.field == "text"


def test_answer_longer_than_the_context_is_rejected():
    card = a_model_card(max_model_len=100)
    validate(a_request(sampling=Sampling(max_tokens=10)), card, 90)

    with pytest.raises(RequestRejected, match="at most 10") as refused:
        validate(a_request(sampling=Sampling(max_tokens=11)), card, 90)

    assert refused.value.field == "sampling.max_tokens"


@pytest.mark.parametrize("prompt_tokens", [101, 100, 99])
def test_clients_know_a_full_context_by_its_words(prompt_tokens):
    """Check the words by which LiteLLM, LangChain and Anthropic's clients recognise the error of a full context."""
    with pytest.raises(RequestRejected, match="this model's maximum context length is 100 tokens") as refused:
        validate(a_request(sampling=Sampling(max_tokens=2)), a_model_card(max_model_len=100), prompt_tokens)

    assert ("prompt is too long" in str(refused.value)) is (prompt_tokens >= 100)
    assert refused.value.cause == "context_length_exceeded"


def test_max_tokens_is_ignored_with_fill_context():
    validate(a_request(fill_context=True, sampling=Sampling(max_tokens=16)), a_model_card(max_model_len=100), 99)

    with pytest.raises(RequestRejected, match="this model's maximum context length is 100 tokens") as refused:
        validate(a_request(fill_context=True, sampling=Sampling(min_tokens=2)), a_model_card(max_model_len=100), 99)

    assert (refused.value.field, refused.value.cause) == ("sampling.min_tokens", "context_length_exceeded")


def test_min_tokens_must_fit_where_the_context_ends_the_answer():
    card = a_model_card(max_model_len=100)
    validate(a_request(ends_with_context=True, sampling=Sampling(max_tokens=16)), card, 99)

    with pytest.raises(RequestRejected, match="at most 1") as refused:
        validate(a_request(ends_with_context=True, sampling=Sampling(max_tokens=16, min_tokens=2)), card, 99)

    assert refused.value.field == "sampling.min_tokens"


def test_lengths_are_not_checked_before_the_prompt_is_tokenised():
    validate(a_request(sampling=Sampling(max_tokens=10_000)), a_model_card(max_model_len=100), None)


@given(field=st.sampled_from([("temperature", 0, 2), ("min_p", 0, 1), ("presence_penalty", -2, 2)]), value=st.floats())
def test_exactly_the_floats_in_the_range_are_allowed(field, value):
    name, low, high = field
    request = a_request(sampling=Sampling(**{name: value}))

    if low <= value <= high:
        validate(request, a_model_card(), 1)
    else:
        with pytest.raises(RequestRejected, match=name):
            validate(request, a_model_card(), 1)


SCHEMAS = [
    ('{"type": 3}', ".type"),
    ('{"properties": 3}', ".properties"),
    ('{"properties": {"x": {"required": true}}}', ".properties[...].required"),
    ('{"items": {"anyOf": [{}, 3]}}', ".items.anyOf[1]"),
    ('{"$defs": {"a": {"enum": {}}}}', ".$defs[...].enum"),
]


def a_tool(parameters: str) -> str:
    return f'[{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}]'


@pytest.mark.parametrize(("parameters", "path"), SCHEMAS)
def test_malformed_schema_of_a_tool_is_refused_with_its_path(parameters, path):
    with pytest.raises(RequestRejected) as refused:
        validate(a_request(prompt=ChatPrompt((SPOKEN,), tools=a_tool(parameters))), a_model_card(), 10)

    assert refused.value.field == "chat.tools[0].function.parameters" + path


@pytest.mark.parametrize(
    "parameters",
    [
        "{}",
        '{"type": ["string", "null"], "items": [true, {"type": "any"}], "additionalProperties": false, "title": 3}',
        '{"properties": {"x": {"$ref": "#/nowhere"}, "y": true}, "allOf": [{"oneOf": [{}]}]}',
    ],
)
def test_unusual_schema_of_a_tool_is_left_to_the_engine(parameters):
    validate(a_request(prompt=ChatPrompt((SPOKEN,), tools=a_tool(parameters))), a_model_card(), 10)


MANY = "[" + ",".join([A_TOOL] * 1025) + "]"


@pytest.mark.parametrize(
    ("prompt", "parsing", "field"),
    [
        (ChatPrompt((SPOKEN,), tools=MANY), AnswerParsing(), "chat.tools"),
        (ChatPrompt((SPOKEN,)), AnswerParsing(tool_choice=ToolChoice.REQUIRED), "parsing.tool_choice"),
        (ChatPrompt((SPOKEN,), tools=f"[{A_TOOL}]"), AnswerParsing(tool_choice=ToolChoice.NAMED, function="g"), "parsing.function"),
        (ChatPrompt((SPOKEN,), template_args="[]"), AnswerParsing(), "chat.template_args"),
        (ChatPrompt((SPOKEN,), template_args='{"x": "' + "y" * 16_384 + '"}'), AnswerParsing(), "chat.template_args"),
    ],
)  # fmt: skip
def test_impossible_demand_for_calls_is_refused_by_field(prompt, parsing, field):
    with pytest.raises(RequestRejected) as refused:
        validate(a_request(prompt=prompt, parsing=parsing), a_model_card(), 10)

    assert refused.value.field == field


@pytest.mark.parametrize("images", [(b"x",) * (MAX_IMAGES + 1), (bytes(MAX_IMAGE_BYTES), b"x")], ids=["count", "bytes"])
def test_too_many_or_too_large_images_are_refused(images):
    card = a_model_card(takes_images=True)
    validate_images(a_request(images=(bytes(MAX_IMAGE_BYTES),)), card)

    with pytest.raises(RequestRejected, match="are allowed") as refused:
        validate_images(a_request(images=images), card)

    assert refused.value.field == "chat.messages"
