"""Requests with the recorded lengths of Azure's conversations, which arrive at random."""

import csv
import gzip
from collections.abc import Sequence
from functools import cache
from random import Random

from fleet.core.clock import SECOND, Nanos
from kvstore.eviction.trace_replay import TraceRequest
from loadtests.studies.runs import FOLDER


@cache
def pairs() -> tuple[tuple[int, int], ...]:
    """Return the tokens of prompt and answer of each recorded request."""
    with gzip.open(FOLDER / "traces/azure2023_conv.csv.gz", "rt", encoding="utf-8") as file:
        return tuple((int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file))


def independent(requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Return requests whose prompt and answer lengths are drawn independently of each other, like in Splitwise's simulator."""
    chance = Random(seed)
    recorded = pairs()
    lengths = [(chance.choice(recorded)[0], chance.choice(recorded)[1]) for _ in range(requests)]
    return poisson(lengths, rate, chance)


def no_longer_than(most: int, requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Return requests whose lengths are recorded pairs; prompt and answer of each pair have together fewer than `most` tokens."""
    chance = Random(seed)
    fitting = [pair for pair in pairs() if sum(pair) < most]
    return poisson([chance.choice(fitting) for _ in range(requests)], rate, chance)


def poisson(lengths: Sequence[tuple[int, int]], rate: float, chance: Random) -> list[TraceRequest]:
    """Return requests of these lengths without common prefixes, which arrive as a Poisson process."""
    now, requests = 0.0, []
    for prompt, answer in lengths:
        now += chance.expovariate(rate)
        requests.append(TraceRequest(Nanos(round(now * SECOND)), prompt, (), max(1, answer)))
    return requests
