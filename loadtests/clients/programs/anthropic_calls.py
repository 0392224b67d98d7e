"""Calls of Anthropic's client: python anthropic_calls.py URL MODEL MODEL_FOLDER SCRATCH, in the client's environment."""

import sys
from collections.abc import Callable
from typing import Any

import anthropic
from reporting import report_calls

MESSAGES: list[Any] = [{"role": "user", "content": "Will it rain in Ghent?"}]
GREEDY = {"temperature": 0}  # sent as `extra_body`, because the client has no argument for the temperature any more
CITIES = ("Ghent", "Oslo")
TOOL: Any = {
    "name": "weather",
    "description": "Tell the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120)
    report_calls(calls(client, model))


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content)


def tool_use_of(message: Any) -> Any:
    """Return the only tool call of a message, after a check that its arguments follow the schema."""
    (used,) = [block for block in message.content if block.type == "tool_use"]
    assert used.input["city"] in CITIES, used.input
    return used


def calls(client: anthropic.Anthropic, model: str) -> dict[str, Callable[[], object]]:
    given: Any = {"model": model, "max_tokens": 8, "messages": MESSAGES}
    once = {"type": "any", "disable_parallel_tool_use": True}
    with_tool: Any = {**given, "max_tokens": 200, "tools": [TOOL], "tool_choice": once, "extra_body": GREEDY}

    def streams() -> bool:
        with client.messages.stream(**given, extra_body=GREEDY) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        whole = client.messages.create(**given, extra_body=GREEDY)
        return bool(text) and text == text_of(final) == text_of(whole)

    def streams_tool() -> bool:
        with client.messages.stream(**with_tool) as stream:
            return bool(tool_use_of(stream.get_final_message()).name == "weather")

    def answers_with_tool_result() -> bool:
        first = client.messages.create(**with_tool)
        result = {"type": "tool_result", "tool_use_id": tool_use_of(first).id, "content": "No."}
        turns: Any = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(model=model, max_tokens=8, messages=turns, tools=[TOOL])
        return first.stop_reason == "tool_use" and bool(second.content)

    def refuses_an_unknown_model() -> bool:
        try:
            client.messages.create(**{**given, "model": f"{model}-of-nobody"})
        except anthropic.NotFoundError:
            return True
        return False

    return {
        "create": lambda: client.messages.create(**given).usage.output_tokens == 8,
        "system and stop sequences": lambda: client.messages.create(**given, system="Be brief.", stop_sequences=["x"]),
        "stream": streams,
        "tool": answers_with_tool_result,
        "tool stream": streams_tool,
        "count_tokens": lambda: client.messages.count_tokens(model=model, messages=MESSAGES).input_tokens > 0,
        "models": lambda: model in [each.id for each in client.models.list()],
        "unknown model": refuses_an_unknown_model,
    }


if __name__ == "__main__":
    main(*sys.argv[1:3])
