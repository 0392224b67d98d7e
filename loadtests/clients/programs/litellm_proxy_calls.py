"""Calls of the OpenAI client through LiteLLM's proxy: python litellm_proxy_calls.py URL MODEL MODEL_FOLDER SCRATCH.

The script runs in the environment of LiteLLM's proxy.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import openai
from reporting import report, report_calls

START_SECONDS = 180.0
CONFIG = """
model_list:
  - model_name: proxied
    litellm_params: {{model: "openai/{model}", api_base: "{url}", api_key: none}}
  - model_name: text
    litellm_params: {{model: "text-completion-openai/{model}", api_base: "{url}", api_key: none}}
"""


def main(url: str, model: str, scratch: str) -> None:
    config = Path(scratch) / "proxy.yaml"
    config.write_text(CONFIG.format(url=url, model=model))
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    key = f"sk-{secrets.token_hex(16)}"
    # Without the first variable, the proxy would download a list of prices.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}
    with (Path(scratch) / "proxy.log").open("wb") as log:
        proxy = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
    try:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60) as client:
            if not is_up(client, proxy):
                end = (Path(scratch) / "proxy.log").read_text(errors="replace")[-300:]
                report("start", ok=False, why=end)
                return
            report_calls(calls(client))
    finally:
        proxy.terminate()
        proxy.wait(30)


def is_up(client: openai.OpenAI, proxy: "subprocess.Popen[bytes]") -> bool:
    ends = time.monotonic() + START_SECONDS
    while proxy.poll() is None and time.monotonic() < ends:
        with suppress(openai.OpenAIError):
            return bool(client.models.list().data)
        time.sleep(0.5)
    return False


def calls(client: openai.OpenAI) -> dict[str, Callable[[], object]]:
    messages = [{"role": "user", "content": "Say a word."}]

    def chat(**fields: Any) -> Any:
        return client.chat.completions.create(model="proxied", messages=messages, max_tokens=8, **fields)

    return {
        "chat": lambda: chat().choices[0].message.content is not None,
        "chat stream": lambda: list(chat(stream=True)),
        "completion": lambda: client.completions.create(model="text", prompt="Once", max_tokens=8).choices[0].text,
        "models": lambda: {each.id for each in client.models.list().data} == {"proxied", "text"},
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[4])
