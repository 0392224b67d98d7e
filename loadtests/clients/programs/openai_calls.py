"""Calls of the OpenAI client that plain vLLM serves: python openai_calls.py URL MODEL MODEL_FOLDER SCRATCH, in the client's environment.

Each call checks the answer as a user of the client would.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import openai
from reporting import report_calls

Call = Callable[[openai.OpenAI, str], None]

MESSAGES: Any = [{"role": "user", "content": "Say a word."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SECONDS = 120.0


def main(url: str, model: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        report_calls({name: partial(_is_served, call, client, model) for name, call in CALLS.items()}, _refused_field)


def _is_served(call: Call, client: openai.OpenAI, model: str) -> bool:
    call(client, model)
    return True


def _refused_field(error: Exception) -> str:
    """Return the request field that an answer with HTTP 400 names; empty if it names none, and for all other errors."""
    if not isinstance(error, openai.BadRequestError) or not isinstance(error.body, Mapping):
        return ""
    return str(error.body.get("param") or "")


def _completes(check: Callable[[Any], object] = bool, **fields: Any) -> Call:
    """Return a call that requests a completion, and fails if the answer does not pass `check`."""

    def call(client: openai.OpenAI, model: str) -> None:
        given = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, **fields}
        answer = client.completions.create(model=model, **given)
        assert answer.choices, "no choices"
        assert answer.usage is not None, "no usage"
        assert check(answer), f"unexpected answer: {answer.model_dump_json()[:200]}"

    return call


def _chats(check: Callable[[Any], object] = bool, **fields: Any) -> Call:
    def call(client: openai.OpenAI, model: str) -> None:
        given = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, **fields}
        answer = client.chat.completions.create(model=model, **given)
        assert answer.choices, "no choices"
        assert check(answer), f"unexpected answer: {answer.model_dump_json()[:200]}"

    return call


def _streams(check: Callable[[Sequence[Any]], object] = bool, *, chat: bool, **fields: Any) -> Call:
    def call(client: openai.OpenAI, model: str) -> None:
        given: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "stream": True, **fields}
        if chat:
            chunks = list(client.chat.completions.create(model=model, **{"messages": MESSAGES, **given}))
        else:
            chunks = list(client.completions.create(model=model, **{"prompt": "Once upon a time", **given}))
        assert chunks, "no events"
        assert check(chunks), f"unexpected events: {chunks[-1].model_dump_json()[:200]}"

    return call


def _usage_at_end(chunks: Sequence[Any]) -> bool:
    return chunks[-1].usage is not None and not chunks[-1].choices


def _usage_everywhere(chunks: Sequence[Any]) -> bool:
    return all(chunk.usage is not None for chunk in chunks)


def _indices(count: int) -> Callable[[Any], bool]:
    return lambda answer: sorted(choice.index for choice in answer.choices) == list(range(count))


def _streamed_indices(count: int) -> Callable[[Sequence[Any]], bool]:
    return lambda chunks: {choice.index for chunk in chunks for choice in chunk.choices} == set(range(count))


def _echoes(answer: Any) -> bool:
    return all(choice.text.startswith("Once upon a time") for choice in answer.choices)


def _scores(answer: Any) -> bool:
    logprobs = answer.choices[0].logprobs
    values = logprobs.token_logprobs
    return values[0] is None and all(value <= 0 for value in values[1:]) and len(values) == len(logprobs.tokens)


def _top(count: int) -> Callable[[Any], bool]:
    return lambda answer: all(len(token.top_logprobs) >= count for token in answer.choices[0].logprobs.content)


def _is_json(answer: Any) -> bool:
    return isinstance(json.loads(answer.choices[0].message.content), dict)


def _token_ids(answer: Any) -> bool:
    return bool(answer.choices[0].token_ids)


def _lists_models(client: openai.OpenAI, model: str) -> None:
    assert model in [each.id for each in client.models.list()]


def _finds_a_model(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model


def _refuses_an_unknown_model(client: openai.OpenAI, model: str) -> None:
    try:
        client.completions.create(model=f"{model}-of-nobody", prompt="x", max_tokens=1)
    except openai.NotFoundError:
        return
    raise AssertionError("an unknown model is served")


def _streams_with_a_context(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=8) as stream:
        kinds = {event.type for event in stream}
    assert "content.delta" in kinds, kinds


def _responds(stream: bool) -> Call:
    def call(client: openai.OpenAI, model: str) -> None:
        if stream:
            events = list(client.responses.create(model=model, input="Say a word.", max_output_tokens=16, stream=True))
            assert events[-1].type in {"response.completed", "response.incomplete"}, events[-1].type
        else:
            answer = client.responses.create(model=model, input="Say a word.", max_output_tokens=16)
            assert answer.output, "no output"

    return call


def _raw(path: str, body: Mapping[str, Any]) -> Call:
    """Return a call of an endpoint that vLLM has in addition to the OpenAI API; `path` is relative to the root of the server."""

    def call(client: openai.OpenAI, model: str) -> None:
        root = str(client.base_url).removesuffix("/").removesuffix("/v1")
        answer = client.post(f"{root}{path}", body={"model": model, **body}, cast_to=object)
        assert answer, "an empty answer"

    return call


CALLS: Mapping[str, Call] = {
    "models.list": _lists_models,
    "models.retrieve": _finds_a_model,
    "completions unknown model": _refuses_an_unknown_model,
    "completions": _completes(lambda answer: answer.choices[0].text is not None),
    "completions token ids": _completes(prompt=[1, 2, 3]),
    "completions list of texts": _completes(_indices(2), prompt=["Once upon a time", "The end"]),
    "completions list of ids": _completes(_indices(2), prompt=[[1, 2, 3], [4, 5]]),
    "completions n": _completes(_indices(3), n=3, temperature=1),
    "completions n and list": _completes(_indices(4), n=2, temperature=1, prompt=["a b c", "d e f"]),
    "completions best_of": _completes(_indices(1), n=1, extra_body={"best_of": 2}, temperature=1),
    "completions echo": _completes(_echoes, echo=True),
    "completions echo logprobs": _completes(_scores, echo=True, logprobs=1, max_tokens=1),
    "completions echo max_tokens 0": _completes(_scores, echo=True, logprobs=1, max_tokens=0),
    "completions logprobs": _completes(lambda answer: answer.choices[0].logprobs.tokens, logprobs=2),
    "completions stop": _completes(stop=["."]),
    "completions seed": _completes(seed=1, temperature=1),
    "completions penalties": _completes(presence_penalty=0.5, frequency_penalty=0.5),
    "completions logit_bias": _completes(logit_bias={"5": -100}),
    "completions suffix": _completes(suffix="the end"),
    "completions user": _completes(user="someone"),
    "completions stream": _streams(chat=False),
    "completions stream usage": _streams(_usage_at_end, chat=False, stream_options={"include_usage": True}),
    "completions stream n": _streams(_streamed_indices(2), chat=False, n=2, temperature=1),
    "completions stream echo": _streams(chat=False, echo=True),
    "completions stream continuous usage": _streams(
        _usage_everywhere,
        chat=False,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[arg-type]
    ),
    "completions top_k min_p": _completes(extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}),
    "completions min_tokens ignore_eos": _completes(
        lambda answer: answer.usage.completion_tokens == 8, extra_body={"min_tokens": 8, "ignore_eos": True}
    ),
    "completions bad_words": _completes(extra_body={"bad_words": ["the"]}),
    "completions allowed_token_ids": _completes(extra_body={"allowed_token_ids": [5, 6, 7]}),
    "completions prompt_logprobs": _completes(
        lambda answer: answer.choices[0].prompt_logprobs[0] is None, extra_body={"prompt_logprobs": 1}
    ),
    "completions return_token_ids": _completes(_token_ids, extra_body={"return_token_ids": True}),
    "completions token names": _completes(
        lambda answer: answer.choices[0].logprobs.tokens[0].startswith("token_id:"),
        logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    ),
    "completions cache_salt": _completes(extra_body={"cache_salt": "salt"}),
    "completions truncate_prompt_tokens": _completes(
        lambda answer: answer.usage.prompt_tokens == 2, extra_body={"truncate_prompt_tokens": 2}
    ),
    "completions add_special_tokens": _completes(extra_body={"add_special_tokens": False}),
    "completions skip_special_tokens": _completes(extra_body={"skip_special_tokens": False}),
    "completions include_stop": _completes(stop=["e"], extra_body={"include_stop_str_in_output": True}),
    "completions structured regex": _completes(extra_body={"structured_outputs": {"regex": "[ab]+"}}),
    "completions structured choice": _completes(
        lambda answer: answer.choices[0].text in {"yes", "no"},
        max_tokens=16,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    ),
    "completions priority": _completes(extra_body={"priority": 0}),
    "completions beam search": _completes(n=2, extra_body={"use_beam_search": True}),
    "chat": _chats(lambda answer: answer.choices[0].message.role == "assistant"),
    "chat system": _chats(messages=[{"role": "system", "content": "Be brief."}, *MESSAGES]),
    "chat developer": _chats(messages=[{"role": "developer", "content": "Be brief."}, *MESSAGES]),
    "chat text parts": _chats(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]),
    "chat n": _chats(_indices(3), n=3, temperature=1),
    "chat logprobs": _chats(_top(3), logprobs=True, top_logprobs=3),
    "chat max_completion_tokens": _chats(max_completion_tokens=4),
    "chat stop seed": _chats(stop="x", seed=3, temperature=1),
    "chat json_object": _chats(max_tokens=64, response_format={"type": "json_object"}),
    "chat json_schema": _chats(
        _is_json,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    ),
    "chat structural_tag": _chats(
        response_format={
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
            "triggers": ["<a>"],
        }
    ),
    "chat tools": _chats(tools=TOOLS),
    "chat tools none": _chats(tools=TOOLS, tool_choice="none"),
    "chat tools required": _chats(
        lambda answer: answer.choices[0].message.tool_calls, tools=TOOLS, tool_choice="required", max_tokens=200
    ),
    "chat tools named": _chats(
        lambda answer: answer.choices[0].message.tool_calls,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=200,
    ),
    "chat user metadata store": _chats(user="someone", metadata={"a": "b"}, store=False, service_tier="auto"),
    "chat prompt_logprobs": _chats(lambda answer: answer.prompt_logprobs, extra_body={"prompt_logprobs": 1}),
    "chat return_token_ids": _chats(_token_ids, extra_body={"return_token_ids": True}),
    "chat template kwargs": _chats(extra_body={"chat_template_kwargs": {"enable_thinking": False}}),
    "chat reasoning_effort": _chats(reasoning_effort="low"),
    "chat stream": _streams(chat=True),
    "chat stream usage": _streams(_usage_at_end, chat=True, stream_options={"include_usage": True}),
    "chat stream n": _streams(_streamed_indices(2), chat=True, n=2, temperature=1),
    "chat stream logprobs": _streams(chat=True, logprobs=True, top_logprobs=2),
    "chat stream helper": _streams_with_a_context,
    "responses": _responds(stream=False),
    "responses stream": _responds(stream=True),
    "tokenize": _raw("/tokenize", {"prompt": "Once upon a time"}),
    "detokenize": _raw("/detokenize", {"tokens": [5, 6, 7]}),
}
"""The calls, by the name under which each is reported."""


if __name__ == "__main__":
    main(*sys.argv[1:3])
