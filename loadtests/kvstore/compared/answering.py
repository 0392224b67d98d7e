"""The other end of `processes`: run by the scripts of the peers, under their interpreters, so only the standard library."""

import json
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

REPEATS = 20
CACHE_BYTES = 128 << 20  # more than the last level of any processor that this has met


def answer(commands: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer questions until standard input ends.

    Args:
        commands: By name; each takes the question's other fields and returns the fields of the answer.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # peers print to standard output, and so may their native code
    for line in sys.stdin:
        question = json.loads(line)
        command = commands.get(question.pop("do"))
        try:
            found = command(**question) if command is not None else {"cannot": "has no such function"}
        except Exception as error:  # noqa: BLE001 - supervisor: whatever a peer raises is its answer
            traceback.print_exc()
            found = {"cannot": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=out)


def untouched(size: int) -> mmap.mmap:
    """Memory that nobody has written to yet."""
    return mmap.mmap(-1, size)


def best_of(act: Callable[[], object]) -> float:
    """Seconds of the fastest of a few: of what takes microseconds, the rest is other people's work."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return min(times)


def empty_caches() -> None:
    """So that what is timed next does not find by chance in a cache what was prepared for it: blocks never come from there."""
    _SCRATCH[:] = _ZEROS


_SCRATCH = bytearray(CACHE_BYTES)
_ZEROS = bytes(CACHE_BYTES)
