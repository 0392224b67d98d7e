"""Runs AIPerf against a server: python aiperf_calls.py URL MODEL MODEL_FOLDER SCRATCH, in AIPerf's environment.

AIPerf takes its tokenizer from the hub's cache only, so the model folder is put there under a name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from reporting import report

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
    environment = {**os.environ, "HF_HOME": str(Path(scratch) / "hub"), "HF_HUB_OFFLINE": "1"}
    for call, kind in CALLS.items():
        out = Path(scratch) / call
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model, "--ui", "none"]
        command += [
            "--url",
            url.removesuffix("/v1"),
            "--endpoint-type",
            kind,
            "--streaming",
            "--tokenizer",
            "fleet/tiny",
        ]
        command += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "32"]
        command += ["--output-tokens-mean", "8", "--artifact-dir", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
        profile = out / "profile_export_aiperf.json"
        served = json.loads(profile.read_text())["request_count"]["avg"] if profile.exists() else 0
        ok = done.returncode == 0 and served == REQUESTS
        why = "" if ok else f"{served} of {REQUESTS} requests: {(done.stderr or done.stdout)[-200:]}"
        report(call, ok=ok, why=why)


if __name__ == "__main__":
    main(*sys.argv[1:])
