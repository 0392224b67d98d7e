"""Compared systems: other projects' routers, installed from PyPI into virtual environments; this project contains no part of them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from loadtests.environments import SystemDistribution
from loadtests.kvstore.nodes import free_port

BLOCK_TOKENS = 64  # tokens per block, for routers that need it
CommandOf = Callable[[Path, int, Sequence[str], str], Sequence[str]]
"""Function that returns the command that starts a router, from its interpreter, port, worker URLs and policy."""

SGLANG = SystemDistribution(name="sglang-router", version="0.3.2", steps=((("sglang-router==0.3.2",),),))
SMG = SystemDistribution(name="smg", version="1.13.0", steps=((("smg==1.13.0",),),))
VLLM = SystemDistribution(name="vllm-router", version="0.1.17", steps=((("vllm-router==0.1.17",),),))

DYNAMO = SystemDistribution(
    name="dynamo",
    version="1.6.1",
    steps=(
        (("ai-dynamo-runtime==1.6.1",),),
        (("--no-deps", "ai-dynamo==1.6.1"),),  # one of its requirements is a stub on PyPI that cannot be installed
        (
            (
                "aiohttp==3.14.5",
                "certifi==2026.10.18",
                "kubernetes==32.0.1",
                "msgspec==0.22.0",
                "prometheus-client==0.26.0",
                "pyzmq==27.3.0",
                "redis==8.1.0",
                "tqdm==4.70.1",
                "transformers==5.23.0",
                "zstandard==0.25.0",
            ),
        ),
    ),
)


def sglang_command(python: Path, port: int, workers: Sequence[str], policy: str) -> Sequence[str]:
    return [str(python), "-m", "sglang_router.launch_router", *_options(port, workers, policy)]


def smg_command(python: Path, port: int, workers: Sequence[str], policy: str) -> Sequence[str]:
    return [str(python.with_name("smg")), "launch", *_options(port, workers, policy)]


def vllm_command(python: Path, port: int, workers: Sequence[str], policy: str) -> Sequence[str]:
    return [str(python), "-m", "vllm_router.launch_router", *_options(port, workers, policy)]


def _options(port: int, workers: Sequence[str], policy: str) -> Sequence[str]:
    """Return the options that the routers of SGLang, SMG and vLLM share, because they have a common origin."""
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *workers),
        *("--policy", policy),
        *("--log-level", "error"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
    ]


def dynamo_environment(folder: Path) -> dict[str, str]:
    """Return environment variables for Dynamo: its parts find each other through files in a folder, and log only errors."""
    known = {"DYN_FILE_KV": str(folder / "dynamo-discovery"), "DYN_DISCOVERY_BACKEND": "file"}
    return {**known, "DYN_LOG": "error", "HF_HUB_OFFLINE": "1"}


def dynamo_command(python: Path, port: int, policy: str) -> Sequence[str]:
    """Return the command of Dynamo's frontend, with the fastest of its tokenizers."""
    command = [str(python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    return [*command, "--router-mode", policy, "--tokenizer", "fastokens"]


def dynamo_workers(python: Path, model_dir: Path, model: str, speed: float, workers: int, blocks: int) -> Sequence[str]:
    """Return the command that runs Dynamo's simulated engines in one process.

    Args:
        python: Interpreter of Dynamo's environment.
        model_dir: Folder with tokenizer and configuration.
        model: Model name for clients.
        speed: Factor by which engines are faster than 7 ms a token. The documented special value 0 does not work; use a large one.
        workers: Number of engines.
        blocks: Cache size of each engine in blocks; 0: Dynamo's default.
    """
    command = [str(python), "-m", "dynamo.mocker", "--model-path", str(model_dir), "--model-name", model]
    command += ["--num-workers", str(workers), "--speedup-ratio", str(speed)]
    command += ["--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "256"]
    return [*command, *(["--num-gpu-blocks-override", str(blocks)] if blocks else [])]


PEERS = (
    (SGLANG, sglang_command, "cache_aware"),
    (SMG, smg_command, "cache_aware"),
    (VLLM, vllm_command, "cache_aware"),
)
