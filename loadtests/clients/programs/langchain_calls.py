"""Calls of LangChain's OpenAI integration: python langchain_calls.py URL MODEL MODEL_FOLDER SCRATCH, in LangChain's environment."""

import sys
from collections.abc import Callable
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from reporting import report_calls

FORECAST = "No rain today."


def weather(city: Literal["Ghent", "Oslo"]) -> str:
    """Tell the weather of a city."""
    return f"{city}: {FORECAST}"


@wrap_model_call
def call_the_tool_once(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Demand one call of the tool, because a model with random weights calls none by itself."""
    called = any(isinstance(message, ToolMessage) for message in request.messages)
    settings = {"parallel_tool_calls": False, "temperature": 0}
    return handler(request.override(tool_choice="none" if called else "required", model_settings=settings))


def agent_answers(chat: ChatOpenAI) -> bool:
    """Return whether an agent called the tool, got its result and ended with an answer of the model."""
    agent = create_agent(chat, tools=[weather], middleware=[call_the_tool_once])
    _, call, result, answer = agent.invoke({"messages": [HumanMessage("Will it rain in Ghent?")]})["messages"]
    return call.tool_calls[0]["name"] == "weather" and FORECAST in result.content and not answer.tool_calls


def main(url: str, model: str) -> None:
    given = {"model": model, "base_url": url, "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(**given, max_tokens=8)
    text = OpenAI(**given, max_tokens=8)
    calls: dict[str, Callable[[], object]] = {
        "invoke": lambda: chat.invoke("Say a word.").response_metadata["finish_reason"],
        "stream": lambda: list(chat.stream("Say a word.")),
        "batch": lambda: len(chat.batch(["a", "b"])) == 2,
        "generate n": lambda: len(chat.generate([[HumanMessage("Say a word.")]], n=2).generations[0]) == 2,
        "agent with a tool": lambda: agent_answers(ChatOpenAI(**given, max_tokens=200)),
        "agent with a tool, streamed": lambda: agent_answers(ChatOpenAI(**given, max_tokens=200, streaming=True)),
        "completion of several prompts": lambda: len(text.generate(["Once", "The end"]).generations) == 2,
    }
    report_calls(calls)


if __name__ == "__main__":
    main(*sys.argv[1:3])
