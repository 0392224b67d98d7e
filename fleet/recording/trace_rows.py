"""Rows of trace files: selects and decodes rows, and reports errors. Files may be compressed by gzip."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, BinaryIO, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from fleet.core.errors import split_validation_error

GZIP_MAGIC = b"\x1f\x8b"
# maximum value of a number in a row (tokens, ids, or times in milliseconds); a larger one is an error
LONGEST_NUMBER = 1 << 40
# Maximum number of tokens of a prompt, because the names of all its blocks are held in memory; a longer one is an error.
LONGEST_PROMPT = 1 << 24
LONGEST_LINE = 64 << 20  # a line with this number of bytes or more is an error

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=LONGEST_NUMBER)]
Tokens = Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)]
Time = Annotated[float, Meta(ge=0, le=LONGEST_NUMBER)]

TraceLine = tuple[int, bytes]
"""The number of a line, counted from 1, and the content of the line."""


UnsharedNames = Callable[[int], tuple[int, ...]]
"""A function that takes a number of tokens, and returns names for the blocks of these tokens. No other block has one of these names."""


class TraceError(Exception):
    """Error: the trace cannot be read. The message names the file, the line and the field."""


class RowSelection(Struct, frozen=True, kw_only=True):
    """Selects the rows of a file that are used. A row is a request, or a session in formats with sessions."""

    begin: float = 0.0  # beginning of the selected part, as a share of all rows from 0 to 1
    end: float = 1.0  # end of the selected part, as a share of all rows from 0 to 1
    sample: float = 1.0  # share of the rows in this part that is used; the rows are drawn at random
    seed: int = 0  # seed of the random choice of rows

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end, self.sample) == (0.0, 1.0, 1.0)


READ_ERRORS = (OSError, EOFError, zlib.error)
"""Exceptions that opening and reading a file may raise."""


def read_error_cause(error: Exception) -> str:
    """Return a text with the cause of an error (one of `READ_ERRORS`), without the name of the file."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def open_plain_or_gzip(path: Path) -> Iterator[BinaryIO]:
    """Open a file for a `with` block, and decompress it if it is gzip. Opening and reading may raise `READ_ERRORS`."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == GZIP_MAGIC
    with cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb") as stream:
        yield stream


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Yield all lines of a file that are not empty.

    Raises:
        TraceError: The file cannot be read, or can be read only once, such as a pipe; or a line is too long.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(f"{path}: is not a regular file, and a trace is read several times")
    try:
        with open_plain_or_gzip(path) as stream:
            for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), 1):
                if len(line) == LONGEST_LINE:
                    raise TraceError(f"{path}:{number}: is longer than {LONGEST_LINE} bytes")
                if line.strip():
                    yield number, line
    except READ_ERRORS as error:
        raise TraceError(f"{path}: {read_error_cause(error)}") from error


def read_rows(path: Path, cut: RowSelection, *, header: int = 0) -> Iterator[TraceLine]:
    """Return the selected rows. The first `header` lines are not rows.

    If only a part is selected, the whole file is read first, to count its rows.
    """
    lines = read_lines(path)
    for _ in range(header):
        next(lines, None)
    if cut.is_whole:
        return lines
    total = max(0, sum(1 for _ in read_lines(path)) - header)
    return _select(lines, cut, round(cut.begin * total), round(cut.end * total))


def _select(lines: Iterator[TraceLine], cut: RowSelection, first: int, end: int) -> Iterator[TraceLine]:
    chance = Random(cut.seed)
    for index, line in enumerate(lines):
        if index >= end:
            return
        # Draw a random number also for rows before `begin`, so that `begin` does not change which later rows are selected.
        drawn = chance.random() < cut.sample
        if index >= first and drawn:
            yield line


def decode_row(path: Path, number: int, line: bytes, as_type: type[T]) -> T:
    """Decode one row of JSON.

    Raises:
        TraceError: The row is not JSON, or a field is invalid.
    """
    try:
        return msgspec.json.decode(line, type=as_type)
    except msgspec.ValidationError as error:
        what, place = split_validation_error(error)
        field = place.removeprefix(".")
        raise TraceError(f"{path}:{number}: {field + ': ' if field else ''}{what}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: is not a JSON object: {error}") from error


def decode_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Decode the first row as a JSON object. The caller recognises the format by its fields.

    Raises:
        TraceError: The row is not a JSON object.
    """
    return decode_row(path, number, line, dict[str, Any])
