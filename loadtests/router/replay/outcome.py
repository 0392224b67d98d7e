"""What came of a replay: how much was found in caches, how evenly work was spread, and who got answers in time."""

from collections.abc import Sequence

from msgspec import Struct

from fleet.clock import SECOND, Nanos

PERCENTILE = 99


class Served(Struct, kw_only=True, gc=False):
    """One request that got an answer."""

    worker: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    arrived: Nanos
    first: Nanos
    ended: Nanos

    @property
    def ttft(self) -> float:
        return (self.first - self.arrived) / SECOND

    @property
    def tpot(self) -> float:
        """Seconds an output token after the first."""
        return (self.ended - self.first) / SECOND / max(1, self.output_tokens - 1)


class Goals(Struct, frozen=True, kw_only=True):
    """What an answer has to keep to be worth anything."""

    ttft_seconds: float
    """For the first token of a short prompt; each prompt token adds what computing it takes on an idle engine."""

    ttft_seconds_per_token: float
    tpot_seconds: float

    def kept(self, served: Served) -> bool:
        goal = self.ttft_seconds + self.ttft_seconds_per_token * served.prompt_tokens
        return served.ttft <= goal and served.tpot <= self.tpot_seconds


class Outcome(Struct, frozen=True, kw_only=True):
    """Of one policy on one workload."""

    requests: int
    refused: int
    goodput: float  # requests a second that kept their goals
    attainment: float  # share of requests that did
    hit_rate: float  # of prompt tokens
    imbalance: float  # requests of the busiest worker over the mean
    work_imbalance: float  # the same of prompt tokens computed
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    seconds: float  # from the first arrival to the last answer
    busy: float  # share of the time that engines worked


def outcome(served: Sequence[Served], refused: int, workers: int, goals: Goals, busy: Nanos) -> Outcome:
    """Of all requests of a replay.

    Args:
        served: At least one.
        refused: Requests that were not served.
        workers: How many there were, whether or not they had anything to do.
        goals: For goodput, over the time in which requests came: who does not keep up must not look as if fewer had come.
        busy: Of all engines together.
    """
    requests, computed = [0] * workers, [0] * workers
    for each in served:
        requests[each.worker] += 1
        computed[each.worker] += each.prompt_tokens - each.hit_tokens
    ttfts = sorted(each.ttft for each in served)
    kept = sum(map(goals.kept, served))
    first = min(each.arrived for each in served)
    seconds = (max(each.ended for each in served) - first) / SECOND
    arriving = (max(each.arrived for each in served) - first) / SECOND
    prompts = sum(each.prompt_tokens for each in served)
    return Outcome(
        requests=len(served) + refused,
        refused=refused,
        goodput=kept / arriving if arriving else 0.0,
        attainment=kept / (len(served) + refused),
        hit_rate=sum(each.hit_tokens for each in served) / prompts,
        imbalance=_over_mean(requests),
        work_imbalance=_over_mean(computed),
        ttft_mean=sum(ttfts) / len(ttfts),
        ttft_p50=ttfts[len(ttfts) // 2],
        ttft_p99=ttfts[len(ttfts) * PERCENTILE // 100],
        tpot_mean=sum(each.tpot for each in served) / len(served),
        seconds=seconds,
        busy=busy / SECOND / seconds / workers,
    )


def _over_mean(loads: Sequence[int]) -> float:
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
