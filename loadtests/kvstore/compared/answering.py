"""Answers the questions that `process` asks a compared system.

The scripts of compared systems import this module under their own interpreters, so it needs only the standard library.
"""

import json
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

REPEATS = 20
CACHE_BYTES = 128 << 20  # more than the last-level cache of usual processors


def answer(commands: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer questions until standard input ends.

    Args:
        commands: Functions by name; each takes the other fields of the question and returns the fields of the answer.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a system may print to standard output, which must contain only answers
    for line in sys.stdin:
        question = json.loads(line)
        command = commands.get(question.pop("do"))
        try:
            found = command(**question) if command is not None else {"cannot": "has no such function"}
        except Exception as error:  # noqa: BLE001 - supervisor: an exception is the answer
            traceback.print_exc()
            found = {"cannot": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=out)


def untouched(size: int) -> mmap.mmap:
    """Return memory that was never written to."""
    return mmap.mmap(-1, size)


def best_of(act: Callable[[], object]) -> float:
    """Return the seconds of the fastest of `REPEATS` calls. Slower calls were mostly disturbed by other processes of the machine."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return min(times)


def empty_caches() -> None:
    """Empty the processor's caches, so that the next measurement does not find its data there."""
    _SCRATCH[:] = _ZEROS


_SCRATCH = bytearray(CACHE_BYTES)
_ZEROS = bytes(CACHE_BYTES)
