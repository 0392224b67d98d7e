"""Tests of the Responses and the Messages API and of the token paths, with the official clients."""

import asyncio
import inspect
import json
import re
import shutil
from hashlib import sha256

import aiohttp
import anthropic
import openai
import pytest
from anthropic.resources.messages import AsyncMessages
from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
from openai.resources.completions import AsyncCompletions
from openai.resources.responses import AsyncResponses

from fleet.core.errors import Reason, RequestRejected
from fleet.core.requests import AnswerParsers, ToolChoice
from fleet.frontend.openai.bodies import ChatBody, CompletionBody
from fleet.frontend.openai.translated.messages import CountTokensBody, MessagesBody
from fleet.frontend.openai.translated.responses import ResponsesBody
from fleet.router.tenants import TenantSettings
from tests.support.builders import token_ids
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.text_model import EOS, write_json
from tests.support.router.fake_router import a_model_card

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TEXT = "the quick brown fox: Größe 漢字 🎉!"
THOUGHT = "why not?"
CALLS = [("add", {"x": 3, "y": "é"}), ("stop", {})]
PARSERS = AnswerParsers(tool_calls="hermes", reasoning="qwen3")
ANSWER = f"<think>{THOUGHT}</think>{TEXT}" + "".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in CALLS
)
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}(call {{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}){% endfor %}"
    "{% if message.tool_call_id %}(of {{ message.tool_call_id }}){% endif %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if enable_thinking is defined %}(thinking {{ enable_thinking }}){% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}}
RESPONSE_TOOLS = [{"type": "function", "name": name, "parameters": PARAMETERS, "strict": False} for name, _ in CALLS]
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}
MESSAGE_TOOLS = [{"name": name, "input_schema": PARAMETERS} for name, _ in CALLS]
MESSAGE_CALL = {"type": "tool_use", "id": "x", "name": "add", "input": {}}
CALL_WITHOUT_NAME = {"type": "tool_use", "id": "x", "input": {}}
RESPONSE_CALL = {"type": "function_call", "call_id": "x", "name": "add", "arguments": "{}"}
TENANTS = {"a": TenantSettings(api_key_sha256=(sha256(b"fk-1").hexdigest(),), requests_per_minute=1)}


