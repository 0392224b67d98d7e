"""Counted calls: counts the calls of Python functions, for tests that limit the work for a request or a token."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import fleet

OURS = f"{Path(fleet.__file__).parent}/"


class CountedCalls:
    """Holds the number of calls on one thread, by function."""

    def __init__(self) -> None:
        self.by_function: dict[CodeType, int] = {}

    @property
    def calls(self) -> int:
        return sum(self.by_function.values())

    @property
    def files(self) -> set[str]:
        """The files of the called functions, as paths in the folder `fleet`."""
        return {file_of(function) for function in self.by_function}


def file_of(function: CodeType) -> str:
    """Return the file of a function, as a path in the folder `fleet`."""
    return function.co_filename.removeprefix(OURS)


@contextmanager
def count_calls(folder: str = OURS) -> Iterator[CountedCalls]:
    """Count the calls of Python functions on this thread.

    Args:
        folder: Count only functions whose file path begins with this text; empty: count the functions of all libraries, too.
    """
    counted = CountedCalls()
    by_function = counted.by_function

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (function := frame.f_code).co_filename.startswith(folder):
            by_function[function] = by_function.get(function, 0) + 1

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield counted
    finally:
        sys.setprofile(before)
