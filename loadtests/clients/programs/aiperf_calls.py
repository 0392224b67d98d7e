"""Runs AIPerf against a server: python aiperf_calls.py URL MODEL MODEL_FOLDER SCRATCH, in AIPerf's environment.

AIPerf loads its tokenizer only from the Hugging Face cache. So the script links the model folder into a cache, as the
repository fleet/tiny.
"""

import json
import sys
from functools import partial
from pathlib import Path

from reporting import CallFailed, report_calls, run_command

REQUESTS = 4
CALLS = {"completions": "completions", "chats": "chat"}
REVISION = "0" * 40


def main(url: str, model: str, model_folder: str, scratch: str) -> None:
    cached = Path(scratch) / "hub" / "hub" / "models--fleet--tiny"
    for folder in ("refs", "snapshots"):
        (cached / folder).mkdir(parents=True, exist_ok=True)
    (cached / "refs" / "main").write_text(REVISION)
    if not (cached / "snapshots" / REVISION).exists():
        (cached / "snapshots" / REVISION).symlink_to(Path(model_folder).resolve())
    report_calls({call: partial(run, call, url, model, scratch) for call in CALLS})


def run(call: str, url: str, model: str, scratch: str) -> bool:
    """Run the benchmark for one kind of call, and return True if AIPerf reports that all requests succeeded.

    Raises:
        CallFailed: AIPerf reports another number of requests, or does not end in time.
    """
    out = Path(scratch) / call
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model, "--ui", "none"]
    command += ["--url", url.removesuffix("/v1"), "--endpoint-type", CALLS[call], "--streaming"]
    command += ["--tokenizer", "fleet/tiny"]
    command += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "32"]
    command += ["--output-tokens-mean", "8", "--artifact-dir", str(out)]
    done = run_command(command, {"HF_HOME": str(Path(scratch) / "hub"), "HF_HUB_OFFLINE": "1"})
    profile = out / "profile_export_aiperf.json"
    served = json.loads(profile.read_text())["request_count"]["avg"] if profile.exists() else 0
    if done.returncode or served != REQUESTS:
        raise CallFailed(f"{served} of {REQUESTS} requests: {(done.stderr or done.stdout)[-200:]}")
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
