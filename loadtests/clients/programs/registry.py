"""Client programs of other projects, each with pinned packages in an environment of its own."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from loadtests.clients.results import CallOutcome, CallResult
from loadtests.environments import SystemDistribution, SystemUnavailable, python_of
from workers.engines.vllm.launch import version as vllm_version

SECONDS = 900.0  # for all calls of a program
FOLDER = Path(__file__).parent


class ClientProgram(Struct, frozen=True, kw_only=True):
    """One program: its packages, and its script beside this file, which gets the address of one API of the server."""

    distribution: SystemDistribution  # without steps, the program runs in the environment of the command
    script: str
    api: Literal["http", "grpc", "kserve"] = "http"
    slow: bool = False  # its packages take longer than two minutes to install


class ProgramLine(Struct, frozen=True):
    """One line of a program's output."""

    call: str
    ok: bool
    why: str = ""


def _pinned(name: str, version: str, *packages: str) -> SystemDistribution:
    return SystemDistribution(name=name, version=version, steps=((packages,),))


PROGRAMS: Mapping[str, ClientProgram] = {
    "anthropic": ClientProgram(
        distribution=_pinned("anthropic", "2.11.0", "anthropic==2.11.0"), script="anthropic_calls.py"
    ),
    "langchain-openai": ClientProgram(
        # The package langchain has the agent.
        distribution=_pinned("langchain-openai", "1.7.4", "langchain-openai==1.7.4", "langchain==1.5.2"),
        script="langchain_calls.py",
    ),
    "llama-index": ClientProgram(
        distribution=_pinned("llama-index", "0.8.1", "llama-index-llms-openai-like==0.8.1"),
        script="llama_index_calls.py",
    ),
    "instructor": ClientProgram(
        distribution=_pinned("instructor", "1.17.0", "instructor==1.17.0"), script="instructor_calls.py"
    ),
    "litellm": ClientProgram(distribution=_pinned("litellm", "1.110.2", "litellm==1.110.2"), script="litellm_calls.py"),
    "tritonclient": ClientProgram(
        distribution=_pinned("tritonclient", "2.69.0", "tritonclient[grpc]==2.69.0"),
        script="triton_calls.py",
        api="kserve",
    ),
    "grpc-reflection": ClientProgram(
        distribution=_pinned("grpc-reflection", "1.85.1", "grpcio==1.85.1", "grpcio-reflection==1.85.1"),
        script="grpc_reflection_calls.py",
        api="grpc",
    ),
    "vllm-bench": ClientProgram(
        distribution=SystemDistribution(name="vllm", version=vllm_version(), steps=()), script="vllm_bench_calls.py"
    ),
    "lm-eval": ClientProgram(
        distribution=_pinned("lm-eval", "0.4.13", "lm-eval[api]==0.4.13", "transformers==5.19.0", "jinja2==3.1.6"),
        script="lm_eval_calls.py",
        slow=True,
    ),
    "litellm-proxy": ClientProgram(
        distribution=_pinned("litellm-proxy", "1.108.7", "litellm[proxy]==1.108.7"),
        script="litellm_proxy_calls.py",
        slow=True,
    ),
    "guidellm": ClientProgram(
        distribution=SystemDistribution(
            name="guidellm",
            version="0.8.1",
            # First torch, because guidellm alone would bring its CUDA build.
            steps=((("torch==2.13.0+cpu",), ("torch==2.13.0",)), (("guidellm==0.8.1",),)),
        ),
        script="guidellm_calls.py",
        slow=True,
    ),
    "aiperf": ClientProgram(
        distribution=_pinned("aiperf", "0.13.0", "aiperf==0.13.0"), script="aiperf_calls.py", slow=True
    ),
}
"""Programs by name, those that install quickly first."""


def run_program(
    name: str, address: str, model: str, model_folder: Path, cache: Path, scratch: Path
) -> list[CallResult]:
    """Run one program against a server.

    Args:
        name: A key of `PROGRAMS`.
        address: Of the program's API: a base URL that ends in /v1 for HTTP, otherwise host:port.
        model: Name under which the server serves the model.
        model_folder: The model's files, for programs that count tokens.
        cache: Where the environments of programs are kept.
        scratch: Folder for the program's own files.

    Raises:
        SystemUnavailable: Its environment cannot be made.
    """
    program = PROGRAMS[name]
    distribution = program.distribution
    if distribution.steps:
        python = python_of(distribution, cache)
    elif importlib.util.find_spec(distribution.name) is not None:
        python = Path(sys.executable)
    else:
        raise SystemUnavailable(f"{distribution.name} is not installed beside this Python")
    scratch.mkdir(parents=True, exist_ok=True)
    command = [str(python), str(FOLDER / program.script), address, model, str(model_folder), str(scratch)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=scratch)
    except subprocess.TimeoutExpired:
        return [CallResult(call="all", outcome=CallOutcome.FAILED, why=f"no end within {SECONDS:.0f} s")]
    lines = [msgspec.json.decode(line, type=ProgramLine) for line in done.stdout.splitlines() if line.startswith("{")]
    results = [
        CallResult(call=line.call, outcome=CallOutcome.PASSED if line.ok else CallOutcome.FAILED, why=line.why)
        for line in lines
    ]
    if done.returncode or not results:
        results.append(CallResult(call="program", outcome=CallOutcome.FAILED, why=done.stderr[-300:]))
    return results
