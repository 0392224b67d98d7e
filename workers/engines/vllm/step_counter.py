"""Step counter of a vLLM engine: memory that the scheduler's process writes and the worker's process reads.

The worker sees only the tokens that vLLM generates, and a long prompt generates none before its last chunk. vLLM's
scheduler plans each step when the previous step's result has arrived (with asynchronous scheduling, the result of the
step before that). If the number of planned steps does not grow although there are requests, the engine hangs. The
scheduler may hang, the model, or a rank for which the other ranks wait.

The memory is a file in the folder of the engine's sockets, mapped by both processes. Writing needs no system call,
and reading needs no answer from a process that may hang.
"""

import mmap
from pathlib import Path

from fleet.core.clock import Nanos
from workers.ports import Pulse

WORD_BYTES = 8  # bytes of one number in the memory; a number is written in one operation, so no reader gets half of it
WORDS = 2  # the memory has two numbers: the count of steps, and the tokens of the latest step


def step_file(scratch: Path | str, engine: int) -> Path:
    """Return the path of the counter file of vLLM's engine number `engine`; without data parallelism the number is 0."""
    return Path(scratch, f"steps-{engine}")


class StepCounter:
    """Writes the counter to its file; used in the process of vLLM's scheduler."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(WORDS * WORD_BYTES))
        self._words = mapped_words(file, WORDS)
        self._steps = 0
        self._before = 0

    def begin(self, tokens: int) -> None:
        """Record that the scheduler plans a step with this number of tokens.

        The previous step may still run, so the larger number of tokens of these two steps is written.
        """
        self._steps += 1
        self._words[1] = max(tokens, self._before)
        self._words[0] = self._steps
        self._before = tokens


class StepReader:
    """Reads the counter from its file; used in the worker's process."""

    def __init__(self, file: Path) -> None:
        """Map the counter file; raise OSError if it does not exist."""
        self._words = mapped_words(file, WORDS)

    def pulse(self, *, working: bool, novel: bool, fetch_limit: Nanos) -> Pulse:
        """Return the two numbers as a `Pulse`, together with what the caller knows of the engine's requests."""
        return Pulse(steps=self._words[0], tokens=self._words[1], working=working, novel=novel, fetch_limit=fetch_limit)


def mapped_words(file: Path, words: int) -> "memoryview[int]":
    """Map a file of this many numbers into memory, which all processes that map it share."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), words * WORD_BYTES)).cast("Q")