@pytest.fixture(scope="module")
def tool_model(model_dir, tmp_path_factory):
    """Return a model folder whose template knows tools and reasoning."""
    folder = shutil.copytree(model_dir, tmp_path_factory.mktemp("tools") / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    return folder


@pytest.fixture
async def parsing(tool_model):
    async with asyncio.timeout(100), open_frontends(tool_model) as frontends:
        frontends.router.cards = (a_model_card(parsers=PARSERS, limits_reasoning=True),)
        yield frontends


def an_openai_client(frontends, key="none"):
    return openai.AsyncOpenAI(base_url=f"{frontends.url}/v1", api_key=key, max_retries=0, timeout=60)


def an_anthropic_client(frontends, key="none"):
    return anthropic.AsyncAnthropic(base_url=frontends.url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture
async def responses(frontends):
    async with an_openai_client(frontends) as client:
        yield client.responses


@pytest.fixture
async def messages(frontends):
    async with an_anthropic_client(frontends) as client:
        yield client.messages


def prompt_of(frontends) -> str:
    """Return the prompt of the last request."""
    return frontends.codec.decode(frontends.router.submitted[-1].tokens)


USER = [{"role": "user", "content": "hi"}]


# The Responses API


async def test_response_has_text_usage_and_what_was_asked(frontends, responses):
    answer = frontends.will_answer(TEXT, then=[EOS])

    response = await responses.create(
        model="tiny",
        instructions="be brief",
        input="Größe?",
        temperature=0.5,
        metadata={"a": "b"},
        max_output_tokens=99,
    )

    arrived = frontends.router.submitted[0]
    assert response.output_text == TEXT
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert (response.instructions, response.temperature, response.metadata) == ("be brief", 0.5, {"a": "b"})
    assert response.usage.input_tokens == len(arrived.tokens) // 4
    assert response.usage.output_tokens == len(answer)
    assert response.id == f"resp_{arrived.request_id}"
    assert (arrived.sampling.temperature, arrived.sampling.max_tokens) == (0.5, 99)
    assert prompt_of(frontends).replace("<|end|>", "") == "<s>system: be briefuser: Größe?assistant: "


async def test_streamed_response_equals_the_whole_one(frontends, responses):
    frontends.will_answer(TEXT, then=[EOS])
    whole = await responses.create(model="tiny", input="hi")
    async with responses.stream(model="tiny", input="hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()

    assert final.output_text == TEXT == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert len(events) > 15
    assert final.usage == whole.usage


async def test_response_repeats_ignored_fields_and_has_its_end(frontends, responses):
    frontends.will_answer(TEXT, then=[EOS])
    asked = {"model": "tiny", "input": "hi", "safety_identifier": "s", "prompt_cache_key": "k"}

    whole = await responses.create(**asked)
    cut = await responses.create(**asked, max_output_tokens=3)

    assert (whole.safety_identifier, whole.prompt_cache_key) == ("s", "k")
    assert whole.completed_at >= whole.created_at
    assert (cut.status, cut.completed_at) == ("incomplete", None)


async def test_cut_response_is_incomplete(frontends, responses):
    frontends.will_answer(TEXT)

    whole = await responses.create(model="tiny", input="hi", max_output_tokens=3)
    events = [
        event async for event in await responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
    ]

    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].status == "incomplete"
    assert (events[-2].type, events[-2].item.status) == ("response.output_item.done", "incomplete")


async def test_response_with_calls_streams_like_the_whole(parsing):
    parsing.will_answer(ANSWER, then=[EOS])
    async with an_openai_client(parsing) as client:
        asked = {"model": "tiny", "input": "hi", "tools": RESPONSE_TOOLS}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()

    for response in (whole, final):
        reasoning, message, *calls = response.output
        assert reasoning.content[0].text == THOUGHT
        assert message.content[0].text == TEXT
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        assert len({call.call_id for call in calls}) == 2
        assert response.status == "completed"
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens / 2
    arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(each) for each in arguments] == [arguments for _, arguments in CALLS]
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thoughts == THOUGHT
    assert "[add][stop]" in prompt_of(parsing)


async def test_items_of_a_turn_go_back_as_one_message(parsing):
    parsing.will_answer(TEXT, then=[EOS])
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "add"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "stop", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "thanks"},
    ]
    async with an_openai_client(parsing) as client:
        await client.responses.create(model="tiny", input=items, tools=RESPONSE_TOOLS)

    assert prompt_of(parsing).replace("<|end|>", "|") == (
        '<s>[add][stop]system: be brief|user: add|assistant: ok(call c1 add {"x": 1})(call c2 stop {})|'
        "tool: 2(of c1)|tool: done(of c2)|assistant: 3|user: thanks|assistant: "
    )


async def test_output_of_a_response_is_taken_as_input(parsing):
    parsing.will_answer(ANSWER, then=[EOS])
    async with an_openai_client(parsing) as client:
        first = await client.responses.create(model="tiny", input="hi", tools=RESPONSE_TOOLS)
        history = [{"role": "user", "content": "hi"}, *first.output]
        history += [
            {"type": "function_call_output", "call_id": each.call_id, "output": "7"}
            for each in first.output
            if each.type == "function_call"
        ]
        await client.responses.create(model="tiny", input=history, tools=RESPONSE_TOOLS)

    assert prompt_of(parsing).count("tool: 7") == 2


@pytest.mark.parametrize(
    ("choice", "demanded", "function"),
    [("auto", ToolChoice.AUTO, ""), ("required", ToolChoice.REQUIRED, ""), ({"name": "add"}, ToolChoice.NAMED, "add")],
)
async def test_tool_choice_of_a_response_reaches_the_engine(parsing, choice, demanded, function):
    parsing.will_answer(ANSWER, then=[EOS])
    named = {"type": "function", **choice} if isinstance(choice, dict) else choice
    async with an_openai_client(parsing) as client:
        await client.responses.create(
            model="tiny", input="hi", tools=RESPONSE_TOOLS, tool_choice=named, parallel_tool_calls=False
        )

    task = parsing.router.submitted[0].parsing
    assert (task.tool_choice, task.function, task.parallel_calls) == (demanded, function, False)


