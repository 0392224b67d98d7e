"""Client programs of other projects, each with pinned packages in an environment of its own."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from loadtests.clients.results import PROGRAM, CallOutcome, CallResult
from loadtests.environments import SystemDistribution, python_of

SECONDS = 900.0  # time limit for all calls of a program together
FOLDER = Path(__file__).parent
HEADER = "# All versions of the environment of {name}; made by `python -m loadtests.clients --lock --clients {name}`."


class ClientProgram(Struct, frozen=True, kw_only=True):
    """A client program: its packages, its script in the folder of this module, and the API of the server that the script calls."""

    distribution: SystemDistribution
    script: str
    api: Literal["http", "grpc", "kserve"] = "http"
    slow: bool = False  # True if installing takes more than two minutes, at least where pip has no CPU build of torch


def _constraints(name: str) -> Path:
    return FOLDER / "constraints" / f"{name}.txt"


def _pinned(name: str, version: str, *packages: str) -> SystemDistribution:
    return SystemDistribution(name=name, version=version, steps=((packages,),), constraints=_constraints(name))


CPU_TORCH = (("torch==2.13.0+cpu",), ("torch==2.13.0",))
"""Installation step for torch: the CPU build if pip finds one, otherwise the default build.

The step comes before the packages that depend on torch, because these would install its CUDA build.
"""

VLLM_BENCH_IMPORTS = (
    *("aiohttp", "apache-tvm-ffi==0.1.11", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi[standard]<0.137.0"),
    *("llguidance<1.8.0", "msgspec", "openai", "oss-harmony", "partial-json-parser", "pillow", "prometheus_client"),
    *("psutil", "py-cpuinfo", "pybase64", "pyzmq", "requests", "transformers<5.20.0"),
)
"""The packages that `vllm bench serve` imports besides torch, vLLM and xgrammar, at the versions that vLLM allows."""

PROGRAMS: Mapping[str, ClientProgram] = {
    "openai": ClientProgram(distribution=_pinned("openai", "3.52.0", "openai==3.52.0"), script="openai_calls.py"),
    "anthropic": ClientProgram(
        distribution=_pinned("anthropic", "2.11.0", "anthropic==2.11.0"), script="anthropic_calls.py"
    ),
    "langchain-openai": ClientProgram(
        # The package langchain contains the agent that the script uses.
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
        distribution=SystemDistribution(
            name="vllm-bench",
            version="0.32.0",
            # Most dependencies are left out: CUDA libraries and compilers of several GB, which the benchmark client never loads.
            steps=(CPU_TORCH, (("--no-deps", "vllm==0.32.0", "xgrammar==0.2.8"),), (VLLM_BENCH_IMPORTS,)),
            constraints=_constraints("vllm-bench"),
        ),
        script="vllm_bench_calls.py",
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
            steps=(CPU_TORCH, (("guidellm==0.8.1",),)),
            constraints=_constraints("guidellm"),
        ),
        script="guidellm_calls.py",
        slow=True,
    ),
    "aiperf": ClientProgram(
        distribution=_pinned("aiperf", "0.13.0", "aiperf==0.13.0"), script="aiperf_calls.py", slow=True
    ),
}
"""The client programs by name. Programs that install quickly come first."""


def run_program(
    name: str, address: str, model: str, model_folder: Path, cache: Path, scratch: Path
) -> list[CallResult]:
    """Run one program against a server, in an environment of its own.

    Args:
        name: A key of `PROGRAMS`.
        address: Address of the API that the program calls: for HTTP a base URL that ends in /v1, otherwise host:port.
        model: Name under which the server serves the model.
        model_folder: The model's files, for programs that count tokens.
        cache: Folder in which the environments of programs are kept.
        scratch: Folder for the program's own files.

    Raises:
        SystemUnavailable: The environment of the program cannot be made.
    """
    program = PROGRAMS[name]
    return run_script(python_of(program.distribution, cache), program.script, address, model, model_folder, scratch)


def run_script(
    python: Path, script: str, address: str, model: str, model_folder: Path, scratch: Path
) -> list[CallResult]:
    """Run the script of a program with an interpreter that has the program's packages; the rest is as in `run_program`."""
    scratch.mkdir(parents=True, exist_ok=True)
    command = [str(python), str(FOLDER / script), address, model, str(model_folder), str(scratch)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it may lead to Fleet
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=scratch, env=environment
        )
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace").rpartition("\n")[0]  # bytes despite `text=True`
        has_failed, why = True, f"no end within {SECONDS:.0f} s"
    else:
        output, has_failed, why = done.stdout, bool(done.returncode), done.stderr[-300:]
    lines = [line for line in output.splitlines() if line.startswith("{")]
    try:
        results = [msgspec.json.decode(line, type=CallResult) for line in lines]
    except msgspec.DecodeError as error:
        return [CallResult(call=PROGRAM, outcome=CallOutcome.FAILED, why=f"its output is no result: {error}")]
    if has_failed or not results:
        results.append(CallResult(call=PROGRAM, outcome=CallOutcome.FAILED, why=why))
    return results


def lock_program(name: str, cache: Path) -> Path:
    """Write the constraints of one program: the versions that pip finds today for its packages; return the file.

    Args:
        name: A key of `PROGRAMS`.
        cache: Folder in which the environment is made, and deleted again.

    Raises:
        SystemUnavailable: The environment cannot be made.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        python = python_of(structs.replace(PROGRAMS[name].distribution, constraints=None), Path(folder))
        listing = [str(python), "-m", "pip", "list", "--format=freeze", "--exclude", "pip"]
        done = subprocess.run(listing, capture_output=True, text=True, check=True)
    # The local part of a version, such as +cpu, is cut off, because not every machine has such a build. pip then installs
    # another build of the same version.
    versions = [line.partition("+")[0] for line in done.stdout.splitlines()]
    file = _constraints(name)
    file.write_text("\n".join([HEADER.format(name=name), *versions, ""]))
    return file
