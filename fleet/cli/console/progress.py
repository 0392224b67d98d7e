"""How far a command is: a bar on the last line of a terminal, and nothing where there is none."""

import sys
from types import TracebackType
from typing import Self, TextIO

WIDTH = 24
ERASED = "\r\x1b[K"


class ProgressBar:
    """A context: its line is gone afterwards."""

    def __init__(self, total: int | None, file: TextIO | None = None):
        """A bar that is full with `total`; where that is not known, only the words."""
        self._total = total
        self._file = sys.stderr if file is None else file
        self.shown = self._file.isatty()

    def __call__(self, done: int, words: str) -> None:
        """So much of the total is done; what the words beside the bar say."""
        if self.shown:
            print(end=f"{ERASED}{self._bar(done)}{words}", file=self._file, flush=True)

    def line(self, words: str) -> None:
        """A line that stays, above the bar; with or without a terminal."""
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