async def test_response_calls_only_allowed_tools(parsing):
    parsing.will_answer(ANSWER, then=[EOS])
    async with an_openai_client(parsing) as client:
        response = await client.responses.create(model="tiny", input="hi", tools=RESPONSE_TOOLS, tool_choice=ALLOWED)

    assert parsing.router.submitted[0].parsing.tool_choice is ToolChoice.REQUIRED
    assert prompt_of(parsing).startswith("<s>[stop]")
    assert response.tool_choice.to_dict() == ALLOWED
    assert [tool.name for tool in response.tools] == ["add", "stop"]


async def test_structured_response_and_effort_reach_the_engine(parsing):
    parsing.will_answer("{}", then=[EOS])
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    async with an_openai_client(parsing) as client:
        response = await client.responses.create(
            model="tiny", input="hi", text={"format": form}, reasoning={"effort": "none"}
        )

    assert json.loads(parsing.router.submitted[0].sampling.form.schema) == schema
    assert response.text.format.type == "json_schema"
    assert "(thinking False)" in prompt_of(parsing)


@pytest.mark.parametrize("choice", ["loud", {"type": "loud"}])
async def test_unknown_tool_choice_of_a_response_lists_the_known(responses, choice):
    with pytest.raises(openai.BadRequestError, match=r'"required", {"type": "function", "name": NAME} or'):
        await responses.create(model="tiny", input="hi", tools=RESPONSE_TOOLS, tool_choice=choice)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": RESPONSE_TOOLS, "tool_choice": {**ALLOWED, "mode": "x"}}, "tool_choice.mode"),
        ({"tools": RESPONSE_TOOLS[:1], "tool_choice": ALLOWED}, "tool_choice.tools[0]"),
        ({"tools": RESPONSE_TOOLS, "tool_choice": {**ALLOWED, "tools": [{"type": "mcp"}]}}, "tool_choice.tools[0]"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "input[0].name"),
        ({"instructions": "x", "input": [RESPONSE_CALL]}, "input"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"reasoning": {"effort": "mad"}}, "reasoning.effort"),
        ({"fleet": {"priority": 1000}}, "fleet.priority"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"instructions": "x", "input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"moderation": {"model": "m"}}, "moderation"),
    ],
)
async def test_response_field_that_cannot_be_obeyed_is_named(frontends, responses, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        await responses.create(model="tiny", input="hi", extra_body=fields)

    assert refused.value.param == param
    assert refused.value.message.count(param) >= 1
    assert frontends.router.submitted == []


async def test_client_chooses_the_id_of_its_request_by_header(frontends, responses):
    frontends.will_answer(TEXT, then=[EOS])
    headers = {"x-request-id": "mine"}

    response = await responses.create(model="tiny", input="hi", extra_headers=headers)
    async with an_anthropic_client(frontends) as client:
        message = await client.messages.create(
            model="tiny", max_tokens=99, messages=[{"role": "user", "content": "hi"}], extra_headers=headers
        )
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(model="tiny", max_tokens=-1, messages=USER, extra_headers=headers)

    assert (message._request_id, refused.value.request_id) == ("mine", "mine")
    assert [arrived.request_id for arrived in frontends.router.submitted] == ["mine", "mine"]
    assert (response.id, message.id) == ("resp_mine", "msg_mine")


async def test_anthropic_client_lists_models_in_its_form(frontends):
    names = ["tiny", "org/ada", "bob"]
    frontends.router.cards += tuple(a_model_card(name=name, parent="tiny", revision="r") for name in names[1:])
    async with an_anthropic_client(frontends) as client, an_openai_client(frontends) as other:
        page = await client.models.list()
        raw = await client.models.with_raw_response.list()
        one = await client.models.retrieve("org/ada")
        created = [each.created async for each in await other.models.list()]

    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "bob")
    assert [each.id for each in page.data] == [each.display_name for each in page.data] == names
    assert [each.created_at.timestamp() for each in page.data] == created
    assert one == page.data[1]
    assert (one.type, one.lifecycle, one.max_input_tokens) == (
        "model",
        "active",
        frontends.router.cards[0].max_model_len,
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", raw.http_response.json()["data"][0]["created_at"])
    assert raw.headers["request-id"] == raw.headers["x-request-id"]


@pytest.mark.parametrize("limit", [1, 2, 3, 20])
async def test_anthropic_client_turns_the_pages_of_models(frontends, limit):
    names = ["tiny", "ada", "bob", "eve", "kim"]
    frontends.router.cards += tuple(a_model_card(name=name, parent="tiny", revision="r") for name in names[1:])
    async with an_anthropic_client(frontends) as client:
        forth = [each.id async for each in client.models.list(limit=limit)]
        back = await client.models.list(limit=limit, before_id="eve")
        after = await client.models.list(after_id="bob")

    assert forth == names
    assert [each.id for each in back.data] == names[:3][-limit:]
    assert back.has_more == (limit < 3)
    assert ([each.id for each in after.data], after.has_more) == (["eve", "kim"], False)


async def test_errors_about_models_have_anthropics_form(tool_model):
    async with open_frontends(tool_model, TENANTS) as frontends, an_anthropic_client(frontends, "fk-2") as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await stranger.models.list()
        async with an_anthropic_client(frontends, "fk-1") as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.models.retrieve("other")
            for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "other"}, {"extra_query": {"limit": "a"}}):
                with pytest.raises(anthropic.BadRequestError, match=r"limit|after_id"):
                    await client.models.list(**wrong)

    kinds = [caught.value.body["error"]["type"] for caught in (unknown, missing)]
    assert kinds == ["authentication_error", "not_found_error"]
    assert missing.value.request_id


