"""Agentic traces: reads recorded sessions of coding agents from files with one session a line.

The field `requests` contains the requests of the session's agent and of its sub-agents.

A request has `t` (seconds from the start of its agent), `in` and `out` (tokens), `api_time` (seconds until its answer ended) and
`hash_delta`. The prompt is described by ids: `hash_delta` has the number of ids to `keep` from the previous request of the same agent, and
runs of new ids to `add` (first id, number of ids). An id stands for `block_size` tokens, and has a meaning only within its session. Ids are
grouped into blocks of 512 tokens; the last block may be partly filled.

If a trace is read as requests, a fixed number of sessions runs concurrently, each at its recorded pace. When a session has ended, the next
one starts. If a trace is read as sessions, each turn waits for the answers for which it waited in the recording. These are the previous
answer to its own agent, and the last answers to those sub-agents that had ended before the turn. The first turn of a sub-agent waits for
the previous answer to the agent that started it. Between the last of these answers and the turn, as much time passes as in the recording,
because a tool or a person worked then.
"""

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import SECOND, Nanos
from fleet.recording.trace_rows import LONGEST_PROMPT, Count, Time, TraceError, TraceLine, decode_row
from kvstore.eviction.trace_replay import TraceRequest

BLOCK_TOKENS = 512


class TraceTurn(Struct, frozen=True):
    """One request of a session, and the earlier turns whose answers it waits for."""

    request: TraceRequest  # the request; its arrival is the time since the session's start
    after: tuple[int, ...] = ()  # indices of the turns for whose answers this turn waits
    # Time from the end of the last of these answers to this turn. If the turn waits for no answer, the time from the first turn.
    gap: Nanos = Nanos(0)


class TraceSession(Struct, frozen=True):
    """The turns of one session. A turn waits only for answers to turns before it in the tuple."""

    turns: tuple[TraceTurn, ...]
    begins: Nanos | None = None  # instant at which the session starts; None: it starts when another session has ended


class _Delta(Struct, frozen=True):
    keep: Count
    add: tuple[tuple[Count, Count], ...] = ()


