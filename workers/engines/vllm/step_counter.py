"""Step counter of a vLLM engine: memory that the connector beside its scheduler writes and the worker's process reads.

vLLM shows its clients tokens only, and a long prompt has none before its last chunk. Its scheduler plans each step in turn, the next
one when the result of the one before is there (with asynchronous scheduling, of the one before that). So a number of planned steps that
stands still is an engine that stands still, wherever it does: in the scheduler, in the model, or in a rank that the others wait for.

The memory is a file in the folder of the engine's sockets, mapped by both. Writing takes no call of the system, and whoever reads needs
no answer of a process that may give none.
"""

import mmap
from pathlib import Path

from workers.ports import Pulse

WORD_BYTES = 8  # is written at once, so that nobody reads half of it
WORDS = 2  # steps, and tokens of the latest one


def step_file(scratch: Path | str, engine: int) -> Path:
    """The number of one of the engines that share the requests of a worker (data parallelism), counted from 0."""
    return Path(scratch, f"steps-{engine}")


class StepCounter:
    """The writing end."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(WORDS * WORD_BYTES))
        self._words = _mapped(file)
        self._steps = 0
        self._before = 0

    def begin(self, tokens: int) -> None:
        """A step of so many tokens begins. The one before may still run, so the larger of both is told."""
        self._steps += 1
        self._words[1] = max(tokens, self._before)
        self._words[0] = self._steps
        self._before = tokens


class StepReader:
    """The reading end."""

    def __init__(self, file: Path) -> None:
        """Raises OSError where nobody counts."""
        self._words = _mapped(file)

    def pulse(self, *, working: bool, novel: bool) -> Pulse:
        """Return the counts of now, with those that only this process knows."""
        return Pulse(steps=self._words[0], tokens=self._words[1], working=working, novel=novel)


def _mapped(file: Path) -> "memoryview[int]":
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), WORDS * WORD_BYTES)).cast("Q")
