"""Client programs of other projects, each with pinned packages in an environment of its own."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from loadtests.clients.results import CallOutcome, CallResult
from loadtests.environments import SystemDistribution, python_of

SECONDS = 900.0  # for all calls of a program
FOLDER = Path(__file__).parent


class ProgramLine(Struct, frozen=True):
    """One line of a program's output."""

    call: str
    ok: bool
    why: str = ""


def _pinned(name: str, version: str, *packages: str) -> SystemDistribution:
    return SystemDistribution(name=name, version=version, steps=((packages,),))


PROGRAMS: Mapping[str, tuple[SystemDistribution, str]] = {
    "lm-eval": (
        _pinned("lm-eval", "0.4.13", "lm-eval[api]==0.4.13", "transformers==5.19.0", "jinja2==3.1.6"),
        "lm_eval_calls.py",
    ),
    "litellm": (_pinned("litellm", "1.110.2", "litellm==1.110.2"), "litellm_calls.py"),
    "langchain-openai": (_pinned("langchain-openai", "1.7.4", "langchain-openai==1.7.4"), "langchain_calls.py"),
    "instructor": (_pinned("instructor", "1.17.0", "instructor==1.17.0"), "instructor_calls.py"),
    "llama-index": (
        _pinned("llama-index", "0.8.1", "llama-index-llms-openai-like==0.8.1"),
        "llama_index_calls.py",
    ),
}
"""The packages of each program, and its script beside this file."""


def run_program(name: str, url: str, model: str, model_folder: Path, cache: Path, scratch: Path) -> list[CallResult]:
    """Run one program against a server.

    Raises:
        SystemUnavailable: Its environment cannot be made.
    """
    distribution, script = PROGRAMS[name]
    python = python_of(distribution, cache)
    scratch.mkdir(parents=True, exist_ok=True)
    command = [str(python), str(FOLDER / script), url, model, str(model_folder), str(scratch)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=scratch)
    except subprocess.TimeoutExpired:
        return [CallResult(call="all", outcome=CallOutcome.FAILED, why=f"no end within {SECONDS:.0f} s")]
    lines = [msgspec.json.decode(line, type=ProgramLine) for line in done.stdout.splitlines() if line.startswith("{")]
    results = [
        CallResult(call=line.call, outcome=CallOutcome.PASSED if line.ok else CallOutcome.FAILED, why=line.why)
        for line in lines
    ]
    if done.returncode:
        results.append(CallResult(call="program", outcome=CallOutcome.FAILED, why=done.stderr[-300:]))
    return results
