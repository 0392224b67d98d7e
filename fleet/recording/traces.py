"""Traces: reads recorded requests from files. A prompt is described by its chain of blocks. Files may be compressed by gzip.

The format is recognised by the first line:

- *mooncake*: one request a line, `timestamp` (ms), `input_length`, `output_length` (tokens), and `hash_ids`, which has one id for each
  block of 512 tokens (the last block may be partly filled). Equal prefixes have equal ids. The format comes from the paper "Mooncake" (FAST
  2025).
- *agentic*: one session a line; see `fleet.recording.agentic_traces`.
- *azure*: CSV of times and lengths; see `fleet.recording.azure_traces`.
- *records*: output of `fleet sim run --requests`, one request a line: `arrival` (ns), `prompt_tokens`, `max_tokens` or `output_tokens`,
  `session`, and with `--with-blocks` also `block_tokens` and `hash_ids`. The rows are in the order in which the requests ended, so all of
  them are held in memory and sorted.
- *access*: access records of a router (`fleet.recording.access_records`). Prompts share no blocks, because their content is not
  known. Requests that were refused are left out, and so are those whose prompt an external server has tokenized.
- *recording*: a recording of a router; see `fleet.recording.traffic`.

Rows are read one by one, so the memory that is needed does not grow with the file. There are two exceptions: rows that must be sorted, and
a recording in which later requests wait for the end of an earlier one.
"""

from collections.abc import Callable, Iterator
from itertools import chain as chained
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, Nanos
from fleet.recording.access_records import SCHEMA
from fleet.recording.agentic_traces import BLOCK_TOKENS, TraceSession, agentic_requests, agentic_sessions
from fleet.recording.azure_traces import ANSWER, PROMPT, TIME, azure_requests, is_header
from fleet.recording.trace_rows import (
    Count,
    RowSelection,
    Time,
    Tokens,
    TraceError,
    TraceLine,
    decode_object,
    decode_row,
    read_lines,
    read_rows,
)
from fleet.recording.traffic import recorded_block_tokens, recorded_requests
from kvstore.block import blocks_for
from kvstore.eviction.trace_replay import TraceRequest

LIVE_SESSIONS = 64
FIRST_UNSHARED_NAME = 1 << 62
"""The smallest name that this module gives to blocks of unknown content. All names in traces must be smaller numbers."""

ALL_ROWS = RowSelection()

Instant = Annotated[int, Meta(ge=0, lt=FIRST_UNSHARED_NAME)]


class TraceFile(Struct, frozen=True, kw_only=True):
    """A trace file whose first row was checked. Each call of its functions reads the file again, and may raise `TraceError`."""

    format: str  # "mooncake", "agentic", "azure", "records", "access" or "recording"
    block_tokens: int
    requests: Callable[[], Iterator[TraceRequest]]  # yields the requests in the order of their arrival
    sessions: Callable[[], Iterator[TraceSession]] | None  # yields the sessions; None if the format has no sessions
    # Returns the number of rows without decoding them: the number of requests, or for "access" at least this number. None if a row is
    # no request.
    count: Callable[[], int] | None


class Trace(Struct, frozen=True, kw_only=True):
    """All requests of a trace, in the order of their arrival."""

    format: str
    block_tokens: int
    requests: list[TraceRequest]


class _MooncakeRow(Struct, frozen=True):
    timestamp: Time
    input_length: Tokens
    output_length: Count
    hash_ids: tuple[Count, ...]


class _Record(Struct, frozen=True):
    arrival: Instant
    prompt_tokens: Tokens
    output_tokens: Count = 0
    max_tokens: Count = 0  # maximum number of answer tokens that the client asked for; 0: not recorded
    session: Count = 0
    block_tokens: Tokens | None = None
    hash_ids: tuple[Instant, ...] | None = None


class _AccessRow(Struct, frozen=True):
    arrival: Instant
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None
    session_id: str = ""


