"""Traffic: yields the requests or sessions of a workload, one after the other.

A workload is either recorded (a trace file) or drawn by a seeded random generator (`fleet.sim.workload.drawn`).
"""

from collections.abc import Iterator
from itertools import chain, islice
from math import inf
from pathlib import Path
from random import Random
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.recording.agentic_traces import TraceSession
from fleet.recording.trace_rows import RowSelection, TraceError
from fleet.recording.traces import LIVE_SESSIONS, TraceFile, open_trace
from fleet.sim.workload.drawn import DrawnWorkload, drawn_requests, drawn_sessions
from kvstore.eviction.trace_replay import TraceRequest

T = TypeVar("T")
NEVER_ENDS = 1e9  # default of `to_seconds`: with this value, the recorded time is not limited
Positive = Annotated[float, Meta(ge=1e-9, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class RecordedWorkload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Requests of a trace file (`fleet.recording.traces`). The selections apply in the order of these fields."""

    file: Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]+$")]
    """Path of the trace, relative to the scenario's file."""

    sort: bool = False
    """True if the rows of the file are not sorted by time. All rows are then kept in memory; otherwise memory does not grow with
    the file."""

    part: tuple[Share, Share] = (0.0, 1.0)
    """Part of the rows: `[0, 0.5]` is the first half, for tuning, and `[0.5, 1]` the second half, for reported results.

    Rows are requests, or whole sessions if the format knows sessions.
    """

    sample: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the rows in `part` that is used; the scenario's seed selects the rows."""

    from_seconds: Seconds = 0.0
    to_seconds: Positive = NEVER_ENDS
    """Begin and end of the recorded time from which requests are used, in seconds. The begin is the instant 0 of the simulation."""

    requests: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """Maximum number of requests that are used, from the first one on; 0: all."""

    speed: Positive = 1.0
    """Factor by which arrivals are faster than recorded; gaps between the turns of sessions are divided by this factor, too."""

    live_sessions: Count = LIVE_SESSIONS
    """Number of sessions that run at the same time, if the format of the file knows sessions and clients are open
    (`clients.kind = "open"`). Such a file does not state when its sessions began."""

    def __post_init__(self) -> None:
        if not self.part[0] < self.part[1]:
            raise ValueError(f"part: nothing lies between {self.part[0]:g} and {self.part[1]:g}")
        if not self.from_seconds < self.to_seconds:
            raise ValueError(f"to_seconds: {self.to_seconds:g} is not after from_seconds, {self.from_seconds:g}")


Workload = RecordedWorkload | DrawnWorkload


def requests_of(workload: Workload, folder: Path, *, block_tokens: int, seed: int) -> Iterator[TraceRequest]:
    """Return the requests of a workload in the order of their arrival.

    Raises:
        ConfigurationRefused: The trace cannot be read, its block size differs from that of the engines, or the settings select none
            of its rows. Or a drawn workload has conversations. For an invalid row, the iterator raises this error when it reaches
            the row.
    """
    if isinstance(workload, DrawnWorkload):
        if workload.turns > 1:
            raise ConfigurationRefused(
                'workload.turns: conversations need clients that wait: clients.kind = "sessions"'
            )
        return drawn_requests(workload, block_tokens, Random(seed))
    file = _opened(workload, folder, block_tokens, seed)
    requests = _within(file.requests(), workload)
    return _checked(islice(requests, workload.requests or None))


def sessions_of(workload: Workload, folder: Path, *, block_tokens: int, seed: int) -> Iterator[TraceSession]:
    """Return the sessions of a workload.

    Raises:
        ConfigurationRefused: The trace cannot be used for a reason that `requests_of` names, or it has no sessions, or the settings
            select a span of recorded time.
    """
    if isinstance(workload, DrawnWorkload):
        return drawn_sessions(workload, block_tokens, Random(seed))
    file = _opened(workload, folder, block_tokens, seed)
    if file.sessions is None:
        raise ConfigurationRefused(
            f"clients.kind: {workload.file} ({file.format}) has no sessions; use open or closed clients"
        )
    if workload.from_seconds or workload.to_seconds < NEVER_ENDS:
        raise ConfigurationRefused(
            "workload.from_seconds: sessions that wait have no recorded time; select by part or sample"
        )
    return _checked(_first_turns(_faster(file.sessions(), workload.speed), workload.requests))


def request_count(workload: Workload, folder: Path, *, seed: int) -> int | None:
    """Return the number of requests of a workload. Requests outside of the selected time count too, so the number may be too large.

    If the number is unknown before all rows are read, return the maximum in the settings (`requests`), or None without a maximum.

    Raises:
        ConfigurationRefused: The trace cannot be read.
    """
    if isinstance(workload, DrawnWorkload):
        return None if workload.phases else workload.requests
    try:
        file = open_trace(folder / workload.file, cut=_rows(workload, seed))
        counted = None if file.count is None else file.count()
    except TraceError as error:
        raise ConfigurationRefused(f"workload.file: {error}") from error
    return min(counted, workload.requests or counted) if counted is not None else workload.requests or None


def _rows(workload: RecordedWorkload, seed: int) -> RowSelection:
    return RowSelection(begin=workload.part[0], end=workload.part[1], sample=workload.sample, seed=seed)


def _opened(workload: RecordedWorkload, folder: Path, block_tokens: int, seed: int) -> TraceFile:
    try:
        file = open_trace(
            folder / workload.file,
            live_sessions=workload.live_sessions,
            cut=_rows(workload, seed),
            sort=workload.sort,
            block_tokens=block_tokens,
        )
    except TraceError as error:
        raise ConfigurationRefused(f"workload.file: {error}") from error
    if file.block_tokens != block_tokens:
        raise ConfigurationRefused(
            f"engine.block_tokens: {block_tokens}, but blocks of {workload.file} are of {file.block_tokens} tokens"
        )
    return file


def _checked(rows: Iterator[T]) -> Iterator[T]:
    """Return the rows unchanged, but read the first row now. So an error in this row, or a lack of rows, is reported before the run."""
    read = _with_field(rows)
    first = next(read, None)
    if first is None:
        raise ConfigurationRefused("workload: nothing is left of the trace: take a larger part, sample or window")
    return chain((first,), read)


def _with_field(rows: Iterator[T]) -> Iterator[T]:
    """Yield the rows. If a row cannot be read, raise ConfigurationRefused with a message that begins with `workload.file`."""
    try:
        yield from rows
    except TraceError as error:
        raise ConfigurationRefused(f"workload.file: {error}") from error


def _within(requests: Iterator[TraceRequest], workload: RecordedWorkload) -> Iterator[TraceRequest]:
    """Yield the requests within the span of recorded time that the settings select, with gaps divided by the workload's speed."""
    begin = round(workload.from_seconds * SECOND)
    end = round(workload.to_seconds * SECOND) if workload.to_seconds < NEVER_ENDS else inf
    speed = workload.speed
    for each in requests:
        if each.arrival >= end:
            return
        if each.arrival >= begin:
            arrival = Nanos(round((each.arrival - begin) / speed))
            yield TraceRequest(arrival, each.prompt_tokens, each.chain, each.output_tokens, each.session)


def _faster(sessions: Iterator[TraceSession], speed: float) -> Iterator[TraceSession]:
    for session in sessions:
        turns = tuple([structs.replace(turn, gap=Nanos(round(turn.gap / speed))) for turn in session.turns])
        yield structs.replace(session, turns=turns)


def _first_turns(sessions: Iterator[TraceSession], requests: int) -> Iterator[TraceSession]:
    """Yield sessions until they contain `requests` requests together, and shorten the last one. If `requests` is 0, yield all."""
    left = requests or inf
    for session in sessions:
        if left <= len(session.turns):
            yield TraceSession(session.turns[: int(left)], session.begins)
            return
        left -= len(session.turns)
        yield session
