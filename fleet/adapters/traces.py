"""Recorded requests from files, as chains of blocks. Plain JSON lines, or the same compressed by gzip.

Two formats are told apart by their first row:

- *mooncake*: a request a line, `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`: one id for each
  512 tokens begun, equal ids for equal prefixes. From the paper "Mooncake" (FAST 2025).
- *agentic*: a session a line, in `requests` its requests and those of its sub-agents with `t` (seconds from the start),
  `in`, `out` (tokens) and `hash_delta`: how many ids are `keep`t from the request before, and which runs of new ones
  (`add`: first, count) follow. An id stands for `block_size` tokens and is known in its session only; ids are gathered
  into blocks of 512 tokens, the last one possibly partly filled. So many sessions are kept running at a time; when one
  has ended, the next begins.
"""

import gzip
import heapq
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from fleet.clock import MILLISECOND, SECOND, Nanos
from kvstore.block import blocks_for
from kvstore.replay import Request

BLOCK_TOKENS = 512
LIVE_SESSIONS = 64
GZIP_MAGIC = b"\x1f\x8b"
LONGEST_NUMBER = 1 << 40  # tokens, ids, milliseconds: beyond that, a row is nonsense

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=LONGEST_NUMBER)]
Time = Annotated[float, Meta(ge=0, le=LONGEST_NUMBER)]


class TraceRefused(Exception):
    """A trace cannot be read; the message names the file, the line and the field."""


class Trace(Struct, frozen=True, kw_only=True):
    """Requests in the order of their arrival."""

    format: str  # "mooncake" or "agentic"
    block_tokens: int
    requests: list[Request]


class _MooncakeRow(Struct, frozen=True):
    timestamp: Time
    input_length: Count
    output_length: Count
    hash_ids: tuple[Count, ...]


class _Delta(Struct, frozen=True):
    keep: Count
    add: tuple[tuple[Count, Count], ...] = ()


