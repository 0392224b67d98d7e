"""Pull counts of a vLLM engine: how many blocks it has pulled from other engines, by the result of their check.

The scheduler's process writes the counts into a file in the folder of the engine's sockets, and the worker's process
reads them there. The step counter works in the same way (`workers.engines.vllm.step_counter`).
"""

from pathlib import Path

from fleet.core.work import PulledBlocks
from workers.engines.vllm.step_counter import WORD_BYTES, mapped_words

WORDS = 3  # numbers in the file: how many verified, corrupt and unverified blocks were pulled since the engine's start


def pull_file(scratch: Path | str, engine: int) -> Path:
    """Return the path of the count file of vLLM's engine number `engine`; without data parallelism the number is 0."""
    return Path(scratch, f"pulls-{engine}")


class PullCounter:
    """Writes the counts to the file; used in the process of vLLM's scheduler."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(WORDS * WORD_BYTES))
        self._words = mapped_words(file, WORDS)

    def add(self, counts: PulledBlocks) -> None:
        self._words[0] += counts.verified
        self._words[1] += counts.corrupt
        self._words[2] += counts.unverified


class PullReader:
    """Reads the counts from the file; used in the worker's process."""

    def __init__(self, file: Path) -> None:
        """Map the file; raise OSError if it does not exist."""
        self._words = mapped_words(file, WORDS)

    def counts(self) -> PulledBlocks:
        return PulledBlocks(verified=self._words[0], corrupt=self._words[1], unverified=self._words[2])
