"""Cost of handoff checksums: time to the first token of prompts that move from one vLLM engine to another by NIXL.

    python -m loadtests.kvstore.handoff_checksums [--rounds N] [--prompt-tokens N]

One pair of engines has checksums, the other has none. The pairs are measured in turn, round by round. Meanwhile the other pair
is stopped (SIGSTOP), because NIXL's progress threads use most of a core. The built-in model computes a prompt
much faster than real models, so checksums take a larger share of the time here than with real models. The checksums alone are measured
as well, on blocks of the same shape in this process.
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from msgspec import structs

from fleet.core.requests import Source
from fleet.core.roles import KvPath, Role
from fleet.local.tiny_model import build_tiny_model
from kvstore.block import blocks_for
from kvstore.buffers import crc32c, pieces
from tests.support.workers.engine_driver import blocks_from, fresh_prompt, run_disaggregated
from tests.support.workers.vllm_engines import VllmEngines, hosted, vllm_worker
from workers.settings import WorkerSettings

BLOCK_TOKENS = 32
LAYERS, LAYER_BYTES = 4, 32 << 10  # number of layers, and bytes per layer, of a block of the built-in model
SETUPS = ("on", "off")
WARM_UP_ROUNDS = 3


def pair_settings(model_dir: Path, checksums: str) -> list[WorkerSettings]:
    settings = []
    for role in (Role.PREFILL, Role.DECODE):
        worker = vllm_worker(model_dir, role=role, kv_paths=(KvPath.DIRECT,))
        settings.append(structs.replace(worker, vllm=structs.replace(worker.vllm, direct_checksums=checksums)))
    return settings


def engine_processes() -> list[psutil.Process]:
    """Return the processes of the engines in the order in which they were started."""
    cores = [each for each in multiprocessing.active_children() if each.name.startswith("EngineCore")]
    return sorted((psutil.Process(each.pid) for each in cores), key=lambda process: process.create_time())


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def first_token_seconds(engines: VllmEngines, pair: int, prompt_tokens: int) -> float:
    """Hand a prompt over within a pair of engines, and return the time until the first token of the decode engine."""
    prefill, decode = engines.engines[2 * pair : 2 * pair + 2]
    prompt = fresh_prompt(prompt_tokens)

    async def run() -> float:
        began = time.perf_counter()
        _, _, end = await run_disaggregated(prefill, decode, prompt, 1, KvPath.DIRECT, pass_first_token=False)
        elapsed = time.perf_counter() - began
        assert blocks_from(end.kv, Source.DIRECT) == blocks_for(prompt_tokens, BLOCK_TOKENS), end.kv
        return elapsed

    return engines.run(run())


def checksum_seconds(prompt_tokens: int) -> float:
    """Return the time to compute the checksums of a prompt's blocks once (median of 21 tries)."""
    blocks = blocks_for(prompt_tokens, BLOCK_TOKENS)
    layers = [np.full((4 * blocks, LAYER_BYTES), 7, dtype=np.uint8) for _ in range(LAYERS)]
    tries = []
    for _ in range(21):
        began = time.perf_counter()
        for block in range(blocks):
            crc32c(pieces([layer[block] for layer in layers]))
        tries.append(time.perf_counter() - began)
    return statistics.median(tries)


def measure(rounds: int, prompt_tokens: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {setup: [] for setup in SETUPS}
    with tempfile.TemporaryDirectory(prefix="checksums-") as folder:
        model_dir = build_tiny_model(Path(folder))
        settings = [each for setup in SETUPS for each in pair_settings(model_dir, setup)]
        with hosted(*settings) as engines:
            processes = engine_processes()
            for number in range(WARM_UP_ROUNDS + rounds):
                # The order alternates, so that neither pair always runs directly after it was stopped.
                for pair in (0, 1) if number % 2 else (1, 0):
                    with stopped(processes[:2] if pair else processes[2:]):
                        found = first_token_seconds(engines, pair, prompt_tokens)
                    if number >= WARM_UP_ROUNDS:
                        seconds[SETUPS[pair]].append(found)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m loadtests.kvstore.handoff_checksums", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    arguments = parser.parse_args()
    seconds = measure(arguments.rounds, arguments.prompt_tokens)
    both = 2 * checksum_seconds(arguments.prompt_tokens)
    medians = {setup: statistics.median(found) for setup, found in seconds.items()}
    differences = [on - off for on, off in zip(*(seconds[setup] for setup in SETUPS), strict=True)]
    print(
        json.dumps(
            {
                "prompt_tokens": arguments.prompt_tokens,
                "rounds": arguments.rounds,
                "load": round(os.getloadavg()[0], 1),
                "ttft_ms": {setup: round(1e3 * found, 1) for setup, found in medians.items()},
                "ttft_least_ms": {setup: round(1e3 * min(found), 1) for setup, found in seconds.items()},
                "difference_ms": round(1e3 * statistics.median(differences), 1),
                "checksums_of_both_sides_ms": round(1e3 * both, 2),
                "checksums_share_of_ttft": round(both / medians["off"], 4),
            }
        )
    )


if __name__ == "__main__":
    main()