def read_trace(path: Path, *, live_sessions: int = LIVE_SESSIONS) -> Trace:
    """Return all requests of a file. In formats with sessions, `live_sessions` sessions run concurrently.

    Raises:
        TraceError: The file cannot be read, a row is malformed, or the rows of the format mooncake or azure are not in the
            order of arrival.
    """
    file = open_trace(path, live_sessions=live_sessions)
    return Trace(format=file.format, block_tokens=file.block_tokens, requests=list(file.requests()))


def open_trace(
    path: Path,
    *,
    live_sessions: int = LIVE_SESSIONS,
    cut: RowSelection = ALL_ROWS,
    sort: bool = False,
    block_tokens: int = BLOCK_TOKENS,
) -> TraceFile:
    """Open a trace and check its first row.

    Args:
        path: The file.
        live_sessions: Number of sessions that run concurrently; only for formats with sessions.
        cut: The rows to use. If its `begin` is above 0, and always for the formats azure and access, arrivals are times since the first row
            that is used.
        sort: True if rows may be in any order. Then all rows are held in memory.
        block_tokens: The block size for formats that do not state one.

    Raises:
        TraceError: The file cannot be read, its first row has no known format, or `cut` selects a part of a recording.
    """
    lines = read_lines(path)
    first = next(lines, None)
    del lines  # deleting the iterator closes the file
    if first is None:
        raise TraceError(f"{path}: is empty")
    if is_header(first[1]):
        return _of_requests(
            "azure",
            block_tokens,
            rows=lambda: read_rows(path, cut, header=1),
            read=lambda rows: azure_requests(path, first, rows, _UnsharedNames(block_tokens), ordered=not sort),
            sort=sort,
            from_first=sort or cut.begin > 0,
        )
    if not first[1].lstrip().startswith((b"{", b"[")):
        raise TraceError(
            f"{path}:{first[0]}: is not a JSON object, and not the header of a CSV trace, which names the columns"
            f" {TIME}, {PROMPT} and {ANSWER}"
        )
    keys = decode_object(path, *first)
    if "hash_ids" in keys and "arrival" not in keys:
        return _of_requests(
            "mooncake",
            BLOCK_TOKENS,
            rows=lambda: read_rows(path, cut),
            read=lambda rows: _mooncake(path, rows, ordered=not sort),
            sort=sort,
            from_first=cut.begin > 0,
        )
    if "recording" in keys:
        return _of_recording(path, cut, block_tokens)
    if "requests" in keys:
        return TraceFile(
            format="agentic",
            block_tokens=BLOCK_TOKENS,
            requests=lambda: agentic_requests(path, read_rows(path, cut), live_sessions),
            sessions=lambda: agentic_sessions(path, read_rows(path, cut)),
            count=None,
        )
    if keys.get("schema") == SCHEMA:
        return _of_requests(
            "access",
            block_tokens,
            rows=lambda: read_rows(path, cut),
            read=lambda rows: _access_records(path, rows, block_tokens),
            sort=True,
            from_first=True,
        )
    if "arrival" in keys and "prompt_tokens" in keys:
        size = decode_row(path, *first, _Record).block_tokens or block_tokens
        return _of_requests(
            "records",
            size,
            rows=lambda: read_rows(path, cut),
            read=lambda rows: _records(path, rows, size),
            sort=True,
            from_first=cut.begin > 0,
        )
    raise TraceError(
        f"{path}:{first[0]}: has neither hash_ids (mooncake) nor requests (agentic), nor arrival (records of a simulation),"
        f" nor recording, and no column {TIME} (azure)"
    )


def _of_requests(
    format_: str,
    block_tokens: int,
    *,
    rows: Callable[[], Iterator[TraceLine]],
    read: Callable[[Iterator[TraceLine]], Iterator[TraceRequest]],
    sort: bool,
    from_first: bool,
) -> TraceFile:
    """Return a trace file in a format in which each row is one request."""

    def requests() -> Iterator[TraceRequest]:
        each = read(rows())
        ordered = iter(sorted(each, key=_arrival)) if sort else each
        yield from _from_first(ordered) if from_first else ordered

    return TraceFile(
        format=format_,
        block_tokens=block_tokens,
        requests=requests,
        sessions=None,
        count=lambda: sum(1 for _ in rows()),
    )