async def test_unknown_path_below_messages_has_anthropics_error(frontends):
    async with an_anthropic_client(frontends) as client:
        with pytest.raises(anthropic.NotFoundError) as refused:
            await client.messages.batches.list()

    error = {"type": "not_found_error", "message": "there is nothing at /v1/messages/batches"}
    assert refused.value.body == {"type": "error", "error": error}


async def test_fields_without_effect_are_accepted(frontends, responses):
    frontends.will_answer(TEXT, then=[EOS])
    response = await responses.create(
        model="tiny", input="hi", store=False, truncation="disabled", background=False, user="u", top_p=0.5,
        include=["reasoning.encrypted_content"], service_tier="auto", prompt_cache_key="k", tools=[],
        text={"verbosity": "medium"},
    )  # fmt: skip

    assert response.output_text == TEXT
    assert response.store is False


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
async def test_unknown_fields_are_refused_where_the_settings_say_so(model_dir, path):
    body = {"model": "tiny"} | ({"input": "hi"} if path == "/v1/responses" else {"messages": USER, "max_tokens": 9})
    if path == "/v1/messages/count_tokens":
        del body["max_tokens"]
    known = {"tools": [], "metadata": {"user_id": "u"}} if "max_tokens" in body else {"tools": []}
    async with open_frontends(model_dir, unknown_fields="refuse") as strict, open_frontends(model_dir) as lenient:
        strict.will_answer(TEXT, then=[EOS])
        lenient.will_answer(TEXT, then=[EOS])
        async with aiohttp.ClientSession() as session:

            async def ask(frontends, fields):
                async with session.post(frontends.url + path, json=body | fields) as answer:
                    return answer.status, await answer.json()

            status, refused = await ask(strict, {"somthing": 1})
            served = [await ask(strict, known), await ask(lenient, {"somthing": 1})]

    assert status == 400
    assert "somthing: object contains unknown field" in refused["error"]["message"]
    assert refused["error"].get("param", "somthing") == "somthing"
    assert [status for status, _ in served] == [200, 200]


