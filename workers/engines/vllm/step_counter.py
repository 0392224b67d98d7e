"""Step counter of a vLLM engine: memory that the connector beside its scheduler writes and the worker's process reads.

vLLM shows its clients only tokens, and a long prompt has none before its last chunk. Its scheduler plans each step
when the previous step's result has arrived (with asynchronous scheduling, the result of the step before that). So if
the number of planned steps stands still, the engine hangs somewhere: in the scheduler, in the model, or in a rank
that the others wait for.

The memory is a file in the folder of the engine's sockets, mapped by both processes. Writing needs no system call,
and reading needs no answer from a process that may hang.
"""

import mmap
from pathlib import Path

from fleet.core.clock import Nanos
from workers.ports import Pulse

WORD_BYTES = 8  # size of a word, which is written at once, so that a reader never gets half of it
WORDS = 2  # number of words: the count of steps, and the tokens of the latest step


def step_file(scratch: Path | str, engine: int) -> Path:
    """Return the counter file of one of a worker's engines (data parallelism), counted from 0."""
    return Path(scratch, f"steps-{engine}")


class StepCounter:
    """Writes the counter, beside vLLM's scheduler."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(WORDS * WORD_BYTES))
        self._words = _mapped(file)
        self._steps = 0
        self._before = 0

    def begin(self, tokens: int) -> None:
        """Record that a step with the given number of tokens begins.

        The previous step may still run, so the larger one of both numbers is written.
        """
        self._steps += 1
        self._words[1] = max(tokens, self._before)
        self._words[0] = self._steps
        self._before = tokens


class StepReader:
    """Reads the counter, in the worker's process."""

    def __init__(self, file: Path) -> None:
        """Map the file; raises OSError if there is no counter."""
        self._words = _mapped(file)

    def pulse(self, *, working: bool, novel: bool, fetch_limit: Nanos) -> Pulse:
        """Return the counts of steps and tokens as a `Pulse`, with the caller's knowledge of the engine's work."""
        return Pulse(steps=self._words[0], tokens=self._words[1], working=working, novel=novel, fetch_limit=fetch_limit)


def _mapped(file: Path) -> "memoryview[int]":
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), WORDS * WORD_BYTES)).cast("Q")
