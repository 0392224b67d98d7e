"""Calls of LangChain's OpenAI integration: python langchain_calls.py URL MODEL MODEL_FOLDER SCRATCH, in its environment."""

import json
import sys
from collections.abc import Callable

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI


def main(url: str, model: str) -> None:
    chat = ChatOpenAI(model=model, base_url=url, api_key="none", max_tokens=8, max_retries=0)
    text = OpenAI(model=model, base_url=url, api_key="none", max_tokens=8, max_retries=0)
    calls: dict[str, Callable[[], object]] = {
        "invoke": lambda: chat.invoke("Say a word.").response_metadata["finish_reason"],
        "stream": lambda: list(chat.stream("Say a word.")),
        "batch": lambda: len(chat.batch(["a", "b"])) == 2,
        "generate n": lambda: len(chat.generate([[HumanMessage("Say a word.")]], n=2).generations[0]) == 2,
        "completion of several prompts": lambda: len(text.generate(["Once", "The end"]).generations) == 2,
    }
    for name, call in calls.items():
        try:
            ok, why = bool(call()), ""
        except Exception as error:  # noqa: BLE001 - supervisor: the other calls go on
            ok, why = False, f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"call": name, "ok": ok, "why": why}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