@pytest.mark.parametrize(
    ("method", "body"),
    [
        (AsyncResponses.create, ResponsesBody),
        (AsyncMessages.create, MessagesBody),
        (AsyncMessages.count_tokens, CountTokensBody),
        (AsyncChatCompletions.create, ChatBody),
        (AsyncCompletions.create, CompletionBody),
    ],
)
def test_parameters_of_the_official_clients_are_known_fields(method, body):
    not_in_bodies = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "user_profile_id", "workspace_id"}
    not_in_bodies |= {"output_format"}  # the client makes `output_config` of it

    assert inspect.signature(method).parameters.keys() - not_in_bodies <= {*body.__struct_fields__}


async def test_failed_response_stream_ends_with_an_error_event(frontends, responses):
    frontends.will_answer(TEXT)
    frontends.router.break_after = 5
    events = [event async for event in await responses.create(model="tiny", input="hi", stream=True)]

    assert events[-2].type == "response.output_text.delta"
    assert (events[-1].type, events[-1].code) == ("error", "worker_lost")
    assert [event.sequence_number for event in events] == list(range(len(events)))


# The Messages API


async def test_message_has_text_usage_and_a_reason(frontends, messages):
    answer = frontends.will_answer(TEXT, then=[EOS])
    frontends.router.cached_blocks = 1

    message = await messages.create(
        model="tiny", max_tokens=99, system="be brief", messages=[{"role": "user", "content": "Größe?"}],
        extra_body={"temperature": 0.5, "top_k": 7},
    )  # fmt: skip

    arrived = frontends.router.submitted[0]
    assert [block.text for block in message.content] == [TEXT]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    used = message.usage
    assert used.cache_read_input_tokens > 0
    assert used.input_tokens + used.cache_read_input_tokens == len(arrived.tokens) // 4
    assert used.output_tokens == len(answer)
    assert (arrived.sampling.max_tokens, arrived.sampling.temperature, arrived.sampling.top_k) == (99, 0.5, 7)
    assert prompt_of(frontends).replace("<|end|>", "") == "<s>system: be briefuser: Größe?assistant: "


async def test_streamed_message_equals_the_whole_one(frontends, messages):
    frontends.will_answer(TEXT, then=[EOS])
    asked = {"model": "tiny", "max_tokens": 99, "messages": USER}
    whole = await messages.create(**asked)
    async with messages.stream(**asked) as stream:
        found = [event async for event in stream]
        final = await stream.get_final_message()

    begin = found[0].message.usage
    assert (begin.cache_read_input_tokens, begin.cache_creation_input_tokens, begin.output_tokens) == (0, 0, 0)
    events = [event.type for event in found]
    assert [block.text for block in final.content] == [block.text for block in whole.content] == [TEXT]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    raw = [each for each in events if each.startswith(("message", "content"))]
    assert (raw[0], raw[1], raw[-1]) == ("message_start", "content_block_start", "message_stop")
    assert raw.count("content_block_delta") > 10


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons_tell_why_a_message_ended(frontends, messages, stream):
    frontends.will_answer(TEXT)

    async def reason(**fields):
        asked = {"model": "tiny", "max_tokens": 99, "messages": USER, **fields}
        if not stream:
            return await messages.create(**asked)
        async with messages.stream(**asked) as events:
            return await events.get_final_message()

    cut = await reason(max_tokens=3)
    stopped = await reason(stop_sequences=["never", "brown"])

    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "brown")
    assert stopped.content[0].text == "the quick "


@pytest.mark.parametrize("stream", [False, True])
async def test_long_max_tokens_end_a_message_with_the_context(frontends, messages, stream):
    prompt = len(token_ids(await prompt_tokens(frontends, messages)))
    frontends.router.cards = (a_model_card(max_model_len=prompt + 5),)
    asked = {"model": "tiny", "max_tokens": 32_000, "messages": USER}
    if stream:
        async with messages.stream(**asked) as events:
            message = await events.get_final_message()
    else:
        message = await messages.create(**asked)

    assert (message.stop_reason, message.stop_sequence) == ("model_context_window_exceeded", None)
    assert message.usage.output_tokens == 5


