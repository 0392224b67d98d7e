"""Drawn workloads: makes requests and sessions by a seeded random generator.

Arrivals are a Poisson process, evenly spaced, or have gamma-distributed gaps. The rate of Poisson arrivals can also
vary over a day, rise in bursts, or follow stated phases. Phases can also change the lengths of requests. Prompts may
begin with one of a few shared prefixes, such as system prompts; the n-th prefix is used 1/n as often as the first one
(Zipf). Requests may be turns of conversations; each turn then begins with all earlier prompts and answers of its
conversation.
"""

from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate, islice
from math import cos, pi
from random import Random
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from fleet.core.clock import SECOND, Nanos
from fleet.recording.agentic_traces import TraceSession, TraceTurn
from fleet.recording.trace_rows import LONGEST_PROMPT
from kvstore.block import blocks_for
from kvstore.eviction.trace_replay import TraceRequest

Positive = Annotated[float, Meta(ge=1e-9, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]


class LoadPhase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A span of time with a constant rate of arrivals."""

    seconds: Positive
    rate: Annotated[float, Meta(ge=0, le=1e9)]
    """Requests per second; 0: no request arrives."""

    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    output_tokens: Annotated[int, Meta(ge=0)] = 0
    """Mean lengths of prompts and answers in this phase; 0: the mean lengths of the workload."""


class DrawnWorkload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="drawn"):
    """A workload that a seeded generator draws."""

    requests: Count = 10_000
    rate: Positive = 1.0
    """Mean number of requests per second; with `arrivals = "phases"`, the phases state the rates instead."""

    arrivals: Literal["poisson", "even", "gamma", "day", "bursts", "phases"] = "poisson"
    """Distribution of arrivals. `poisson`: at random; `even`: at equal distances; `gamma`: at random, with gaps that vary by
    `variation`; `day`: at random, with a rate that swings between a quarter of the mean and 1.75 times the mean; `bursts`: at
    random, with a higher rate in bursts; `phases`: at random, with the rates of `phases`."""

    variation: Annotated[float, Meta(ge=1e-3, le=100)] = 2.0
    """For `gamma`: standard deviation of a gap divided by its mean. 1 is the same as `poisson`; larger values mean more bursts."""

    day_seconds: Positive = 86_400.0
    """For `day`: length of one period of the rate."""

    burst_seconds: Positive = 10.0
    burst_every_seconds: Positive = 60.0
    burst_factor: Annotated[float, Meta(gt=1, le=1000)] = 5.0
    """For `bursts`: length of a burst, time between the starts of two bursts, and the rate in a burst divided by the
    rate outside of bursts."""

    phases: tuple[LoadPhase, ...] = ()
    """For `phases`: the phases in order. The workload ends with the last phase, or after `requests` requests."""

    prompt_tokens: Count = 2048
    output_tokens: Count = 256
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Variation of the lengths of prompts and answers and of the number of turns, as a share of the mean: with 0.5, each is drawn uniformly
    from 0.5 to 1.5 times the mean."""

    prefixes: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Number of different prefixes that prompts share; 0: there are no shared prefixes."""

    prefix_tokens: Annotated[int, Meta(ge=0)] = 0
    """Length of each shared prefix in tokens; a longer prompt continues with tokens of its own. Prompts share only full blocks."""

    turns: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Mean number of turns of a conversation. With more than one, clients must be of kind `sessions`. `rate` still counts
    requests, not sessions."""

    turn_tokens: Count = 256
    """Mean number of new tokens in each later turn, besides the earlier prompts and answers."""

    think_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 10.0
    """Mean time from an answer to the next turn; exponentially distributed."""

    def __post_init__(self) -> None:
        later = (self.turns - 1) * (self.turn_tokens + self.output_tokens) if self.turns > 1 else 0
        if (longest := self.prompt_tokens + later) > LONGEST_PROMPT:
            raise ValueError(f"prompt_tokens: {longest:,}, with all turns, are more than {LONGEST_PROMPT:,}")
        if (self.arrivals == "phases") != bool(self.phases):
            raise ValueError('phases: they are needed with `arrivals = "phases"`, and belong to no other arrivals')
        if self.phases and self.turns > 1:
            raise ValueError("phases: they have requests, and no conversations of several turns")
        if self.arrivals == "bursts" and not self.burst_seconds < self.burst_every_seconds:
            raise ValueError(
                f"burst_seconds: {self.burst_seconds:g} is not less than burst_every_seconds, {self.burst_every_seconds:g}"
            )


def drawn_requests(workload: DrawnWorkload, block_tokens: int, random: Random) -> Iterator[TraceRequest]:
    prompts = _Prompts(workload, block_tokens, random)
    if workload.phases:
        yield from islice(_phased(workload, prompts, random), workload.requests)
        return
    now = 0.0
    for _ in range(workload.requests):
        now += _gap(workload, workload.rate, now, random)
        tokens, names = prompts.first()
        yield TraceRequest(Nanos(round(now * SECOND)), tokens, names, prompts.answer())


def _phased(workload: DrawnWorkload, prompts: "_Prompts", random: Random) -> Iterator[TraceRequest]:
    began = 0.0
    for phase in workload.phases:
        now = began
        began += phase.seconds
        while phase.rate and (now := now + random.expovariate(phase.rate)) < began:
            tokens, names = prompts.first(phase.prompt_tokens)
            yield TraceRequest(Nanos(round(now * SECOND)), tokens, names, prompts.answer(phase.output_tokens))


def drawn_sessions(workload: DrawnWorkload, block_tokens: int, random: Random) -> Iterator[TraceSession]:
    if workload.phases:  # they have no conversations of several turns
        for number, request in enumerate(drawn_requests(workload, block_tokens, random), 1):
            turn = TraceTurn(structs.replace(request, arrival=Nanos(0), session=number))
            yield TraceSession((turn,), request.arrival)
        return
    prompts = _Prompts(workload, block_tokens, random)
    now, left, number = 0.0, workload.requests, 0
    while left:
        number += 1
        now += _gap(workload, workload.rate / workload.turns, now, random)
        count = min(left, _length(workload.turns, workload.spread, random))
        left -= count
        tokens, names = prompts.first()
        answer = prompts.answer()
        turns = [TraceTurn(TraceRequest(Nanos(0), tokens, names, answer, number))]
        for index in range(1, count):
            added = _length(workload.turn_tokens, workload.spread, random)
            tokens, names = prompts.grown(tokens, names, answer + added)
            answer = prompts.answer()
            gap = random.expovariate(1 / workload.think_seconds) if workload.think_seconds else 0.0
            request = TraceRequest(Nanos(0), tokens, names, answer, number)
            turns.append(TraceTurn(request, (index - 1,), Nanos(round(gap * SECOND))))
        yield TraceSession(tuple(turns), Nanos(round(now * SECOND)))


class _Prompts:
    """Draws the lengths and the block names of prompts."""

    def __init__(self, workload: DrawnWorkload, block_tokens: int, random: Random):
        self._workload = workload
        self._block_tokens = block_tokens
        self._random = random
        self._shared_blocks = workload.prefix_tokens // block_tokens
        self._weights = list(accumulate(1 / rank for rank in range(1, workload.prefixes + 1)))
        # The name of the next new block. Blocks of shared prefixes have the smaller numbers as their names.
        self._names = workload.prefixes * blocks_for(workload.prefix_tokens, block_tokens)

    def first(self, mean: int = 0) -> tuple[int, tuple[int, ...]]:
        """Return the number of tokens and the block names of a conversation's first prompt.

        The mean length is `mean`, or that of the workload if `mean` is 0.
        """
        tokens = _length(mean or self._workload.prompt_tokens, self._workload.spread, self._random)
        blocks = blocks_for(tokens, self._block_tokens)
        common = min(blocks, self._shared_blocks) if self._workload.prefixes else 0
        prefix: tuple[int, ...] = ()
        if common:
            weights = self._weights
            prefix_number = bisect(weights, self._random.random() * weights[-1], 0, len(weights) - 1)
            first = prefix_number * self._shared_blocks
            prefix = tuple(range(first, first + common))
        return tokens, prefix + self._new(blocks - common)

    def grown(self, tokens: int, names: tuple[int, ...], more: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of tokens and the block names of a prompt that continues an earlier one with `more` tokens.

        `tokens` and `names` belong to the earlier prompt.
        """
        kept = names[: tokens // self._block_tokens]
        tokens += more
        return tokens, kept + self._new(blocks_for(tokens, self._block_tokens) - len(kept))

    def answer(self, mean: int = 0) -> int:
        return _length(mean or self._workload.output_tokens, self._workload.spread, self._random)

    def _new(self, blocks: int) -> tuple[int, ...]:
        first = self._names
        self._names += blocks
        return tuple(range(first, self._names))


def _gap(workload: DrawnWorkload, rate: float, now: float, random: Random) -> float:
    """Return the seconds from now to the next arrival."""
    match workload.arrivals:
        case "even":
            return 1 / rate
        case "poisson" | "phases":
            return random.expovariate(rate)
        case "gamma":
            squared = workload.variation**2
            return random.gammavariate(1 / squared, squared / rate)
        # Thinning: draw arrivals at the highest rate, and drop some of them at random, so that the remaining ones have the present rate.
        case "day" | "bursts":
            gap, highest = 0.0, _highest(workload, rate)
            while True:
                gap += random.expovariate(highest)
                if random.random() * highest < _rate(workload, rate, now + gap):
                    return gap


def _highest(workload: DrawnWorkload, rate: float) -> float:
    return 1.75 * rate if workload.arrivals == "day" else _outside(workload, rate) * workload.burst_factor


def _rate(workload: DrawnWorkload, rate: float, now: float) -> float:
    """Return the rate of arrivals at one instant (`now`). `rate` is the mean over time."""
    if workload.arrivals == "day":
        return rate * (1 - 0.75 * cos(2 * pi * now / workload.day_seconds))
    bursting = now % workload.burst_every_seconds < workload.burst_seconds
    return _outside(workload, rate) * (workload.burst_factor if bursting else 1.0)


def _outside(workload: DrawnWorkload, rate: float) -> float:
    """Return the rate of arrivals between two bursts, in requests per second.

    `rate` is the mean over bursts and pauses together.
    """
    return rate / (1 + (workload.burst_factor - 1) * workload.burst_seconds / workload.burst_every_seconds)


def _length(mean: int, spread: float, random: Random) -> int:
    return max(1, round(mean * (1 + spread * (2 * random.random() - 1))))
