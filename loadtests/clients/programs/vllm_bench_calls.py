"""Runs `vllm bench serve` against a server: python vllm_bench_calls.py URL MODEL MODEL_FOLDER SCRATCH, in vLLM's environment."""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from vllm.benchmarks import serve

RUNS = {"completions": ("openai", "/completions"), "chats": ("openai-chat", "/chat/completions")}
PROMPTS = 6


def main(url: str, model: str, model_folder: str, scratch: str) -> None:
    for call, (backend, endpoint) in RUNS.items():
        parser = argparse.ArgumentParser(allow_abbrev=False)
        serve.add_cli_args(parser)
        asked = ["--backend", backend, "--base-url", url, "--endpoint", endpoint, "--model", model]
        asked += ["--tokenizer", model_folder, "--dataset-name", "random", "--num-prompts", str(PROMPTS)]
        asked += ["--random-input-len", "32", "--random-output-len", "8", "--save-result", "--result-dir", scratch]
        asked += ["--result-filename", f"{call}.json", "--disable-tqdm", "--ignore-eos"]
        try:
            with open(os.devnull, "w") as quiet:  # noqa: PTH123 - not a file of ours
                out, sys.stdout = sys.stdout, quiet
                try:
                    serve.main(parser.parse_args(asked))
                finally:
                    sys.stdout = out
            measured = json.loads((Path(scratch) / f"{call}.json").read_text())
            ok = measured["completed"] == PROMPTS and measured["total_output_tokens"] == 8 * PROMPTS
            why = (
                "" if ok else f"{measured['completed']} of {PROMPTS} requests, {measured['total_output_tokens']} tokens"
            )
        except Exception as error:  # noqa: BLE001 - supervisor: the other call goes on
            ok, why = False, f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"call": call, "ok": ok, "why": why}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
