"""What a run of the simulation showed, in memory that does not grow with it."""

from collections import defaultdict
from math import ceil, exp, log
from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos

Milliseconds = Annotated[float, Meta(gt=0, le=1e12)]

RESOLUTION = 0.005
"""Of quantiles: a value told lies within half a percent of the true one (logarithmic bins, as in DDSketch, VLDB 2019)."""

WIDTH = log((1 + RESOLUTION) / (1 - RESOLUTION))
"""Of a bin, in logarithms."""

ZERO = -(1 << 30)
"""The bin of values that have no logarithm."""

GPU = "gpu"
"""The tier that is the engines' own memory."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Quantiles:
    """A distribution of positive values, in bins as wide as they are high."""

    def __init__(self) -> None:
        self._bins: defaultdict[int, int] = defaultdict(int)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._bins[ceil(log(value) / WIDTH) if value > 0 else ZERO] += count
        self.total += value * count

    def take(self, other: "Quantiles") -> None:
        """All values of another one as well."""
        for index, count in other._bins.items():  # noqa: SLF001 - one of its own kind
            self._bins[index] += count
        self.total += other.total

    @property
    def count(self) -> int:
        """Of values."""
        return sum(self._bins.values())

    def quantile(self, share: float) -> float:
        """The value that so large a share is not above; 0 when there is none."""
        wanted = max(1, ceil(share * self.count))
        seen = 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= wanted:
                return self._value(index)
        return 0.0

    def curve(self) -> list[tuple[float, float]]:
        """The distribution function: values, and the share that is not above each."""
        points, seen, count = [], 0, self.count
        for index in sorted(self._bins):
            seen += self._bins[index]
            points.append((self._value(index), seen / count))
        return points

    def summary(self) -> dict[str, float]:
        """Mean and quantiles, rounded to what is known of them."""
        mean = self.total / self.count if self._bins else 0.0
        return {"mean": round(mean, 3), **{name: round(self.quantile(share), 3) for name, share in QUANTILES.items()}}

    def _value(self, index: int) -> float:
        return 0.0 if index == ZERO else exp(WIDTH * (index - 0.5))


class Slo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must keep to count as good: all of it. The defaults are those of chat."""

    ttft_ms: Milliseconds = 2000.0
    tpot_ms: Milliseconds = 50.0
    e2e_ms: Milliseconds | None = None
    """The whole answer; none: however long it takes."""

    def __post_init__(self) -> None:
        if self.e2e_ms is not None and self.e2e_ms < self.ttft_ms:
            raise ValueError(
                f"e2e_ms: {self.e2e_ms:g} for a whole answer is less than ttft_ms, {self.ttft_ms:g}, for its start"
            )

    def kept_by(self, ended: "EndedRequest") -> bool:
        """Whether a request that was answered is good."""
        return self.allows(ended.ttft_ms, ended.tpot_ms, ended.e2e_ms)

    def allows(self, ttft_ms: float, tpot_ms: float, e2e_ms: float) -> bool:
        """Whether an answer with these times is good."""
        return ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms and (self.e2e_ms is None or e2e_ms <= self.e2e_ms)


class PoolSample(Struct, frozen=True, kw_only=True):
    """One pool at one instant."""

    name: str
    workers: int  # that are up
    running: int  # requests on them
    waiting: int  # of these, not in a batch yet
    kv_share: float


class TimelineSample(Struct, frozen=True, kw_only=True):
    """One look at the cluster, taken at even distances."""

    seconds: float
    running: int  # requests on workers
    queued: int  # requests in the router
    kv_share: float  # of all blocks, held by sequences
    finished: int  # requests, since the look before
    pools: tuple[PoolSample, ...] = ()


