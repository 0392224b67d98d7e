"""Requests of a simulation, one after the other: from a recorded trace, or drawn by a seed.

A drawn workload is a Poisson stream (open loop), or one that rises and falls over a day; its prompts may begin with one of a
few shared prefixes, the n-th of them 1/n as often as the first (Zipf), as system prompts do.
"""

from collections.abc import Iterator
from math import cos, pi
from pathlib import Path
from random import Random
from typing import Annotated, Literal

from msgspec import Meta, Struct

from fleet.adapters.traces import TraceRefused, read_trace
from fleet.clock import SECOND, Nanos
from fleet.errors import ConfigurationRefused
from kvstore.block import blocks_for
from kvstore.replay import Request

Positive = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]


class Recorded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Requests of a file, as `fleet.adapters.traces` reads them."""

    file: Annotated[str, Meta(min_length=1)]
    """Mooncake or agentic, relative to the scenario's file."""

    speed: Positive = 1.0
    """Arrivals come so many times as fast as they were recorded."""

    requests: Annotated[int, Meta(ge=0)] = 0
    """At most so many, from the start; 0: all."""

    live_sessions: Count = 64
    """Kept running at a time, where the format knows sessions."""


class Drawn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="drawn"):
    """Requests by chance."""

    requests: Count = 10_000
    rate: Positive = 1.0
    """A second, on average."""

    arrivals: Literal["poisson", "even", "day"] = "poisson"
    """By chance, at equal distances, or by chance with a rate that swings between a quarter of the mean and 1.75 times it."""

    day_seconds: Positive = 86_400.0
    """Of one swing."""

    prompt_tokens: Count = 2048
    output_tokens: Count = 256
    spread: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Lengths lie evenly within so large a share of the mean, on both sides."""

    prefixes: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Shared beginnings."""

    prefix_tokens: Annotated[int, Meta(ge=0)] = 0
    """Of each; longer prompts go on by themselves."""


Workload = Recorded | Drawn


def requests_of(workload: Workload, folder: Path, *, block_tokens: int, seed: int) -> Iterator[Request]:
    """In the order of their arrival.

    Args:
        workload: What they are.
        folder: That a trace's path is relative to.
        block_tokens: Of the engines; a trace has its own, which must be equal.
        seed: Of what is drawn.

    Raises:
        ConfigurationRefused: The trace cannot be read, or its blocks are of another size; says file, line and field.
    """
    if isinstance(workload, Drawn):
        return _drawn(workload, block_tokens, Random(seed))
    try:
        trace = read_trace(folder / workload.file, live_sessions=workload.live_sessions)
    except TraceRefused as error:
        raise ConfigurationRefused(f"workload.file: {error}") from error
    if trace.block_tokens != block_tokens:
        raise ConfigurationRefused(
            f"engine.block_tokens: {block_tokens}, but blocks of {workload.file} are of {trace.block_tokens} tokens"
        )
    return _faster(trace.requests[: workload.requests or None], workload.speed)


def _faster(requests: list[Request], speed: float) -> Iterator[Request]:
    for request in requests:
        arrival = Nanos(round(request.arrival / speed))
        yield Request(arrival, request.prompt_tokens, request.chain, request.output_tokens, request.session)


def _drawn(workload: Drawn, block_tokens: int, chance: Random) -> Iterator[Request]:
    names = workload.prefixes * blocks_for(workload.prefix_tokens, block_tokens)  # of shared blocks: below all others
    weights = [1 / rank for rank in range(1, workload.prefixes + 1)]
    shared_blocks = workload.prefix_tokens // block_tokens
    now = 0.0
    for _ in range(workload.requests):
        now += _gap(workload, now, chance)
        prompt = _length(workload.prompt_tokens, workload.spread, chance)
        blocks = blocks_for(prompt, block_tokens)
        common = min(blocks, shared_blocks) if workload.prefixes else 0
        first = chance.choices(range(workload.prefixes), weights)[0] * shared_blocks if common else 0
        own = blocks - common
        chain = (*range(first, first + common), *range(names, names + own))
        names += own
        yield Request(
            Nanos(round(now * SECOND)), prompt, chain, _length(workload.output_tokens, workload.spread, chance)
        )


def _gap(workload: Drawn, now: float, chance: Random) -> float:
    match workload.arrivals:
        case "even":
            return 1 / workload.rate
        case "poisson":
            return chance.expovariate(workload.rate)
        case "day":  # thinning: gaps of the highest rate, of which as many are left out as the rate is lower
            gap, highest = 0.0, 1.75 * workload.rate
            while True:
                gap += chance.expovariate(highest)
                rate = workload.rate * (1 - 0.75 * cos(2 * pi * (now + gap) / workload.day_seconds))
                if chance.random() * highest < rate:
                    return gap


def _length(mean: int, spread: float, chance: Random) -> int:
    return max(1, round(mean * (1 + spread * (2 * chance.random() - 1))))
