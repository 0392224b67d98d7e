"""Runs `vllm bench serve` against a server: python vllm_bench_calls.py URL MODEL MODEL_FOLDER SCRATCH, in vLLM's environment."""

import json
import sys
from functools import partial
from pathlib import Path

from reporting import CallFailed, report_calls, run_command

RUNS = {"completions": ("openai", "/completions"), "chats": ("openai-chat", "/chat/completions")}
PROMPTS = 6
OUTPUT_TOKENS = 8
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main(url: str, model: str, model_folder: str, scratch: str) -> None:
    report_calls({call: partial(run, call, url, model, model_folder, scratch) for call in RUNS})


def run(call: str, url: str, model: str, model_folder: str, scratch: str) -> bool:
    """Run the benchmark for one kind of call, and return True if it reports all requests and tokens.

    Raises:
        CallFailed: The benchmark reports other numbers of requests or tokens, or does not end in time.
    """
    backend, endpoint = RUNS[call]
    command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", backend]
    command += ["--base-url", url, "--endpoint", endpoint, "--model", model, "--tokenizer", model_folder]
    command += ["--dataset-name", "random", "--num-prompts", str(PROMPTS), "--random-input-len", "32"]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", scratch, "--result-filename", f"{call}.json"]
    done = run_command(command, ENVIRONMENT)
    result = Path(scratch) / f"{call}.json"
    measured = json.loads(result.read_text()) if result.exists() else {"completed": 0, "total_output_tokens": 0}
    served, tokens = measured["completed"], measured["total_output_tokens"]
    if done.returncode or served != PROMPTS or tokens != OUTPUT_TOKENS * PROMPTS:
        raise CallFailed(f"{served} of {PROMPTS} requests, {tokens} tokens: {(done.stderr or done.stdout)[-200:]}")
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
