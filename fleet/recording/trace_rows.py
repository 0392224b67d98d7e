"""Rows of a trace file, a line each, plain or compressed by gzip: which of them count, and the refusal of a wrong one."""

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
LONGEST_NUMBER = 1 << 40  # tokens, ids, milliseconds: beyond that, a row is nonsense
LONGEST_PROMPT = 1 << 24  # tokens; its blocks are named one by one, in memory
LONGEST_LINE = 64 << 20  # bytes

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=LONGEST_NUMBER)]
Tokens = Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)]
Time = Annotated[float, Meta(ge=0, le=LONGEST_NUMBER)]

TraceLine = tuple[int, bytes]
"""Its number in the file, from 1, and what it says."""


UnsharedNames = Callable[[int], tuple[int, ...]]
"""Names that nobody else has, for the blocks of so many tokens."""


class TraceError(Exception):
    """A trace cannot be read; the message names the file, the line and the field."""


class RowSelection(Struct, frozen=True, kw_only=True):
    """The rows of a file that count. A row is a request, or a session where the format knows sessions."""

    begin: float = 0.0  # share of the rows that lie before
    end: float = 1.0  # share of the rows after which no more count
    sample: float = 1.0  # share of those in between, by chance
    seed: int = 0  # of that chance

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end, self.sample) == (0.0, 1.0, 1.0)


READ_ERRORS = (OSError, EOFError, zlib.error)
"""What opening and reading raise."""


def read_error_cause(error: Exception) -> str:
    """In the words of a message that names the file."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def open_plain_or_gzip(path: Path) -> Iterator[BinaryIO]:
    """What is in a file, or what was compressed by gzip to it. Raises, and what it yields does, what is `READ_ERRORS`."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == GZIP_MAGIC
    with cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb") as stream:
        yield stream


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Lines that are not empty.

    Raises:
        TraceRefused: The file cannot be read, more than once too; or a line is too long.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(f"{path}: is no regular file, and a trace is read several times")
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
    """The rows that count.

    Args:
        path: Of the file.
        cut: Which; where it goes by shares, the file's lines are counted first.
        header: Lines at the start that are no rows.
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
        drawn = chance.random() < cut.sample  # for each row, so that a row is in or out whatever comes before it
        if index >= first and drawn:
            yield line


def decode_row(path: Path, number: int, line: bytes, as_type: type[T]) -> T:
    """One row of JSON.

    Raises:
        TraceRefused: It is none, or a field is wrong.
    """
    try:
        return msgspec.json.decode(line, type=as_type)
    except msgspec.ValidationError as error:
        what, place = split_validation_error(error)
        field = place.removeprefix(".")
        raise TraceError(f"{path}:{number}: {field + ': ' if field else ''}{what}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}:{number}: is no JSON object: {error}") from error


def decode_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The first row, to tell formats apart."""
    return decode_row(path, number, line, dict[str, Any])
