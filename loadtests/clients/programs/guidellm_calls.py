"""Runs GuideLLM against a server: python guidellm_calls.py URL MODEL MODEL_FOLDER SCRATCH, in GuideLLM's environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

from reporting import report

REQUESTS = 4
FORMATS = {"completions": "/v1/completions", "chats": "/v1/chat/completions"}


def main(url: str, model: str, model_folder: str, scratch: str) -> None:
    for call, path in FORMATS.items():
        result = Path(scratch) / f"{call}.json"
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
        command += [
            "--backend",
            f"kind=openai_http,target={url.removesuffix('/v1')},model={model},request_format={path}",
        ]
        command += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
        command += ["--tokenizer", f"kind=hf_auto,model={model_folder}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
        command += ["--output", f"kind=json,path={result}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
        totals = {}
        if result.exists():
            totals = json.loads(result.read_text())["benchmarks"][0]["metrics"]["request_totals"]
        ok = done.returncode == 0 and totals.get("successful") == REQUESTS and not totals.get("errored")
        why = "" if ok else f"{totals} {(done.stderr or done.stdout)[-200:]}"
        report(call, ok=ok, why=why)


if __name__ == "__main__":
    main(*sys.argv[1:])