async def test_message_without_room_for_an_answer_is_refused(frontends, messages):
    prompt = len(token_ids(await prompt_tokens(frontends, messages)))
    frontends.router.cards = (a_model_card(max_model_len=prompt),)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await messages.create(model="tiny", max_tokens=32_000, messages=USER)


async def prompt_tokens(frontends, messages) -> bytes:
    """Return the tokens of the prompt of `USER`."""
    frontends.will_answer(TEXT)
    await messages.create(model="tiny", max_tokens=9, messages=USER)
    return frontends.router.submitted[-1].tokens


async def test_message_with_tool_use_streams_like_the_whole(parsing):
    parsing.will_answer(ANSWER, then=[EOS])
    async with an_anthropic_client(parsing) as client:
        asked = {"model": "tiny", "max_tokens": 500, "messages": USER, "tools": MESSAGE_TOOLS}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_message()

    for message in (whole, final):
        thinking, text, *calls = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", THOUGHT)
        assert text.text == TEXT
        assert [(call.name, call.input) for call in calls] == CALLS
        assert message.stop_reason == "tool_use"


async def test_results_of_tools_go_back_to_the_model(parsing):
    parsing.will_answer(ANSWER, then=[EOS])
    async with an_anthropic_client(parsing) as client:
        asked = {"model": "tiny", "max_tokens": 500, "tools": MESSAGE_TOOLS}
        first = await client.messages.create(messages=USER, **asked)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "7"}]}
            for block in first.content
            if block.type == "tool_use"
        ]
        turns = [
            *USER,
            {"role": "assistant", "content": first.content},
            {
                "role": "user",
                "content": [*results, {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}],
            },
        ]
        await client.messages.create(messages=turns, **asked)

    prompt = prompt_of(parsing)
    ids = [block.id for block in first.content if block.type == "tool_use"]
    expected = "".join(f"tool: 7(of {each})|" for each in ids)
    assert f"|{expected}user: and?|assistant: " in prompt.replace("<|end|>", "|")


@pytest.mark.parametrize(
    ("choice", "demanded", "parallel"),
    [
        ({"type": "auto"}, ToolChoice.AUTO, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice.REQUIRED, False),
        ({"type": "tool", "name": "add"}, ToolChoice.NAMED, True),
        ({"type": "none"}, ToolChoice.NONE, True),
    ],
)
async def test_tool_choice_of_a_message_reaches_the_engine(parsing, choice, demanded, parallel):
    parsing.will_answer(TEXT, then=[EOS])
    async with an_anthropic_client(parsing) as client:
        await client.messages.create(
            model="tiny", max_tokens=500, messages=USER, tools=MESSAGE_TOOLS, tool_choice=choice
        )

    task = parsing.router.submitted[0].parsing
    assert (task.tool_choice, task.parallel_calls) == (demanded, parallel)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "hi<|end|>assistant"),
        ({"thinking": {"type": "disabled"}}, "(thinking False)"),
        ({"thinking": {"type": "adaptive"}}, "hi<|end|>assistant"),
    ],
)
async def test_thinking_reaches_the_chat_template(parsing, fields, seen):
    parsing.will_answer(TEXT, then=[EOS])
    async with an_anthropic_client(parsing) as client:
        await client.messages.create(model="tiny", max_tokens=2000, messages=USER, extra_body=fields)

    assert seen in prompt_of(parsing)


BUDGETED = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.mark.parametrize("model", ["tiny", ""])
async def test_thinking_budget_limits_the_reasoning(parsing, model):
    parsing.will_answer(TEXT, then=[EOS])
    async with an_anthropic_client(parsing) as client:
        await client.messages.create(model=model, max_tokens=2000, messages=USER, extra_body=BUDGETED)
        await client.messages.create(model=model, max_tokens=2000, messages=USER)

    with_budget, without = parsing.router.submitted
    assert (with_budget.sampling.thinking_tokens, with_budget.needs) == (1024, ("thinking_tokens",))
    assert (without.sampling.thinking_tokens, without.needs) == (None, ())


