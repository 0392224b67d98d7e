"""Tests of streams with event ids over HTTP, in front of a router whose answers the test writes."""

import itertools
import json
import re
import shutil

import httpx
import pytest

from fleet.core.requests import AnswerParsers
from tests.support.frontend.frontends import open_frontends
from tests.support.frontend.http_clients import error_of, sse_events
from tests.support.frontend.text_model import EOS, write_json
from tests.support.router.fake_router import a_model_card

pytestmark = pytest.mark.integration

TEXT = "Zwölf 漢字 🎉 of STOP, STOPPED"
RESUMABLE = {"x-fleet-resumable": "1"}
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
COMPLETION = ("/v1/completions", {"prompt": "x"})
RESPONSE = (
    "/v1/responses",
    {"model": "tiny", "input": "x", "max_output_tokens": 100, "temperature": 0, "stream": True},
)
MESSAGE = (
    "/v1/messages",
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 100,
        "temperature": 0,
        "stream": True,
    },
)
TRANSLATED = pytest.mark.parametrize(("path", "body"), [RESPONSE, MESSAGE], ids=["responses", "messages"])


def body_of(body, **fields):
    return {**body, "max_tokens": 100, "temperature": 0, "stream": True, **fields}


async def stream(url, path, body, headers=RESUMABLE):
    """Return the status of an answer, its events as pairs of id and data, and its content."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        answer = await client.post(path, json=body, headers=headers)
    return answer.status_code, sse_events(answer.text), answer.content


def comparable(path, events):
    """Return the data of events, with one number for all instants at which answers of /v1/responses were complete."""
    texts = [data for _, data in events]
    return [re.sub(r'"completed_at":\d+', '"completed_at":0', each) for each in texts] if path == RESPONSE[0] else texts


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
@pytest.mark.parametrize("fields", [{}, {"stop": ["STOPPED"], "stream_options": {"include_usage": True}}])
async def test_stream_cut_after_any_event_goes_on_with_same_bytes(frontends, path, body, fields):
    frontends.will_answer(TEXT, then=(EOS,))
    body = body_of(body, **fields)
    _, whole, _ = await stream(frontends.url, path, body)
    assert all(number for number, _ in whole)
    assert whole[-1][1] == "[DONE]"

    for cut, (number, _) in enumerate(whole, 1):
        status, rest, _ = await stream(frontends.url, path, body, {"last-event-id": number})
        assert status == (200 if whole[cut:] else 204), rest
        assert [data for _, data in rest] == [data for _, data in whole[cut:]], cut


def with_tools(model_dir, tmp_path):
    """Return the folder of a copy of the model, whose chat template takes tools."""
    folder = shutil.copytree(model_dir, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    write_json(folder / "tokenizer_config.json", settings | {"chat_template": template})
    return folder


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("Sun <tool_call", {}),  # the parser holds the text back, because a call may begin there
        ('<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>', {}),
        ("Sun <tool_STOP", {"stop": ["STOP"]}),
    ],
    ids=["begun call", "call", "stop string"],
)
async def test_parsed_stream_cut_after_any_event_goes_on_exactly(model_dir, tmp_path, text, fields):
    folder = with_tools(model_dir, tmp_path)
    path, body = CHAT
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    body = body_of(body, tools=tools, stream_options={"include_usage": True}, **fields)
    async with open_frontends(folder) as frontends:
        frontends.router.cards = (a_model_card(parsers=AnswerParsers(tool_calls="hermes")),)
        frontends.will_answer(text, then=(EOS,))
        status, whole, content = await stream(frontends.url, path, body)
        assert status == 200, content
        assert b"<tool_" in content or b'"tool_calls":[' in content

        for cut, (number, _) in enumerate(whole, 1):
            status, rest, _ = await stream(frontends.url, path, body, {"last-event-id": number})
            assert status == (200 if whole[cut:] else 204), rest
            assert choices(rest) == choices(whole[cut:]), cut
            for again, (after, _) in enumerate(rest, cut + 1):  # the resumed stream is cut too
                _, end, _ = await stream(frontends.url, path, body, {"last-event-id": after})
                assert choices(end) == choices(whole[again:]), (cut, again)


@pytest.mark.parametrize(
    ("text", "end", "fields"), [("", (EOS,), {}), ("", (), {}), ("STOP", (EOS,), {"stop": ["STOP"]})]
)
async def test_stream_without_text_cut_after_any_event_goes_on(frontends, text, end, fields):
    """Without text, the role comes at the end of the answer."""
    path, body = CHAT
    body = body_of(body, stream_options={"include_usage": True}, **fields)
    frontends.will_answer(text, then=end)
    _, whole, _ = await stream(frontends.url, path, body)
    assert len(whole) == 4, whole

    for cut, (number, _) in enumerate(whole, 1):
        status, rest, _ = await stream(frontends.url, path, body, {"last-event-id": number})
        assert status == (200 if whole[cut:] else 204), rest
        assert choices(rest) == choices(whole[cut:]), cut


def choices(events):
    """Return what the events say about the answer, without the KV reports: nothing is computed for an answer that has ended."""
    return [data if data == "[DONE]" else json.loads(data)["choices"] for _, data in events]


async def test_stream_without_the_header_has_no_ids(frontends):
    frontends.will_answer(TEXT, then=(EOS,))
    path, body = CHAT
    _, events, content = await stream(frontends.url, path, body_of(body), {})
    assert len(events) > 3
    assert b"id:" not in content.replace(b'"id":', b"")


async def test_field_of_the_body_asks_for_ids_as_the_header_does(frontends):
    frontends.will_answer(TEXT, then=(EOS,))
    path, body = COMPLETION
    _, events, _ = await stream(frontends.url, path, body_of(body, fleet={"resumable": True}), {})
    assert all(number for number, _ in events)


async def test_random_answer_goes_on_after_the_kept_tokens(frontends):
    """Only a worker has the tokens, because none can be generated again."""
    path, body = COMPLETION
    answer = frontends.will_answer(TEXT, then=(EOS,))
    body = body_of(body, temperature=1)
    _, whole, _ = await stream(frontends.url, path, body)

    _, rest, _ = await stream(frontends.url, path, body, {"last-event-id": whole[3][0]})

    assert [data for _, data in rest] == [data for _, data in whole[4:]]
    assert frontends.router.submitted[-1].answered == tuple(answer[: int(whole[3][0].rpartition(".")[2])])


@pytest.mark.parametrize("are_kept", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "limit", "num_ends"),
    [
        (CHAT[0], body_of(CHAT[1], stream_options={"include_usage": True}), "max_tokens", 3),
        (COMPLETION[0], body_of(COMPLETION[1]), "max_tokens", 2),
        (*RESPONSE, "max_output_tokens", 4),
        (*MESSAGE, "max_tokens", 3),
    ],
    ids=["chats", "completions", "responses", "messages"],
)
async def test_end_events_of_an_answer_that_goes_on_are_refused(frontends, path, body, limit, num_ends, are_kept):
    """Otherwise the client gets more text, and no second end. Without the kept tokens, they are generated again."""
    frontends.will_answer("Sun and moon", then=(EOS,))
    _, longer, _ = await stream(frontends.url, path, {**body, limit: 100})
    _, whole, _ = await stream(frontends.url, path, {**body, limit: 4})
    end = len(whole) - num_ends

    for cut, (number, _) in enumerate(whole, 1):
        if not are_kept:
            frontends.router.kept.clear()
        status, rest, content = await stream(frontends.url, path, {**body, limit: 100}, {"last-event-id": number})
        if cut <= end:
            assert (status, len(rest)) == (200, len(longer) - cut), cut
        elif cut == len(whole):
            assert status == 204, "the client has a whole answer"
        else:
            assert status == 400, cut
            assert b"last-event-id: is of the end of the answer, but" in content


@pytest.mark.parametrize("api", [CHAT, COMPLETION, MESSAGE], ids=["chats", "completions", "messages"])
async def test_resumption_with_other_stop_strings_is_refused(frontends, api):
    """A stop string holds text back, so an id would mean another part of the text: the client would get text twice, or never."""
    frontends.will_answer("Sun and moon", then=(EOS,))
    path, body = api
    stop = {"stop_sequences" if api is MESSAGE else "stop": ["n and sea"]}
    for first, then in (({}, stop), (stop, {})):
        _, whole, _ = await stream(frontends.url, path, body_of(body, **first))
        headers = {"last-event-id": whole[4][0]}

        status, _, content = await stream(frontends.url, path, body_of(body, **then), headers)
        assert (status, "another value of stop" in content.decode()) == (400, True)

        status, rest, _ = await stream(frontends.url, path, body_of(body, **first), headers)
        assert status == 200
        assert comparable(path, rest) == comparable(path, whole[5:])


@pytest.mark.parametrize(
    "api", [CHAT, COMPLETION, RESPONSE, MESSAGE], ids=["chats", "completions", "responses", "messages"]
)
async def test_whole_answer_ends_again_although_its_tokens_are_gone(frontends, api):
    """An EventSource asks again after the last event, and a refusal would tell the client to send the request as a new one."""
    path, body = api
    frontends.will_answer("Sun and moon", then=(EOS,))
    body = {**(body_of(body) if api in (CHAT, COMPLETION) else body), "temperature": 1}
    _, whole, _ = await stream(frontends.url, path, body)
    frontends.router.kept.clear()
    frontends.router.cards = ()  # no worker serves the model
    submitted = len(frontends.router.submitted)

    status, rest, _ = await stream(frontends.url, path, body, {"last-event-id": whole[-1][0]})
    assert (status, rest) == (204, [])
    assert len(frontends.router.submitted) == submitted
    assert not any(number.endswith("z") for number, _ in whole[:-1])

    forged = f"{'A' * 40}{whole[-1][0][40:]}"
    status, _, content = await stream(frontends.url, path, body, {"last-event-id": forged})
    assert (status, b"last-event-id" in content) == (400, True)


async def test_resumption_with_other_stop_tokens_is_refused(frontends):
    """The text of a stop token is held back, and would be missing if the answer went on after it."""
    answer = frontends.will_answer("Sun and moon", then=(EOS,))
    path, body = CHAT
    first = body_of(body, stop_token_ids=[answer[5]], logprobs=True)
    _, whole, _ = await stream(frontends.url, path, first)

    status, _, content = await stream(frontends.url, path, body_of(body, logprobs=True), {"last-event-id": whole[4][0]})

    assert (status, error_of(content)["param"]) == (400, "last-event-id")


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION], ids=["chats", "completions"])
async def test_resumption_without_stop_may_change_min_tokens(frontends, path, body):
    frontends.will_answer("Sun and moon", then=(EOS,))
    _, whole, _ = await stream(frontends.url, path, body_of(body))

    headers = {"last-event-id": whole[4][0]}
    status, rest, _ = await stream(frontends.url, path, body_of(body, min_tokens=3), headers)

    assert (status, len(rest)) == (200, len(whole) - 5)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"tool_choice": "auto"}, {"tool_choice": "none"}),
        ({"tool_choice": "none"}, {"tool_choice": "auto"}),
        ({}, {"parallel_tool_calls": False}),
    ],
    ids=["none", "auto", "single call"],
)
async def test_resumption_with_another_choice_of_tools_is_refused(model_dir, tmp_path, first, then):
    """The parser holds the beginning of a call back, which plain text would not. A prompt cut to one token is equal with and without tools."""
    path, body = CHAT
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    body = body_of(body, tools=tools, truncate_prompt_tokens=1)
    async with open_frontends(with_tools(model_dir, tmp_path)) as frontends:
        frontends.router.cards = (a_model_card(parsers=AnswerParsers(tool_calls="hermes")),)
        frontends.will_answer("Sun <tool_call", then=(EOS,))
        _, whole, _ = await stream(frontends.url, path, {**body, **first})
        headers = {"last-event-id": whole[2][0]}

        status, _, content = await stream(frontends.url, path, {**body, **then}, headers)

        assert (status, error_of(content)["param"]) == (400, "last-event-id")


async def test_call_cut_by_the_token_limit_is_of_the_end(model_dir, tmp_path):
    """A parser gives the beginning of a call back as text if the answer ends in it. In a longer answer it is no text."""
    path, body = MESSAGE
    body = {**body, "tools": [{"name": "get", "input_schema": {"type": "object"}}]}
    async with open_frontends(with_tools(model_dir, tmp_path)) as frontends:
        frontends.router.cards = (a_model_card(parsers=AnswerParsers(tool_calls="hermes")),)
        limit = len(frontends.will_answer('Sun <tool_call>\n{"na'))
        frontends.will_answer(
            'Sun <tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>', then=(EOS,)
        )
        _, whole, _ = await stream(frontends.url, path, {**body, "max_tokens": limit})
        assert "<tool_call>" in texts(data for _, data in whole)
        assert not any("<tool_call>" in data for _, data in whole[:-4]), "the parser holds it back until the end"

        for number, _ in whole[-4:-1]:
            status, _, content = await stream(frontends.url, path, body, {"last-event-id": number})

            assert status == 400
            assert b"last-event-id: is of the end of the answer, but" in content


@pytest.mark.parametrize("fields", [{}, {"stop_sequences": ["moon and sea"]}], ids=["no stop string", "stop string"])
async def test_end_events_of_an_answer_that_goes_on_by_a_call(model_dir, tmp_path, fields):
    """They are refused: the client would get the arguments of a call without the event that begins the call."""
    path, body = MESSAGE
    body = {**body, "tools": [{"name": "get", "input_schema": {"type": "object"}}], **fields}
    async with open_frontends(with_tools(model_dir, tmp_path)) as frontends:
        frontends.router.cards = (a_model_card(parsers=AnswerParsers(tool_calls="hermes")),)
        limit = len(frontends.will_answer("Sun"))
        frontends.will_answer('Sun<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>', then=(EOS,))
        _, whole, _ = await stream(frontends.url, path, {**body, "max_tokens": limit})
        assert texts(data for _, data in whole) == "Sun"

        for number, _ in whole[-3:-1]:
            status, _, content = await stream(frontends.url, path, body, {"last-event-id": number})

            assert status == 400
            assert b"last-event-id: is of the end of the answer, but" in content


async def test_end_events_are_refused_at_new_text_with_stop_strings(frontends):
    """A stop string may hold text back, so a token alone does not say that the answer goes on."""
    frontends.will_answer("Sun and moon", then=(EOS,))
    path, body = MESSAGE
    body = {**body, "stop_sequences": ["moon and sea"]}
    _, whole, _ = await stream(frontends.url, path, {**body, "max_tokens": 4})

    for number, _ in whole[-3:-1]:
        status, _, content = await stream(frontends.url, path, body, {"last-event-id": number})

        assert status == 400
        assert b"last-event-id: is of the end of the answer, but" in content


async def test_text_held_back_until_the_end_is_of_the_end(frontends):
    """In a longer answer, a stop string may swallow it."""
    limit = len(frontends.will_answer("Sun and mo"))
    frontends.will_answer("Sun and moon, and more", then=(EOS,))
    path, body = MESSAGE
    body = {**body, "stop_sequences": ["moon,"]}
    _, whole, _ = await stream(frontends.url, path, {**body, "max_tokens": limit})
    assert texts(data for _, data in whole) == "Sun and mo"

    for number, _ in whole[-4:-1]:  # the text "mo", and two events without text
        status, _, content = await stream(frontends.url, path, body, {"last-event-id": number})

        assert status == 400
        assert b"last-event-id: is of the end of the answer, but" in content


async def test_resumed_stream_keeps_id_and_has_its_own_in_the_header(frontends):
    frontends.will_answer(TEXT, then=(EOS,))
    path, body = CHAT
    _, whole, _ = await stream(frontends.url, path, body_of(body), {**RESUMABLE, "x-request-id": "mine"})
    async with httpx.AsyncClient(base_url=frontends.url, trust_env=False, timeout=60) as client:
        again = await client.post(path, json=body_of(body), headers={"last-event-id": whole[2][0]})
    assert again.headers["x-request-id"] == "mine.r1"
    assert {json.loads(data)["id"] for _, data in sse_events(again.text)[:-1]} == {"chatcmpl-mine"}


@pytest.mark.parametrize("event_id", ["x", "7", "a.b", "....", "x" * 9000, "AAAA.3"])
async def test_forged_event_id_is_refused_with_its_name(frontends, event_id):
    frontends.will_answer(TEXT)
    path, body = CHAT
    status, _, content = await stream(frontends.url, path, body_of(body), {"last-event-id": event_id})
    assert status == 400
    assert error_of(content)["param"] == "last-event-id"
    assert not frontends.router.submitted


async def test_event_id_for_another_prompt_is_refused(frontends):
    frontends.will_answer(TEXT)
    path, body = COMPLETION
    _, whole, _ = await stream(frontends.url, path, body_of(body))
    status, _, content = await stream(
        frontends.url, path, body_of(body, prompt="another"), {"last-event-id": whole[1][0]}
    )
    assert (status, error_of(content)["param"]) == (400, "last-event-id")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (*COMPLETION[:1], {**COMPLETION[1], "n": 2}, "x-fleet-resumable"),
        (*COMPLETION[:1], {**COMPLETION[1], "logprobs": 1}, "x-fleet-resumable"),
        (*CHAT[:1], {**CHAT[1], "stream": False}, "x-fleet-resumable"),
        ("/v1/responses", {"model": "tiny", "input": "x", "stream": False}, "x-fleet-resumable"),
    ],
)
async def test_request_that_cannot_be_resumed_is_refused(frontends, path, body, field):
    frontends.will_answer(TEXT)
    limit = {} if path == "/v1/responses" else {"max_tokens": 9}
    status, _, content = await stream(frontends.url, path, {**limit, "stream": True, **body})
    assert (status, error_of(content)["param"]) == (400, field)


async def test_refused_resumption_names_the_header_that_is_wrong(frontends):
    frontends.will_answer(TEXT)
    path, body = COMPLETION
    _, whole, _ = await stream(frontends.url, path, body_of(body))
    for headers, stays_a_stream, error in (
        ({"last-event-id": whole[1][0]}, False, "is for streams; set stream to true"),
        ({"x-fleet-resumable": "true"}, True, "must be a whole number from 0 to 1"),
    ):
        sent = body_of(body, stream=stays_a_stream)
        status, _, content = await stream(frontends.url, path, sent, headers)
        assert (status, error_of(content)["param"]) == (400, *headers)
        assert error_of(content)["message"].endswith(error)


@TRANSLATED
@pytest.mark.parametrize("step", [1, 4])
async def test_translated_stream_cut_after_any_event_goes_on_exactly(frontends, path, body, step):
    """Also if the cut is between two events of one step, and the answer's later steps have other sizes."""
    frontends.will_answer(TEXT, step=step, then=(EOS,))
    _, whole, _ = await stream(frontends.url, path, body)
    assert len(whole) > 10 / step
    assert all(number for number, _ in whole)

    for cut, (number, _) in enumerate(whole, 1):
        frontends.router.step = step
        status, rest, _ = await stream(frontends.url, path, body, {"last-event-id": number})
        assert status == (200 if whole[cut:] else 204), rest
        assert comparable(path, rest) == comparable(path, whole[cut:]), cut