class _AgenticRequest(Struct, frozen=True, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    """A request; or a sub-agent, which has requests of its own."""

    t: Time
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    hash_delta: _Delta | None = None
    requests: "tuple[_AgenticRequest, ...] | None" = None


class _AgenticRow(Struct, frozen=True):
    block_size: Annotated[int, Meta(ge=1, le=BLOCK_TOKENS)]
    requests: Annotated[tuple[_AgenticRequest, ...], Meta(min_length=1)]


_Session = list[Request]
"""Of one session, arrivals counted from its first request."""


def read_trace(path: Path, *, live_sessions: int = LIVE_SESSIONS) -> Trace:
    """All requests of a file.

    Args:
        path: Of the file.
        live_sessions: Kept running at a time, where the format knows sessions.

    Raises:
        TraceRefused: It cannot be read, or a row is wrong.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise TraceRefused(f"{path}: is empty")
    number, text = first
    row = _decode(path, number, text, dict[str, Any])
    if "hash_ids" in row:
        return Trace(
            format="mooncake", block_tokens=BLOCK_TOKENS, requests=list(_mooncake(path, _chained(first, lines)))
        )
    if "requests" in row:
        sessions = _sessions(path, _chained(first, lines))
        return Trace(format="agentic", block_tokens=BLOCK_TOKENS, requests=list(_interleaved(sessions, live_sessions)))
    raise TraceRefused(f"{path}:{number}: has neither hash_ids (mooncake) nor requests (agentic)")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers from 1."""
    try:
        with path.open("rb") as file:
            is_compressed = file.read(2) == GZIP_MAGIC
        with gzip.open(path) if is_compressed else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceRefused(f"{path}: {reason}") from error


def _chained(first: tuple[int, bytes], rest: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    yield first
    yield from rest


def _decode(path: Path, number: int, line: bytes, as_type: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=as_type)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".")
        raise TraceRefused(f"{path}:{number}: {field + ': ' if field else ''}{what}") from error
    except msgspec.DecodeError as error:
        raise TraceRefused(f"{path}:{number}: is no JSON object: {error}") from error


def _mooncake(path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[Request]:
    latest = 0.0
    for number, line in lines:
        row = _decode(path, number, line, _MooncakeRow)
        if row.timestamp < latest:
            raise TraceRefused(f"{path}:{number}: timestamp: {row.timestamp:g} is before that of the row above")
        latest = row.timestamp
        if len(row.hash_ids) > blocks_for(row.input_length, BLOCK_TOKENS):
            raise TraceRefused(
                f"{path}:{number}: hash_ids: {len(row.hash_ids)} blocks are more than {row.input_length} tokens fill"
            )
        if len(set(row.hash_ids)) < len(row.hash_ids):
            raise TraceRefused(f"{path}:{number}: hash_ids: an id is there twice, so it cannot name a prefix")
        yield Request(Nanos(round(row.timestamp * MILLISECOND)), row.input_length, row.hash_ids, row.output_length)


def _sessions(path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[_Session]:
    for session, (number, line) in enumerate(lines, 1):
        row = _decode(path, number, line, _AgenticRow)
        if BLOCK_TOKENS % row.block_size:
            raise TraceRefused(f"{path}:{number}: block_size: {row.block_size} does not divide {BLOCK_TOKENS}")
        try:
            requests = sorted(_unfolded(row.requests, "requests", 0.0, session, row.block_size), key=_arrival)
        except ValueError as error:
            raise TraceRefused(f"{path}:{number}: {error}") from error
        if not requests:
            raise TraceRefused(f"{path}:{number}: requests: none of them has a hash_delta")
        yield requests


def _arrival(request: Request) -> Nanos:
    return request.arrival


def _unfolded(
    rows: tuple[_AgenticRequest, ...], field: str, start: float, session: int, block_size: int
) -> Iterator[Request]:
    """The requests of an agent and of its sub-agents.

    Raises:
        ValueError: A row is wrong; says in which field.
    """
    gathered = BLOCK_TOKENS // block_size
    scope = session << 48  # ids are below 2⁴⁰
    names: list[int] = []  # of the last request, one for each block_size tokens
    for index, row in enumerate(rows):
        if row.requests is not None:
            yield from _unfolded(row.requests, f"{field}[{index}].requests", start + row.t, session, block_size)
            continue
        delta = row.hash_delta
        if delta is None:
            raise ValueError(f"{field}[{index}].hash_delta: is missing")
        if delta.keep > len(names):
            raise ValueError(f"{field}[{index}].hash_delta.keep: {delta.keep} of {len(names)} ids")
        if delta.keep + sum(count for _, count in delta.add) > row.prompt_tokens // block_size:
            raise ValueError(f"{field}[{index}].hash_delta: more ids than {row.prompt_tokens} tokens fill")
        names = names[: delta.keep]
        for first, count in delta.add:
            names.extend(range(scope + first, scope + first + count))
        chain = names[gathered - 1 :: gathered]
        if len(names) % gathered:
            chain.append(names[-1])
        if len(set(chain)) < len(chain):
            raise ValueError(f"{field}[{index}].hash_delta: an id is there twice, so it cannot name a prefix")
        arrival = Nanos(round((start + row.t) * SECOND))
        yield Request(arrival, row.prompt_tokens, tuple(chain), row.output_tokens, session)


def _interleaved(sessions: Iterator[_Session], live: int) -> Iterator[Request]:
    """The requests of all sessions, so many of which run at a time."""
    upcoming: list[tuple[int, int, int, int, _Session]] = []  # arrival, session's number, index, begin, session

    def begin(now: int) -> None:
        session = next(sessions, None)
        if session is not None:
            first = session[0]
            heapq.heappush(upcoming, (now, first.session, 0, now - first.arrival, session))

    for _ in range(live):
        begin(0)
    while upcoming:
        now, number, index, began, session = heapq.heappop(upcoming)
        request = session[index]
        yield Request(Nanos(now), request.prompt_tokens, request.chain, request.output_tokens, number)
        if index + 1 < len(session):
            heapq.heappush(upcoming, (began + session[index + 1].arrival, number, index + 1, began, session))
        else:
            begin(now)