class EndedRequest(Struct, frozen=True, kw_only=True):
    """One request, when it is over."""

    request_id: str
    arrival: Nanos
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_token: Nanos | None  # instant; None: refused or given up before
    end: Nanos
    refused: str = ""  # the reason
    session: int = 0  # 0: not known
    max_tokens: int = 0  # what the answer was to have
    retries: int = 0  # that its client made
    chain: tuple[int, ...] = ()  # names of the prompt's blocks
    tier_tokens: dict[str, int] | None = None  # of the cached ones, by the tier that had them; None: all on the GPU

    @property
    def ttft_ms(self) -> float:
        assert self.first_token is not None
        return (self.first_token - self.arrival) / MILLISECOND

    @property
    def tpot_ms(self) -> float:
        """Mean time of the tokens after the first; 0 for an answer of one token."""
        assert self.first_token is not None
        return (self.end - self.first_token) / MILLISECOND / max(1, self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        return (self.end - self.arrival) / MILLISECOND


class RequestSums:
    """Sums over requests."""

    def __init__(self, slo: Slo):
        self._slo = slo
        self.ttft, self.tpot, self.e2e = Quantiles(), Quantiles(), Quantiles()
        self.requests = 0
        self.good = 0
        self.refused: dict[str, int] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.retries = 0
        self._tier_tokens: dict[str, int] = {}  # without the GPUs'

    def add(self, ended: EndedRequest) -> None:
        self.requests += 1
        self.retries += ended.retries
        if ended.refused or ended.first_token is None:
            self.refused[ended.refused] = self.refused.get(ended.refused, 0) + 1
            return
        ttft, tpot, e2e = ended.ttft_ms, ended.tpot_ms, ended.e2e_ms
        self.ttft.add(ttft)
        if ended.output_tokens > 1:
            self.tpot.add(tpot)
        self.e2e.add(e2e)
        self.prompt_tokens += ended.prompt_tokens
        self.cached_tokens += ended.cached_tokens
        self.output_tokens += ended.output_tokens
        if ended.tier_tokens is not None:
            for tier, tokens in ended.tier_tokens.items():
                if tier != GPU:
                    self._tier_tokens[tier] = self._tier_tokens.get(tier, 0) + tokens
        self.good += self._slo.allows(ttft, tpot, e2e)

    @property
    def attainment(self) -> float:
        return self.good / self.requests if self.requests else 0.0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hit_rate_by_tier(self) -> dict[str, float]:
        """Share of all prompt tokens that each tier had; together they are `hit_rate`."""
        tokens = {GPU: self.cached_tokens - sum(self._tier_tokens.values()), **self._tier_tokens}
        return {tier: count / self.prompt_tokens if self.prompt_tokens else 0.0 for tier, count in tokens.items()}


class PredictionQuality(Struct, frozen=True, kw_only=True):
    """How far to trust what is said of a pool: relative errors, and where prices are from."""

    basis: str = ""  # whose measurements its step times rest on: of this model, this GPU, or this engine
    ttft_error: float = 0.0  # median, on measurements that were not used to fit
    tpot_error: float = 0.0
    power_error: float = 0.0
    price: str = ""


class PoolOutcome(Struct, frozen=True, kw_only=True):
    """What one pool did, and what it took."""

    name: str
    role: str
    gpu: str
    gpus: int
    workers: int
    utilisation: float  # time spent in steps
    imbalance: float  # the busiest worker over the mean
    computed_tokens: int  # of prompts
    generated_tokens: int
    gpu_hours: float
    cost: float
    energy_kwh: float
    joules_per_token: float  # computed or generated
    cost_per_million_tokens: float  # of the same
    quality: PredictionQuality


class RunOutcome(Struct, frozen=True, kw_only=True):
    """What `fleet sim run --json` prints. Times in ms, rates a second of simulated time, money in dollars."""

    digest: str
    requests: int
    refused: dict[str, int]
    simulated_seconds: float
    cpu_seconds: float
    requests_per_cpu_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]  # from one token to the next, of all; a hand-off or pre-emption in between is not in it
    e2e_ms: dict[str, float]
    goodput_rps: float
    attainment: float
    hit_rate: float
    hit_rate_by_tier: dict[str, float]  # together they are `hit_rate`
    retries: int  # that clients made
    imbalance: float  # the busiest worker of a pool over the mean of that pool, by time spent in steps; the worst pool
    utilisation: float  # time spent in steps, of all workers
    disaggregated: int  # requests that two workers served
    preempted: int
    moved_gb: float  # between workers
    gpu_hours: float
    cost: float
    cost_per_million_tokens: float  # of prompts and answers together
    energy_kwh: float
    joules_per_token: float  # generated
    pools: list[PoolOutcome] = []


def seconds(nanos: Nanos) -> float:
    return nanos / SECOND
