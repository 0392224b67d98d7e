"""Calls of LiteLLM's SDK: python litellm_calls.py URL MODEL MODEL_FOLDER SCRATCH, in LiteLLM's environment."""

import sys
from collections.abc import Callable

import litellm
from reporting import report_calls


def main(url: str, model: str) -> None:
    given = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "max_tokens": 8, "num_retries": 0}
    chat = given | {"messages": [{"role": "user", "content": "Say a word."}]}
    calls: dict[str, Callable[[], object]] = {
        "completion": lambda: litellm.completion(**chat).choices[0].message.content is not None,
        "completion stream": lambda: list(litellm.completion(**chat, stream=True)),
        "completion n": lambda: len(litellm.completion(**chat, n=2, temperature=1).choices) == 2,
        "completion logprobs": lambda: litellm.completion(**chat, logprobs=True, top_logprobs=2).choices[0].logprobs,
        "text_completion": lambda: (
            litellm.text_completion(**given | {"model": f"text-completion-openai/{model}"}, prompt="Once")
            .choices[0]
            .text
            is not None
        ),
    }
    report_calls(calls)


if __name__ == "__main__":
    main(*sys.argv[1:3])