def _of_recording(path: Path, cut: RowSelection, block_tokens: int) -> TraceFile:
    if not cut.is_whole:
        raise TraceError(f"{path}: part and sample count rows, and the lines of a recording are events: select by time")
    size = recorded_block_tokens(path) or block_tokens
    return TraceFile(
        format="recording",
        block_tokens=size,
        requests=lambda: recorded_requests(path, size, _UnsharedNames(size)),
        sessions=None,
        count=None,
    )


def _arrival(request: TraceRequest) -> Nanos:
    return request.arrival


def _from_first(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    first = next(requests, None)
    if first is None:
        return
    for each in chained((first,), requests):
        arrival = Nanos(each.arrival - first.arrival)
        yield TraceRequest(arrival, each.prompt_tokens, each.chain, each.output_tokens, each.session)


class _UnsharedNames:
    """Makes names for blocks of prompts that share no blocks with other prompts."""

    def __init__(self, block_tokens: int):
        self._block_tokens = block_tokens
        self._next = FIRST_UNSHARED_NAME

    def __call__(self, tokens: int) -> tuple[int, ...]:
        first = self._next
        self._next += blocks_for(tokens, self._block_tokens)
        return tuple(range(first, self._next))


def _mooncake(path: Path, lines: Iterator[TraceLine], *, ordered: bool) -> Iterator[TraceRequest]:
    latest = 0.0
    for number, line in lines:
        row = decode_row(path, number, line, _MooncakeRow)
        if ordered and row.timestamp < latest:
            raise TraceError(f"{path}:{number}: timestamp: {row.timestamp:g} is before the row above")
        latest = row.timestamp
        _check_chain(path, number, row.hash_ids, row.input_length, BLOCK_TOKENS)
        yield TraceRequest(Nanos(round(row.timestamp * MILLISECOND)), row.input_length, row.hash_ids, row.output_length)


def _records(path: Path, lines: Iterator[TraceLine], block_tokens: int) -> Iterator[TraceRequest]:
    names = _UnsharedNames(block_tokens)
    for number, line in lines:
        row = decode_row(path, number, line, _Record)
        if row.hash_ids is None:
            chain = names(row.prompt_tokens)
        elif row.block_tokens == block_tokens:
            chain = row.hash_ids
            _check_chain(path, number, chain, row.prompt_tokens, block_tokens)
        else:
            raise TraceError(
                f"{path}:{number}: block_tokens: {row.block_tokens} is not {block_tokens}, as in the first row"
            )
        yield TraceRequest(
            Nanos(row.arrival), row.prompt_tokens, chain, row.max_tokens or row.output_tokens, row.session
        )


def _access_records(path: Path, lines: Iterator[TraceLine], block_tokens: int) -> Iterator[TraceRequest]:
    names = _UnsharedNames(block_tokens)
    sessions: dict[str, int] = {"": 0}
    for number, line in lines:
        row = decode_row(path, number, line, _AccessRow)
        if row.prompt_tokens:
            session = sessions.setdefault(row.session_id, len(sessions))
            yield TraceRequest(
                Nanos(row.arrival), row.prompt_tokens, names(row.prompt_tokens), row.output_tokens or 0, session
            )


def _check_chain(path: Path, number: int, chain: tuple[int, ...], tokens: int, block_tokens: int) -> None:
    if len(chain) > blocks_for(tokens, block_tokens):
        raise TraceError(f"{path}:{number}: hash_ids: {len(chain)} blocks are more than {tokens} tokens fill")
    if len(set(chain)) < len(chain):
        raise TraceError(f"{path}:{number}: hash_ids: an id occurs twice, so it cannot name a prefix")