@TRANSLATED
async def test_translated_stream_survives_cut_after_cut(frontends, path, body):
    """Each connection is lost after one or two events, and the router's steps change their size."""
    frontends.will_answer(TEXT, then=(EOS,))
    _, whole, _ = await stream(frontends.url, path, body)
    got: list[str] = []
    headers = RESUMABLE
    for turn in range(2 * len(whole)):
        frontends.router.step = 1 + turn % 3
        status, events, _ = await stream(frontends.url, path, body, headers)
        if status == 204:
            break
        assert status == 200
        taken = events[: 1 + turn % 2]
        got += [data for _, data in taken]
        headers = {"last-event-id": taken[-1][0]}

    assert texts(got) == texts(data for _, data in whole)
    assert kinds(got) == kinds(data for _, data in whole)
    if path == "/v1/responses":
        assert [json.loads(data)["sequence_number"] for data in got] == list(range(len(got)))


def texts(events):
    """Return the joined pieces of text of a stream."""
    deltas = [json.loads(data).get("delta", {}) for data in events]
    return "".join([each if isinstance(each, str) else each.get("text", "") for each in deltas])


def kinds(events):
    """Return the types of the events of a stream, without the pieces of text, whose number may differ."""
    return [
        kind for kind in (json.loads(data)["type"] for data in events) if not kind.endswith((".delta", "block_delta"))
    ]


