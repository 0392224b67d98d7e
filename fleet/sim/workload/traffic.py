"""Traffic of a simulation, one request or session after the other: from a recorded trace, or drawn by a seed.

A drawn workload is a Poisson stream, or one with a rate that swings over a day or jumps in bursts, or with gaps more or less
regular than by chance (gamma); its prompts may begin with one of a few shared prefixes, the n-th of them 1/n as often as the
first (Zipf), as system prompts do; and its requests may be the turns of conversations, each of which begins with all that
was said before.
"""

from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate, chain, islice
from math import cos, inf, pi
from pathlib import Path
from random import Random
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.recording.trace_rows import LONGEST_PROMPT
from fleet.recording.traces import (
    LIVE_SESSIONS,
    RowSelection,
    TraceError,
    TraceFile,
    TraceSession,
    TraceTurn,
    open_trace,
)
from kvstore.block import blocks_for
from kvstore.eviction.trace_replay import TraceRequest

T = TypeVar("T")
NEVER_ENDS = 1e9  # seconds: the longest that can be named
Positive = Annotated[float, Meta(ge=1e-9, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class RecordedWorkload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Requests of a file, as `fleet.recording.traces` reads them. It is cut in the order of these fields."""

    file: Annotated[str, Meta(min_length=1, pattern=r"^[^\x00]+$")]
    """Relative to the scenario's file."""

    sort: bool = False
    """Whether rows may be in any order. All of them are then in memory; else it does not grow with the file."""

    part: tuple[Share, Share] = (0.0, 1.0)
    """Which of its rows: `[0, 0.5]` is the first half, to tune by, and `[0.5, 1]` the second, to report on. Rows are requests,
    or whole sessions where the format knows them."""

    sample: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of these rows that counts; which of them, the scenario's seed says."""

    from_seconds: Seconds = 0.0
    to_seconds: Positive = NEVER_ENDS
    """Of the recorded time: what arrived in between, counted from there."""

    requests: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """At most so many, from the start; 0: all."""

    speed: Positive = 1.0
    """Arrivals come so many times as fast as they were recorded; of sessions, what lies between turns passes as much faster."""

    live_sessions: Count = LIVE_SESSIONS
    """Kept running at a time where the format knows sessions, and clients send as it was recorded (`clients.kind = "open"`)."""

    def __post_init__(self) -> None:
        if not self.part[0] < self.part[1]:
            raise ValueError(f"part: nothing lies between {self.part[0]:g} and {self.part[1]:g}")
        if not self.from_seconds < self.to_seconds:
            raise ValueError(f"to_seconds: {self.to_seconds:g} is not after from_seconds, {self.from_seconds:g}")


class DrawnWorkload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="drawn"):
    """Requests by chance."""

    requests: Count = 10_000
    rate: Positive = 1.0
    """A second, on average."""

    arrivals: Literal["poisson", "even", "gamma", "day", "bursts"] = "poisson"
    """By chance; at equal distances; by chance with gaps that vary by `variation`; or by chance with a rate that swings between
    a quarter of the mean and 1.75 times it, or that is higher in bursts."""

    variation: Annotated[float, Meta(ge=1e-3, le=100)] = 2.0
    """gamma: standard deviation of a gap over its mean. 1 is poisson, more is burstier."""

    day_seconds: Positive = 86_400.0
    """day: of one swing."""

    burst_seconds: Positive = 10.0
    burst_every_seconds: Positive = 60.0
    burst_factor: Annotated[float, Meta(gt=1, le=1000)] = 5.0
    """bursts: how long one lasts, how often one begins, and how many times higher the rate is then than outside."""

    prompt_tokens: Count = 2048
    output_tokens: Count = 256
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Lengths lie evenly within so large a share of the mean, on both sides."""

    prefixes: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Shared beginnings."""

    prefix_tokens: Annotated[int, Meta(ge=0)] = 0
    """Of each; longer prompts go on by themselves."""

    turns: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Of a conversation, on average; with more than one, clients must be of kind `sessions`. `rate` still counts requests."""

    turn_tokens: Count = 256
    """What a turn after the first adds to all that was said before."""

    think_seconds: Seconds = 10.0
    """From an answer to the next turn, on average; by chance (exponential)."""

    def __post_init__(self) -> None:
        later = (self.turns - 1) * (self.turn_tokens + self.output_tokens) if self.turns > 1 else 0
        if (longest := self.prompt_tokens + later) > LONGEST_PROMPT:
            raise ValueError(f"prompt_tokens: {longest:,}, with all turns, are more than {LONGEST_PROMPT:,}")
        if self.arrivals == "bursts" and not self.burst_seconds < self.burst_every_seconds:
            raise ValueError(
                f"burst_seconds: {self.burst_seconds:g} is not less than burst_every_seconds, {self.burst_every_seconds:g}"
            )


Workload = RecordedWorkload | DrawnWorkload


def requests_of(workload: Workload, folder: Path, *, block_tokens: int, seed: int) -> Iterator[TraceRequest]:
    """In the order of their arrival.

    Args:
        workload: What they are.
        folder: That a trace's path is relative to.
        block_tokens: Of the engines; a trace may have its own, which must be equal.
        seed: Of what is drawn.

    Raises:
        ConfigurationRefused: The trace cannot be read, its blocks are of another size, or nothing is left of it; says file,
            line and field. A wrong row is refused when it is reached.
    """
    if isinstance(workload, DrawnWorkload):
        if workload.turns > 1:
            raise ConfigurationRefused(
                'workload.turns: conversations need clients that wait: clients.kind = "sessions"'
            )
        return _drawn(workload, block_tokens, Random(seed))
    file = _opened(workload, folder, block_tokens, seed)
    requests = _cut(file.requests(), workload)
    return _checked(islice(requests, workload.requests or None))


def sessions_of(workload: Workload, folder: Path, *, block_tokens: int, seed: int) -> Iterator[TraceSession]:
    """Requests that wait for each other's answers; for the arguments and what is raised, see `requests_of`."""
    if isinstance(workload, DrawnWorkload):
        return _conversations(workload, block_tokens, Random(seed))
    file = _opened(workload, folder, block_tokens, seed)
    if file.sessions is None:
        raise ConfigurationRefused(
            f"clients.kind: {workload.file} ({file.format}) knows no sessions; take open or closed"
        )
    if workload.from_seconds or workload.to_seconds < NEVER_ENDS:
        raise ConfigurationRefused(
            "workload.from_seconds: sessions that wait have no recorded time; cut by part or sample"
        )
    return _checked(_first_turns(_faster(file.sessions(), workload.speed), workload.requests))


def request_count(workload: Workload, folder: Path, *, seed: int) -> int | None:
    """Requests that a workload has, or a few more; None: nobody knows before all have been read."""
    if isinstance(workload, DrawnWorkload):
        return workload.requests
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
    """The first row is looked at now."""
    told = _refusing(rows)
    first = next(told, None)
    if first is None:
        raise ConfigurationRefused("workload: nothing is left of the trace: take a larger part, sample or window")
    return chain((first,), told)


def _refusing(rows: Iterator[T]) -> Iterator[T]:
    try:
        yield from rows
    except TraceError as error:
        raise ConfigurationRefused(f"workload.file: {error}") from error


def _cut(requests: Iterator[TraceRequest], workload: RecordedWorkload) -> Iterator[TraceRequest]:
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
    """So many requests of them; 0: all."""
    left = requests or inf
    for session in sessions:
        if left <= len(session.turns):
            yield TraceSession(session.turns[: int(left)], session.begins)
            return
        left -= len(session.turns)
        yield session


class _Prompts:
    """Lengths, and names of blocks, of what is drawn."""

    def __init__(self, workload: DrawnWorkload, block_tokens: int, chance: Random):
        self._workload = workload
        self._block_tokens = block_tokens
        self._chance = chance
        self._shared_blocks = workload.prefix_tokens // block_tokens
        self._weights = list(accumulate(1 / rank for rank in range(1, workload.prefixes + 1)))
        # Names of shared blocks are below all others.
        self._names = workload.prefixes * blocks_for(workload.prefix_tokens, block_tokens)

    def first(self) -> tuple[int, tuple[int, ...]]:
        """Tokens and blocks of a prompt that begins a conversation."""
        tokens = _length(self._workload.prompt_tokens, self._workload.spread, self._chance)
        blocks = blocks_for(tokens, self._block_tokens)
        common = min(blocks, self._shared_blocks) if self._workload.prefixes else 0
        prefix: tuple[int, ...] = ()
        if common:
            weights = self._weights
            prefix_number = bisect(weights, self._chance.random() * weights[-1], 0, len(weights) - 1)
            first = prefix_number * self._shared_blocks
            prefix = tuple(range(first, first + common))
        return tokens, prefix + self._new(blocks - common)

    def grown(self, tokens: int, names: tuple[int, ...], more: int) -> tuple[int, tuple[int, ...]]:
        """Of a prompt that goes on after another one."""
        kept = names[: tokens // self._block_tokens]
        tokens += more
        return tokens, kept + self._new(blocks_for(tokens, self._block_tokens) - len(kept))

    def answer(self) -> int:
        return _length(self._workload.output_tokens, self._workload.spread, self._chance)

    def _new(self, blocks: int) -> tuple[int, ...]:
        first = self._names
        self._names += blocks
        return tuple(range(first, self._names))


def _drawn(workload: DrawnWorkload, block_tokens: int, chance: Random) -> Iterator[TraceRequest]:
    prompts = _Prompts(workload, block_tokens, chance)
    now = 0.0
    for _ in range(workload.requests):
        now += _gap(workload, workload.rate, now, chance)
        tokens, names = prompts.first()
        yield TraceRequest(Nanos(round(now * SECOND)), tokens, names, prompts.answer())


def _conversations(workload: DrawnWorkload, block_tokens: int, chance: Random) -> Iterator[TraceSession]:
    prompts = _Prompts(workload, block_tokens, chance)
    now, left, number = 0.0, workload.requests, 0
    while left:
        number += 1
        now += _gap(workload, workload.rate / workload.turns, now, chance)
        count = min(left, _length(workload.turns, workload.spread, chance))
        left -= count
        tokens, names = prompts.first()
        answer = prompts.answer()
        turns = [TraceTurn(TraceRequest(Nanos(0), tokens, names, answer, number))]
        for index in range(1, count):
            added = _length(workload.turn_tokens, workload.spread, chance)
            tokens, names = prompts.grown(tokens, names, answer + added)
            answer = prompts.answer()
            gap = chance.expovariate(1 / workload.think_seconds) if workload.think_seconds else 0.0
            request = TraceRequest(Nanos(0), tokens, names, answer, number)
            turns.append(TraceTurn(request, (index - 1,), Nanos(round(gap * SECOND))))
        yield TraceSession(tuple(turns), Nanos(round(now * SECOND)))


def _gap(workload: DrawnWorkload, rate: float, now: float, chance: Random) -> float:
    """Seconds from now to the next arrival."""
    match workload.arrivals:
        case "even":
            return 1 / rate
        case "poisson":
            return chance.expovariate(rate)
        case "gamma":
            squared = workload.variation**2
            return chance.gammavariate(1 / squared, squared / rate)
        case "day" | "bursts":  # thinning: gaps of the highest rate, of which as many are left out as the rate is lower
            gap, highest = 0.0, _highest(workload, rate)
            while True:
                gap += chance.expovariate(highest)
                if chance.random() * highest < _rate(workload, rate, now + gap):
                    return gap


def _highest(workload: DrawnWorkload, rate: float) -> float:
    return 1.75 * rate if workload.arrivals == "day" else _outside(workload, rate) * workload.burst_factor


def _rate(workload: DrawnWorkload, rate: float, now: float) -> float:
    """At one instant, where it is `rate` on average."""
    if workload.arrivals == "day":
        return rate * (1 - 0.75 * cos(2 * pi * now / workload.day_seconds))
    bursting = now % workload.burst_every_seconds < workload.burst_seconds
    return _outside(workload, rate) * (workload.burst_factor if bursting else 1.0)


def _outside(workload: DrawnWorkload, rate: float) -> float:
    """The rate between bursts."""
    return rate / (1 + (workload.burst_factor - 1) * workload.burst_seconds / workload.burst_every_seconds)


def _length(mean: int, spread: float, chance: Random) -> int:
    return max(1, round(mean * (1 + spread * (2 * chance.random() - 1))))
