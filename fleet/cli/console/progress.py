"""Progress bar: shows the progress of a command in the last line of a terminal, and nothing without a terminal."""

import sys
from types import TracebackType
from typing import Self, TextIO

WIDTH = 24
ERASED = "\r\x1b[K"


class ProgressBar:
    """Shows a progress bar during a `with` block, and removes it at the end of the block."""

    def __init__(self, total: int | None, file: TextIO | None = None):
        """Create a bar that is full at `total` finished items. Without a total, only the words are shown."""
        self._total = total
        self._file = sys.stderr if file is None else file
        self.shown = self._file.isatty()

    def __call__(self, done: int, words: str) -> None:
        """Show the progress: the number of finished items, and words beside the bar."""
        if self.shown:
            print(end=f"{ERASED}{self._bar(done)}{words}", file=self._file, flush=True)

    def line(self, words: str) -> None:
        """Print a line above the bar, with or without a terminal."""
        print(f"{ERASED if self.shown else ''}{words}", file=self._file, flush=True)

    def _bar(self, done: int) -> str:
        if not self._total:
            return ""
        share = min(1.0, done / self._total)
        full = round(share * WIDTH)
        return f"{'█' * full}{'░' * (WIDTH - full)} {share:4.0%}  "

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            print(end=ERASED, file=self._file, flush=True)