@TRANSLATED
async def test_random_translated_answer_goes_on_after_kept_tokens(frontends, path, body):
    answer = frontends.will_answer(TEXT, then=(EOS,))
    body = {**body, "temperature": 1}
    _, whole, _ = await stream(frontends.url, path, body)
    middle = len(whole) // 2

    _, rest, _ = await stream(frontends.url, path, body, {"last-event-id": whole[middle][0]})

    assert comparable(path, rest) == comparable(path, whole[middle + 1 :])
    assert frontends.router.submitted[-1].answered == tuple(answer[: int(whole[middle][0].split(".")[1])])


@TRANSLATED
async def test_translated_stream_without_the_header_has_no_ids(frontends, path, body):
    frontends.will_answer(TEXT, then=(EOS,))
    _, events, content = await stream(frontends.url, path, body, {})
    assert len(events) > 3
    assert b"\nid: " not in content
    assert not content.startswith(b"id: ")


async def test_event_id_of_another_api_is_refused(frontends):
    """All APIs are asked with the same prompt, so only the form of the id tells them apart."""
    frontends.will_answer(TEXT, then=(EOS,))
    bodies = {CHAT[0]: body_of(CHAT[1]), **dict((RESPONSE, MESSAGE))}
    ids = {}
    for path, body in bodies.items():
        _, events, _ = await stream(frontends.url, path, body)
        ids[path] = events[2][0]
    submitted = len(frontends.router.submitted)
    for path, other in itertools.permutations(bodies, 2):
        status, _, content = await stream(frontends.url, path, bodies[path], {"last-event-id": ids[other]})
        assert status == 400, (path, other)
        assert b"last-event-id: is the id of an event of another API" in content
    assert len(frontends.router.submitted) == submitted


@TRANSLATED
async def test_forged_counts_of_translated_events_get_no_foreign_text(frontends, path, body):
    """A client may claim to have more text than it has. Counts of text and of events beyond those of the answer are refused."""
    frontends.will_answer(TEXT, then=(EOS,))
    _, whole, _ = await stream(frontends.url, path, body)
    token, position, events, characters, _, letter = whole[4][0].split(".")

    status, _, content = await stream(
        frontends.url, path, body, {"last-event-id": f"{token}.{position}.{events}.999999.0.{letter}"}
    )
    assert (status, b"is of another answer" in content) == (400, True)
    status, _, _ = await stream(
        frontends.url, path, body, {"last-event-id": f"{token}.{position}.999999.{characters}.0.{letter}"}
    )
    assert status == 400
    status, _, _ = await stream(
        frontends.url, path, body, {"last-event-id": f"{token}.{position}.{'9' * 10}.0.0.{letter}"}
    )
    assert status == 400
    status, _, _ = await stream(frontends.url, path, body, {"last-event-id": f"{token}.999.1.1.1.{letter}"})
    assert status == 400
