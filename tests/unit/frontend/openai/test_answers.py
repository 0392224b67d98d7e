import json

import pytest
from msgspec import structs
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from fleet.core.requests import CallDelta, Delta, Finish, Finished, KvPhase, Logprobs, Source, Usage
from fleet.core.roles import Phase
from fleet.frontend.openai.answers import ChatFormatter, CompletionFormatter
from fleet.frontend.openai.requests import read_chat, read_completion
from tests.support.builders import MODEL, a_kv_report

KV = (
    KvPhase(phase=Phase.PREFILL, worker_id="p1", report=a_kv_report(64)),
    KvPhase(phase=Phase.DECODE, worker_id="d1", report=a_kv_report(64, cached_blocks=2, source=Source.STORE)),
)
USAGE = Usage(prompt_tokens=64, completion_tokens=3, cached_tokens=32)
TEXTS = {1: "a", 2: " bé", 3: "\ufffd", 4: ""}


def finished(text: str = "", finish: Finish = Finish.STOP) -> Finished:
    return Finished(finish=finish, usage=USAGE, kv=KV, text=text)


def chat_shape(**fields: object) -> ChatFormatter:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return ChatFormatter(
        read_chat(json.dumps(body).encode(), RequestId("r1"), Nanos(0)), MODEL, lambda _, token: TEXTS[token], 7
    )


def completion_shape(**fields: object) -> CompletionFormatter:
    body = {"prompt": "x", **fields}
    parsed = read_completion(json.dumps(body).encode(), RequestId("r1"), Nanos(0))
    return CompletionFormatter(parsed, MODEL, lambda _, token: TEXTS[token], 7)


def events(stream: bytes) -> list[dict]:
    """Return the events of a complete stream."""
    *lines, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def strictly(kind, content: dict):
    """Validate a JSON object strictly against a type of the OpenAI client, and return the typed object."""
    return kind.model_validate(content, strict=True)


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_chunks_match_the_official_types(include_usage):
    shape = chat_shape(stream=True, stream_options={"include_usage": include_usage})

    stream = shape.chunk(Delta(text='say "hi"\n', token_ids=(1,)))
    stream += shape.chunk(Delta(text="", token_ids=(2,)))
    stream += shape.chunk(Delta(text="é", token_ids=(2,)))
    stream += shape.last_chunks(finished("!"), ())

    chunks = [strictly(ChatCompletionChunk, event) for event in events(stream)]
    assert {(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks} == {
        ("chatcmpl-r1", 7, "tiny", "chat.completion.chunk")
    }
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None]
    assert [delta.content for delta in deltas] == ['say "hi"\n', "é", "!", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, None, None, "stop"]
    if include_usage:
        assert chunks[-1].choices == []
        assert chunks[-1].usage.total_tokens == 67
        assert all(event["usage"] is None for event in events(stream)[:-1])
    else:
        assert not any("usage" in event for event in events(stream))


def test_answer_without_text_has_the_assistant_role():
    shape = chat_shape()

    stream = shape.chunk(Delta(text="", token_ids=(4,))) + shape.last_chunks(finished(), ())

    first, last = events(stream)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}


def test_whole_chat_answer_matches_the_official_types():
    content = json.loads(chat_shape().whole("hi", (1, 2), (), finished(finish=Finish.LENGTH)))

    answer = strictly(ChatCompletion, content)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hi", "length")
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    assert content["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("reasoning_tokens", [0, 3])
def test_usage_of_a_chat_counts_the_tokens_of_its_reasoning(reasoning_tokens):
    end = structs.replace(finished(), usage=structs.replace(USAGE, reasoning_tokens=reasoning_tokens))

    content = chat_shape().whole("hi", (1, 2), (), end)

    details = strictly(ChatCompletion, json.loads(content)).usage.completion_tokens_details
    assert (0 if details is None else details.reasoning_tokens) == reasoning_tokens


def test_chat_logprobs_have_text_bytes_and_alternatives():
    shape = chat_shape(logprobs=True, top_logprobs=2)
    logprobs = (Logprobs(-0.5, (2, 3), (-0.5, float("-inf"))),)

    answer = strictly(ChatCompletion, json.loads(shape.whole(" bé", (2,), logprobs, finished())))

    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob, bytes(token.bytes)) == (" bé", -0.5, " bé".encode())
    assert [(top.token, top.logprob, top.bytes) for top in token.top_logprobs] == [
        (" bé", -0.5, list(" bé".encode())),
        ("\ufffd", -9999.0, None),
    ]


