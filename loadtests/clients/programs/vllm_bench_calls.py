"""Runs `vllm bench serve` against a server: python vllm_bench_calls.py URL MODEL MODEL_FOLDER SCRATCH, in vLLM's environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

from reporting import report

RUNS = {"completions": ("openai", "/completions"), "chats": ("openai-chat", "/chat/completions")}
PROMPTS = 6
OUTPUT_TOKENS = 8


def main(url: str, model: str, model_folder: str, scratch: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for call, (backend, endpoint) in RUNS.items():
        command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--backend", backend]
        command += ["--base-url", url, "--endpoint", endpoint, "--model", model, "--tokenizer", model_folder]
        command += ["--dataset-name", "random", "--num-prompts", str(PROMPTS), "--random-input-len", "32"]
        command += ["--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", scratch, "--result-filename", f"{call}.json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
        result = Path(scratch) / f"{call}.json"
        measured = json.loads(result.read_text()) if result.exists() else {"completed": 0, "total_output_tokens": 0}
        served, tokens = measured["completed"], measured["total_output_tokens"]
        ok = done.returncode == 0 and served == PROMPTS and tokens == OUTPUT_TOKENS * PROMPTS
        why = "" if ok else f"{served} of {PROMPTS} requests, {tokens} tokens: {(done.stderr or done.stdout)[-200:]}"
        report(call, ok=ok, why=why)


if __name__ == "__main__":
    main(*sys.argv[1:])
