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

from fleet.errors import split_validation_error

GZIP_MAGIC = b"\x1f\x8b"
LONGEST_NUMBER = 1 << 40  # tokens, ids, milliseconds: beyond that, a row is nonsense
LONGEST_PROMPT = 1 << 24  # tokens; its blocks are named one by one, in memory
LONGEST_LINE = 64 << 20  # bytes

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=LONGEST_NUMBER)]
Tokens = Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)]
Time = Annotated[float, Meta(ge=0, le=LONGEST_NUMBER)]

Line = tuple[int, bytes]
"""Its number in the file, from 1, and what it says."""


Chain = Callable[[int], tuple[int, ...]]
"""Names that nobody else has, for the blocks of so many tokens."""


class TraceRefused(Exception):
    """A trace cannot be read; the message names the file, the line and the field."""


class Cut(Struct, frozen=True, kw_only=True):
    """The rows of a file that count. A row is a request, or a session where the format knows sessions."""

    begin: float = 0.0  # share of the rows that lie before
    end: float = 1.0  # share of the rows after which no more count
    sample: float = 1.0  # share of those in between, by chance
    seed: int = 0  # of that chance

    @property
    def is_whole(self) -> bool:
        return (self.begin, self.end, self.sample) == (0.0, 1.0, 1.0)


UNREADABLE = (OSError, EOFError, zlib.error)
"""What opening and reading raise."""


def why_unreadable(error: Exception) -> str:
    """In the words of a message that names the file."""
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """What is in a file, or what was compressed by gzip to it. Raises, and what it yields does, what is `UNREADABLE`."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == GZIP_MAGIC
    with cast(BinaryIO, gzip.open(path)) if is_compressed else path.open("rb") as stream:
        yield stream


def lines_of(path: Path) -> Iterator[Line]:
    """Lines that are not empty.

    Raises:
        TraceRefused: The file cannot be read, more than once too; or a line is too long.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceRefused(f"{path}: is no regular file, and a trace is read several times")
    try:
        with opened(path) as stream:
            for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), 1):
                if len(line) == LONGEST_LINE:
                    raise TraceRefused(f"{path}:{number}: is longer than {LONGEST_LINE} bytes")
                if line.strip():
                    yield number, line
    except UNREADABLE as error:
        raise TraceRefused(f"{path}: {why_unreadable(error)}") from error


def rows_of(path: Path, cut: Cut, *, header: int = 0) -> Iterator[Line]:
    """The rows that count.

    Args:
        path: Of the file.
        cut: Which; where it goes by shares, the file's lines are counted first.
        header: Lines at the start that are no rows.
    """
    lines = lines_of(path)
    for _ in range(header):
        next(lines, None)
    if cut.is_whole:
        return lines
    total = max(0, sum(1 for _ in lines_of(path)) - header)
    return _cut(lines, cut, round(cut.begin * total), round(cut.end * total))


def _cut(lines: Iterator[Line], cut: Cut, first: int, end: int) -> Iterator[Line]:
    chance = Random(cut.seed)
    for index, line in enumerate(lines):
        if index >= end:
            return
        drawn = chance.random() < cut.sample  # for each row, so that a row is in or out whatever comes before it
        if index >= first and drawn:
            yield line


def decoded(path: Path, number: int, line: bytes, as_type: type[T]) -> T:
    """One row of JSON.

    Raises:
        TraceRefused: It is none, or a field is wrong.
    """
    try:
        return msgspec.json.decode(line, type=as_type)
    except msgspec.ValidationError as error:
        what, place = split_validation_error(error)
        field = place.removeprefix(".")
        raise TraceRefused(f"{path}:{number}: {field + ': ' if field else ''}{what}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceRefused(f"{path}:{number}: is no JSON object: {error}") from error


def keys_of(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The first row, to tell formats apart."""
    return decoded(path, number, line, dict[str, Any])