def test_chunk_without_text_still_has_its_logprobs():
    shape = chat_shape(logprobs=True)

    stream = shape.chunk(Delta(text="", token_ids=(3,), logprobs=(Logprobs(-1.0),))) + shape.last_chunks(finished(), ())

    first = strictly(ChatCompletionChunk, events(stream)[0])
    assert first.choices[0].logprobs.content[0].logprob == -1.0
    assert first.choices[0].delta.role == "assistant"


def test_completion_chunks_match_the_official_types():
    shape = completion_shape(stream=True, stream_options={"include_usage": True})

    stream = shape.chunk(Delta(text="a", token_ids=(1,))) + shape.last_chunks(finished("rest"), ())

    first, *others = events(stream)
    # `finish_reason` is null, as OpenAI sends it.
    assert first["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    last, usage = (strictly(Completion, event) for event in others)
    assert (last.choices[0].text, last.choices[0].finish_reason) == ("rest", "stop")
    assert (usage.choices, usage.usage.completion_tokens) == ([], 3)


def test_completion_logprobs_are_aligned_with_the_tokens():
    shape = completion_shape(logprobs=1)
    logprobs = (Logprobs(-0.5, (1,), (-0.5,)), Logprobs(-2.0, (1,), (-0.1,)))

    answer = strictly(Completion, json.loads(shape.whole("a bé", (1, 2), logprobs, finished())))

    told = answer.choices[0].logprobs
    assert (told.tokens, told.token_logprobs, told.text_offset) == (["a", " bé"], [-0.5, -2.0], [0, 1])
    assert told.top_logprobs == [{"a": -0.5}, {"a": -0.1, " bé": -2.0}]


@pytest.mark.parametrize("make", [chat_shape, completion_shape])
def test_every_answer_has_the_origin_of_its_blocks(make):
    whole = json.loads(make(fleet={"return_token_ids": True}).whole("hi", (1, 2), (), finished()))
    last = events(make(fleet={"return_token_ids": True}).last_chunks(finished(), (1, 2)))[-1]

    assert whole["fleet"] == last["fleet"]
    assert whole["fleet"]["token_ids"] == [1, 2]
    for phase in whole["fleet"]["kv"]:
        assert sum(origin["blocks"] for origin in phase["origins"]) == phase["prompt_blocks"]
    assert whole["fleet"]["kv"][1]["origins"][0] == {
        "source": "store",
        "tier": "",
        "from": "",
        "blocks": 2,
        "bytes": 2048,
    }
    assert "token_ids" not in json.loads(make().whole("hi", (1, 2), (), finished()))["fleet"]


PARSED = (
    Delta(text="", reasoning="Rain", token_ids=(1,)),
    Delta(text="", reasoning=" or sun?", token_ids=(2,)),
    Delta(text="One moment.", token_ids=(3,)),
    Delta(text="", calls=(CallDelta(index=0, id="call_a", name="weather"),), token_ids=(4,)),
    Delta(text="", calls=(CallDelta(index=0, arguments='{"city":'),), token_ids=(1,)),
    Delta(
        text="",
        calls=(CallDelta(index=0, arguments='"Ghent"}'), CallDelta(index=1, id="call_b", name="time", arguments="{}")),
        token_ids=(2,),
    ),
)
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ghent"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
]


def test_streamed_tool_calls_match_the_official_types():
    shape = chat_shape()

    stream = b"".join(shape.chunk(delta) for delta in PARSED) + shape.last_chunks(
        finished(finish=Finish.TOOL_CALLS), ()
    )

    chunks = [strictly(ChatCompletionChunk, event) for event in events(stream)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * 6]
    assert "".join(delta.content or "" for delta in deltas) == "One moment."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Rain or sun?"
    assert [part.model_dump(exclude_none=True) for delta in deltas for part in delta.tool_calls or ()] == [
        {"index": 0, "id": "call_a", "type": "function", "function": {"name": "weather", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Ghent"}'}},
        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_whole_answer_joins_the_parts_of_each_tool_call():
    parts = [call for delta in PARSED for call in delta.calls]

    answer = json.loads(chat_shape().whole("", (), (), finished(finish=Finish.TOOL_CALLS), "Rain or sun?", parts))

    message = strictly(ChatCompletion, answer).choices[0].message
    assert message.content is None
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "Rain or sun?"
    assert [call.model_dump() for call in message.tool_calls] == CALLS
