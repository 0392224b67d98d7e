"""Rows of trace files, plain or compressed by gzip: selection, decoding and errors."""

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
LONGEST_NUMBER = 1 << 40  # largest number of tokens, id, or time in milliseconds; larger values are errors
LONGEST_PROMPT = 1 << 24  # most tokens of a prompt, because all block names of a prompt are in memory
LONGEST_LINE = 64 << 20  # length of the longest line in bytes

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=LONGEST_NUMBER)]
Tokens = Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)]
Time = Annotated[float, Meta(ge=0, le=LONGEST_NUMBER)]

TraceLine = tuple[int, bytes]
"""Number of a line, counted from 1, and its content."""


UnsharedNames = Callable[[int], tuple[int, ...]]
"""A function that takes a number of tokens, and returns unique names for the blocks of these tokens."""


class TraceError(Exception):
    """The trace cannot be read; the message names the file, the line and the field."""


class RowSelection(Struct, frozen=True, kw_only=True):
    """Selection of a file's rows. A row is a request, or a session in formats with sessions."""

    begin: float = 0.0  # where the selection begins, as a share of all rows from 0 to 1
    end: float = 1.0  # where the selection ends, as a share of all rows from 0 to 1
    sample: float = 1.0  # share of the rows in between that is selected at random
    seed: int = 0  # seed of the random selection

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end, self.sample) == (0.0, 1.0, 1.0)


READ_ERRORS = (OSError, EOFError, zlib.error)
"""Exceptions that opening and reading a file may raise."""


def read_error_cause(error: Exception) -> str:
    """Return the cause of a read error as text; the caller's message names the file."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def open_plain_or_gzip(path: Path) -> Iterator[BinaryIO]:
    """Yield the content of a file, decompressed if it is gzip. The context and its stream raise `READ_ERRORS`."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == GZIP_MAGIC
    with cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb") as stream:
        yield stream


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Yield the lines that are not empty.

    Raises:
        TraceError: The file cannot be read repeatedly, or a line is too long.
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
    """Return the selected rows after `header` lines. Shares require counting the lines first."""
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
        drawn = chance.random() < cut.sample  # drawn for every row, so that the selected rows do not depend on `begin`
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
    """Decode the first row as a JSON object, by which formats are told apart.

    Raises:
        TraceError: The row is not a JSON object.
    """
    return decode_row(path, number, line, dict[str, Any])