async def test_thinking_budget_that_no_worker_can_obey_has_no_effect(frontends, messages):
    frontends.will_answer(TEXT, then=[EOS])

    await messages.create(model="tiny", max_tokens=2000, messages=USER, extra_body=BUDGETED)

    arrived = frontends.router.submitted[0]
    assert (arrived.sampling.thinking_tokens, arrived.needs) == (None, ())


@pytest.mark.parametrize("budget", [16, 2**40])
async def test_thinking_budget_that_no_answer_reaches_is_no_limit(parsing, budget):
    parsing.will_answer(TEXT, then=[EOS])
    async with an_anthropic_client(parsing) as client:
        thinking = {"type": "enabled", "budget_tokens": budget}
        await client.messages.create(model="tiny", max_tokens=16, messages=USER, extra_body={"thinking": thinking})

    assert parsing.router.submitted[0].needs == ()


async def test_refused_thinking_budget_is_named_as_in_messages(parsing):
    field = "sampling.thinking_tokens"
    parsing.router.refuse = RequestRejected(Reason.INVALID_ARGUMENT, f"{field}: no worker obeys it", field=field)
    async with an_anthropic_client(parsing) as client:
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens: no worker obeys it"):
            await client.messages.create(model="tiny", max_tokens=2000, messages=USER, extra_body=BUDGETED)


async def test_call_that_the_limit_cuts_off_is_no_broken_message(parsing):
    cut = '<tool_call>\n{"name": "add", "arguments": {"x": 3, "y'
    tokens = parsing.will_answer(cut)
    async with an_anthropic_client(parsing) as client:
        message = await client.messages.create(model="tiny", max_tokens=len(tokens), messages=USER, tools=MESSAGE_TOOLS)

    assert message.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "x"}}]}]},
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [*USER, {"role": "assistant", "content": [CALL_WITHOUT_NAME]}]}, "messages[1].content[0].name"),
        ({"system": "x", "messages": [*USER, {"role": "assistant", "content": [MESSAGE_CALL]}]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": MESSAGE_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            {"system": "x", "messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"speed": "fast"}, "speed"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "loud"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"temperature": 3}, "temperature"),
    ],
)
async def test_message_field_that_cannot_be_obeyed_is_named(frontends, messages, fields, named):
    with pytest.raises(anthropic.BadRequestError) as refused:
        await messages.create(model="tiny", max_tokens=9, messages=USER, extra_body=fields)

    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{named}: ")
    assert frontends.router.submitted == []


async def test_message_errors_have_the_types_of_the_api(tool_model):
    async with asyncio.timeout(100), open_frontends(tool_model, TENANTS) as frontends:
        frontends.will_answer(TEXT, then=[EOS])
        asked = {"model": "tiny", "max_tokens": 9, "messages": USER}
        async with an_anthropic_client(frontends, "fk-2") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**asked)
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.count_tokens(model="tiny", messages=USER)
        async with an_anthropic_client(frontends, "fk-1") as client:
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**{**asked, "model": "other"})
            await client.messages.create(**asked)
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**asked)
        async with (
            aiohttp.ClientSession(frontends.url) as session,
            session.post("/v1/messages", json=asked, headers={"x-api-key": "fk-1"}) as limited,
        ):
            assert limited.status == 429, "the key counts in this header too"

    assert missing.value.body["error"]["type"] == "not_found_error"


async def test_failed_message_stream_ends_with_an_error_event(frontends, messages):
    frontends.will_answer(TEXT)
    frontends.router.break_after = 5
    with pytest.raises(anthropic.APIStatusError) as failed:
        async for _ in await messages.create(model="tiny", max_tokens=99, messages=USER, stream=True):
            pass

    assert failed.value.body["error"]["type"] == "overloaded_error"


