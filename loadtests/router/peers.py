"""Other projects' routers, installed from PyPI into virtual environments of their own; nothing of theirs is part of this project."""

from collections.abc import Callable, Sequence
from pathlib import Path

from loadtests.environments import Distribution
from loadtests.kvstore.nodes import free_port

CommandOf = Callable[[Path, int, Sequence[str], str], Sequence[str]]
"""From its interpreter, the port to listen at, the workers' URLs and the policy to what starts it."""

SGLANG = Distribution(name="sglang-router", version="0.3.2", steps=((("sglang-router==0.3.2",),),))
SMG = Distribution(name="smg", version="1.13.0", steps=((("smg==1.13.0",),),))
VLLM = Distribution(name="vllm-router", version="0.1.17", steps=((("vllm-router==0.1.17",),),))


def sglang_command(python: Path, port: int, workers: Sequence[str], policy: str) -> Sequence[str]:
    command = [str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *workers, "--policy", policy, "--log-level", "error"]
    return [*command, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]


def smg_command(python: Path, port: int, workers: Sequence[str], policy: str) -> Sequence[str]:
    command = [str(python.with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *workers, "--policy", policy, "--log-level", "error"]
    return [*command, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]


def vllm_command(python: Path, port: int, workers: Sequence[str], policy: str) -> Sequence[str]:
    command = [str(python), "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *workers, "--policy", policy, "--log-level", "error"]
    return [*command, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]


PEERS = (
    (SGLANG, sglang_command, "cache_aware"),
    (SMG, smg_command, "cache_aware"),
    (VLLM, vllm_command, "cache_aware"),
)
