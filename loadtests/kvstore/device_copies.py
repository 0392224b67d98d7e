"""Benchmark of block copies between an accelerator and pinned host memory: ``python -m loadtests.kvstore.device_copies --json FILE``.

It measures `workers.engines.vllm.blocks.block_memory.DeviceBlocks`, and as the raw limit one copy of the same number of bytes between
pinned memory and the device. All rows take turns in every round. "Busy" means that another thread keeps steps of some
milliseconds running on the engine's stream, as a loaded engine does. The store is not measured: the reader of the benchmark copies no bytes.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, cast

import torch

from kvstore.messages import Match
from workers.engines.vllm.blocks.block_memory import BlockReader, DeviceBlocks
from workers.engines.vllm.store_planner import BlockLoad

SHAPES = {
    "8B, 16 tokens": (32, 16, 16, 128),  # layers, K and V heads, tokens, elements: blocks of 2 MiB
    "70B in 8 ranks, 16 tokens": (80, 2, 16, 128),
    "8B, 64 tokens": (32, 16, 64, 128),
}
BLOCKS = 64  # number of blocks in one copy
POOL = 512  # number of blocks in the engine's KV cache
STEP = 4096  # the busy engine multiplies square matrices of this size


class NoStore:
    """Implements `BlockReader` without a store: it copies nothing, and says that every block has arrived."""

    def read(self, match: Match, indices: Sequence[int], destinations: Sequence[Any]) -> list[bool]:  # noqa: ARG002
        return [True] * len(indices)


class BusyEngine:
    """Keeps the default stream busy from a thread, two steps ahead as vLLM's asynchronous scheduling does."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.steps = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        torch.cuda.synchronize()

    def _run(self) -> None:
        one = torch.randn((STEP, STEP), device="cuda", dtype=torch.bfloat16)
        launched: list[Any] = []
        while not self._ended.is_set():
            for _ in range(25):
                torch.mm(one, one)
            launched.append(torch.cuda.current_stream().record_event())
            if len(launched) > 2:
                launched.pop(0).synchronize()
            self.steps += 1


def rows_of(shape: tuple[int, int, int, int], *, tokens_first: bool) -> dict[str, Callable[[], object]]:
    """Return functions to measure for blocks of this shape, by the name of the row. A call copies `BLOCKS` blocks and waits.

    Only the call "begin to save one block" does not wait: its time is the delay of an engine step that saves one block.
    """
    layers, heads, tokens, elements = shape
    kv = [torch.zeros((POOL, heads, tokens, elements), device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    if tokens_first:
        kv = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in kv]
    blocks = DeviceBlocks(kv)
    chosen = torch.randperm(POOL, generator=torch.Generator().manual_seed(1))[:BLOCKS].tolist()
    load = BlockLoad("r", cast(Match, None), 0, chosen)
    rows = blocks.host_rows(BLOCKS)
    source = blocks.source
    host = torch.ones((BLOCKS * blocks.block_bytes,), dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    own = torch.cuda.Stream()

    def raw(to: torch.Tensor, origin: torch.Tensor) -> None:
        with torch.cuda.stream(own):
            to.copy_(origin, non_blocking=True)
        own.synchronize()

    def deferred() -> None:
        blocks.copy_out(chosen, list(rows))()

    def begin() -> None:
        blocks.copy_out(chosen[:1], list(rows[:1]))

    def urgent() -> None:
        read = source(chosen)
        for index in range(BLOCKS):
            read(index)

    return {
        "raw limit, to the host": lambda: raw(host, device),
        "deferred save": deferred,
        "begin to save one block": begin,
        "urgent save": urgent,
        "raw limit, to the device": lambda: raw(device, host),
        "load": lambda: blocks.load(cast(BlockReader, NoStore()), load, blocks.fence()),
    }


def measure(rounds: int) -> list[dict[str, object]]:
    """Return one row for each shape, memory order, state of the engine, and kind of copy."""
    results: list[dict[str, object]] = []
    for name, shape in SHAPES.items():
        bytes_copied = BLOCKS * 2 * shape[0] * shape[1] * shape[2] * shape[3]
        for tokens_first in (False, True):
            measured = rows_of(shape, tokens_first=tokens_first)
            for busy in (False, True):
                times: dict[str, list[float]] = {row: [] for row in measured}
                engine = BusyEngine() if busy else None
                if engine is not None:
                    engine.__enter__()
                try:
                    while engine is not None and engine.steps < 3:
                        time.sleep(0.01)
                    for _ in range(rounds + 2):
                        for row, act in measured.items():
                            started = time.perf_counter()
                            act()
                            times[row].append(time.perf_counter() - started)
                finally:
                    if engine is not None:
                        engine.__exit__()
                for row, seconds in times.items():
                    median = statistics.median(seconds[2:])
                    size = bytes_copied // BLOCKS if row == "begin to save one block" else bytes_copied
                    results.append(
                        {
                            "shape": name,
                            "tokens_first": tokens_first,
                            "engine_busy": busy,
                            "row": row,
                            "ms": round(1e3 * median, 3),
                            "spread_ms": [round(1e3 * min(seconds[2:]), 3), round(1e3 * max(seconds[2:]), 3)],
                            "gb_per_second": round(size / median / 1e9, 2),
                        }
                    )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no accelerator: torch.cuda.is_available() is false.")
    rows = measure(options.rounds)
    for row in rows:
        order = "tokens first" if row["tokens_first"] else "heads first"
        state = "busy" if row["engine_busy"] else "idle"
        print(f"{row['shape']:26} {order:13} {state:5} {row['row']:26} {row['ms']:9} ms {row['gb_per_second']:7} GB/s")
    result = {"device": torch.cuda.get_device_name(), "torch": version("torch"), "rounds": options.rounds, "rows": rows}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
