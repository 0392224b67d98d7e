"""Runs GuideLLM against a server: python guidellm_calls.py URL MODEL MODEL_FOLDER SCRATCH, in GuideLLM's environment."""

import json
import sys
from functools import partial
from pathlib import Path

from reporting import CallFailed, report_calls, run_command

REQUESTS = 4
FORMATS = {"completions": "/v1/completions", "chats": "/v1/chat/completions"}


def main(url: str, model: str, model_folder: str, scratch: str) -> None:
    report_calls({call: partial(run, call, url, model, model_folder, scratch) for call in FORMATS})


def run(call: str, url: str, model: str, model_folder: str, scratch: str) -> bool:
    """Run the benchmark for one kind of call, and return True if all its requests succeed.

    Raises:
        CallFailed: A request fails or is missing, or the benchmark does not end.
    """
    result = Path(scratch) / f"{call}.json"
    backend = f"kind=openai_http,target={url.removesuffix('/v1')},model={model},request_format={FORMATS[call]}"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console", "--backend", backend]
    command += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={model_folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={result}"]
    done = run_command(command, {"HF_HUB_OFFLINE": "1"})
    totals = {}
    if result.exists():
        totals = json.loads(result.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    if done.returncode or totals.get("successful") != REQUESTS or totals.get("errored"):
        raise CallFailed(f"{totals} {(done.stderr or done.stdout)[-200:]}")
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