async def test_refusal_of_the_router_keeps_its_status(frontends, messages, responses):
    frontends.router.refuse = RequestRejected(Reason.QUEUE_FULL, "the queue is full", retry_after_ms=1500)
    with pytest.raises(anthropic.RateLimitError) as by_message:
        await messages.create(model="tiny", max_tokens=9, messages=USER, stream=True)
    with pytest.raises(openai.RateLimitError) as by_response:
        await responses.create(model="tiny", input="hi", stream=True)

    for refused in (by_message, by_response):
        assert refused.value.response.headers["retry-after"] == "2"


async def test_departed_client_cancels_its_request(frontends):
    frontends.will_answer(TEXT)
    frontends.router.hold_after = 3
    async with an_anthropic_client(frontends) as client:
        stream = await client.messages.create(model="tiny", max_tokens=99, messages=USER, stream=True)
        await anext(aiter(stream))
        await stream.close()
        await frontends.router.until(frontends.router.cancelled)


# Counting and converting tokens


async def test_counted_tokens_are_those_of_the_request(frontends, messages):
    frontends.will_answer(TEXT, then=[EOS])
    asked = {"model": "tiny", "messages": USER, "system": [{"type": "text", "text": "be brief"}]}
    counted = await messages.count_tokens(**asked)
    await messages.create(max_tokens=9, **asked)

    assert counted.input_tokens == len(frontends.router.submitted[0].tokens) // 4
    assert len(frontends.router.submitted) == 1


async def test_tokenize_and_detokenize_are_inverse(frontends):
    async with aiohttp.ClientSession(frontends.url) as session:

        async def ask(path, body):
            async with session.post(path, json=body) as answer:
                return answer.status, await answer.json()

        status, tokenized = await ask("/tokenize", {"prompt": TEXT, "return_token_strs": True})
        expected = token_ids(frontends.codec.encode(TEXT))
        assert (status, tokenized["tokens"], tokenized["count"]) == (200, expected, len(expected))
        assert tokenized["max_model_len"] == 4096
        assert len(tokenized["token_strs"]) == len(expected)
        status, text = await ask("/detokenize", {"model": "tiny", "tokens": tokenized["tokens"]})
        assert (status, text) == (200, {"prompt": f"<s>{TEXT}"})

        status, plain = await ask("/tokenize", {"prompt": TEXT, "add_special_tokens": False})
        assert (status, plain["tokens"]) == (200, expected[1:])

        status, chat = await ask("/tokenize", {"messages": USER})
        assert (status, frontends.codec.decode(bytes_of(chat["tokens"]))) == (200, "<s>user: hi<|end|>assistant: ")
        assert chat["token_strs"] is None
        assert frontends.router.submitted == []


def bytes_of(ids: list[int]) -> bytes:
    return b"".join(each.to_bytes(4, "little") for each in ids)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "messages"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {}, 400, "tokens"),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "x", "content": ""}]}, 400, None),
    ],
)
async def test_wrong_token_request_names_the_field(frontends, path, body, status, param):
    async with aiohttp.ClientSession(frontends.url) as session, session.post(path, json=body) as answer:
        said = await answer.json()

    assert answer.status == status
    if param is not None:
        assert said["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"]
)
async def test_translated_paths_take_json_by_post_only(frontends, path):
    async with aiohttp.ClientSession(frontends.url) as session:
        async with session.post(path, data=b"x", headers={"content-type": "text/plain"}) as wrong_type:
            assert wrong_type.status == 415
        async with session.post(path, data=b"{", headers={"content-type": "application/json"}) as broken:
            assert broken.status == 400
        async with session.get(path) as wrong_method:
            assert (wrong_method.status, wrong_method.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("api", ["responses", "messages"])
async def test_hints_in_headers_hold_for_translated_apis(frontends, responses, messages, api):
    frontends.will_answer(TEXT, then=[EOS])
    hints = {"extra_headers": {"x-fleet-session": "s1", "x-fleet-priority": "3", "x-request-id": "mine"}}
    if api == "responses":
        await responses.create(model="tiny", input="hi", **hints)
    else:
        await messages.create(model="tiny", max_tokens=9, messages=USER, **hints)

    arrived = frontends.router.submitted[0]
    assert (arrived.session, arrived.priority, arrived.request_id) == ("s1", 3, "mine")