class _Row(Struct, frozen=True, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    """One entry of a session in the file: a request, or a sub-agent with requests of its own."""

    t: Time
    prompt_tokens: Annotated[int, Meta(ge=0, le=LONGEST_PROMPT)] = 0
    output_tokens: Count = 0
    api_time: Time = 0.0
    hash_delta: _Delta | None = None
    requests: "tuple[_Row, ...] | None" = None


class _SessionRow(Struct, frozen=True):
    block_size: Annotated[int, Meta(ge=1, le=BLOCK_TOKENS)]
    requests: Annotated[tuple[_Row, ...], Meta(min_length=1)]


class _TimedRequest(Struct, frozen=True):
    """A request with the agent that sent it, and with the time at which its answer ended."""

    request: TraceRequest
    end: Nanos  # time at which the answer ended, since the session's start
    agent: int  # number of the agent that sent the request; 0 is the main agent
    parent: int  # number of the agent that started this agent; for the main agent its own number


def agentic_sessions(path: Path, lines: Iterator[TraceLine]) -> Iterator[TraceSession]:
    """Yield a session for each row.

    Raises:
        TraceError: A row is malformed, or the file cannot be read.
    """
    for recorded in _rows(path, lines):
        yield TraceSession(tuple(_turns(recorded)))


def agentic_requests(path: Path, lines: Iterator[TraceLine], live: int) -> Iterator[TraceRequest]:
    """Yield the requests of all sessions at their recorded pace. As long as enough sessions are left, `live` sessions run concurrently."""
    return _interleaved(_rows(path, lines), live)


def _rows(path: Path, lines: Iterator[TraceLine]) -> Iterator[list[_TimedRequest]]:
    for session, (number, line) in enumerate(lines, 1):
        row = decode_row(path, number, line, _SessionRow)
        if BLOCK_TOKENS % row.block_size:
            raise TraceError(f"{path}:{number}: block_size: {row.block_size} does not divide {BLOCK_TOKENS}")
        try:
            recorded = sorted(
                _SessionReader(session, row.block_size).of(row.requests, "requests", 0.0, 0), key=_arrival
            )
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        if not recorded:
            raise TraceError(f"{path}:{number}: requests: none of them has a hash_delta")
        yield recorded


def _arrival(recorded: _TimedRequest) -> Nanos:
    return recorded.request.arrival


class _SessionReader:
    """Reads the requests of one session: the requests of its agent and of all sub-agents."""

    def __init__(self, session: int, block_size: int):
        self._session = session
        self._block_size = block_size
        self._gathered = BLOCK_TOKENS // block_size
        self._agents = 0

    def of(self, rows: tuple[_Row, ...], field: str, start: float, parent: int) -> Iterator[_TimedRequest]:
        """Yield the requests of one agent and of its sub-agents.

        The agent started at `start` seconds. `field` is the path of its rows, for error messages.

        Raises:
            ValueError: A row is malformed; the message names the field.
        """
        agent = self._agents
        self._agents += 1
        # This number is added to all ids, which are below 2⁴⁸, so that ids of different sessions differ.
        scope = self._session << 48
        names: list[int] = []  # ids of the previous request, one for each `block_size` tokens
        for index, row in enumerate(rows):
            place = f"{field}[{index}]"
            if row.requests is not None:
                yield from self.of(row.requests, f"{place}.requests", start + row.t, agent)
                continue
            delta = row.hash_delta
            if delta is None:
                raise ValueError(f"{place}.hash_delta: is missing")
            if row.prompt_tokens < 1:
                raise ValueError(f"{place}.in: a prompt has at least one token")
            if delta.keep > len(names):
                raise ValueError(f"{place}.hash_delta.keep: {delta.keep} of {len(names)} ids")
            if delta.keep + sum(count for _, count in delta.add) > row.prompt_tokens // self._block_size:
                raise ValueError(f"{place}.hash_delta: more ids than {row.prompt_tokens} tokens fill")
            names = names[: delta.keep]
            for first, count in delta.add:
                names.extend(range(scope + first, scope + first + count))
            chain = names[self._gathered - 1 :: self._gathered]
            if len(names) % self._gathered:
                chain.append(names[-1])
            if len(set(chain)) < len(chain):
                raise ValueError(f"{place}.hash_delta: an id occurs twice, so it cannot name a prefix")
            arrival = Nanos(round((start + row.t) * SECOND))
            request = TraceRequest(arrival, row.prompt_tokens, tuple(chain), row.output_tokens, self._session)
            yield _TimedRequest(request, Nanos(arrival + round(row.api_time * SECOND)), agent, parent)


def _turns(recorded: list[_TimedRequest]) -> Iterator[TraceTurn]:
    """Yield the turns of a session. Each turn names the earlier turns for whose answers it waited in the recording."""
    final = {each.agent: index for index, each in enumerate(recorded)}
    latest: dict[int, int] = {}  # index of the latest turn of each agent
    # For each agent, the sub-agents that it has started. A sub-agent is removed when a turn of the agent waits for its last answer.
    started: dict[int, list[int]] = {}
    for index, each in enumerate(recorded):
        arrival, agent = each.request.arrival, each.agent
        waits = []
        if agent in latest:
            waits.append(latest[agent])
        elif agent != each.parent:
            started.setdefault(each.parent, []).append(agent)
            if each.parent in latest:
                waits.append(latest[each.parent])
        for child in list(started.get(agent, ())):
            if final[child] < index and recorded[final[child]].end <= arrival:
                waits.append(final[child])
                started[agent].remove(child)
        latest[agent] = index
        ready = max((recorded[turn].end for turn in waits), default=recorded[0].request.arrival)
        yield TraceTurn(each.request, tuple(waits), Nanos(max(0, arrival - ready)))


def _interleaved(sessions: Iterator[list[_TimedRequest]], live: int) -> Iterator[TraceRequest]:
    # Heap with an entry for each running session: (arrival of the next request, number of the session, index of the request, start of the
    # session, requests).
    upcoming: list[tuple[int, int, int, int, list[_TimedRequest]]] = []

    def begin(now: int) -> None:
        session = next(sessions, None)
        if session is not None:
            first = session[0].request
            heapq.heappush(upcoming, (now, first.session, 0, now - first.arrival, session))

    for _ in range(live):
        begin(0)
    while upcoming:
        now, number, index, began, session = heapq.heappop(upcoming)
        request = session[index].request
        yield TraceRequest(Nanos(now), request.prompt_tokens, request.chain, request.output_tokens, number)
        if index + 1 < len(session):
            heapq.heappush(upcoming, (began + session[index + 1].request.arrival, number, index + 1, began, session))
        else:
            begin(now)
