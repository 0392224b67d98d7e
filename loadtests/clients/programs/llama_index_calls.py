"""Calls of LlamaIndex's OpenAI-like model: python llama_index_calls.py URL MODEL MODEL_FOLDER SCRATCH, in LlamaIndex's environment."""

import sys
from collections.abc import Callable

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from reporting import report_calls


def main(url: str, model: str) -> None:
    given = {"model": model, "api_base": url, "api_key": "none", "max_tokens": 8, "max_retries": 0}
    chat, text = OpenAILike(**given, is_chat_model=True), OpenAILike(**given, is_chat_model=False)
    message = [ChatMessage(role="user", content="Say a word.")]
    calls: dict[str, Callable[[], object]] = {
        "chat": lambda: chat.chat(message).message.content is not None,
        "stream_chat": lambda: list(chat.stream_chat(message)),
        "complete": lambda: text.complete("Once").text is not None,
        "stream_complete": lambda: list(text.stream_complete("Once")),
    }
    report_calls(calls)


if __name__ == "__main__":
    main(*sys.argv[1:3])
