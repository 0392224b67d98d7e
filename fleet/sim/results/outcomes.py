"""Results of a run: ended requests, their sums, samples of the timeline, and what `fleet sim run` prints."""

from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.sim.results.quantiles import Quantiles

Milliseconds = Annotated[float, Meta(gt=0, le=1e12)]

GPU = "gpu"
"""The tier that is the engines' own memory."""


class Slo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency targets that a request must keep to count as good. The defaults suit a chat."""

    ttft_ms: Milliseconds = 2000.0
    tpot_ms: Milliseconds = 50.0
    e2e_ms: Milliseconds | None = None
    """Target for the whole answer; None: there is none."""

    def __post_init__(self) -> None:
        if self.e2e_ms is not None and self.e2e_ms < self.ttft_ms:
            raise ValueError(
                f"e2e_ms: {self.e2e_ms:g} for a whole answer is less than ttft_ms, {self.ttft_ms:g}, for its start"
            )

    def kept_by(self, ended: "EndedRequest") -> bool:
        """Return whether an answered request is good."""
        return self.allows(ended.ttft_ms, ended.tpot_ms, ended.e2e_ms)

    def allows(self, ttft_ms: float, tpot_ms: float, e2e_ms: float) -> bool:
        """Return whether an answer with these times is good."""
        return ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms and (self.e2e_ms is None or e2e_ms <= self.e2e_ms)


class PoolSample(Struct, frozen=True, kw_only=True):
    """State of one pool at one instant."""

    name: str
    workers: int  # that are up
    running: int  # requests on them
    waiting: int  # requests among these that are not in a batch yet
    kv_share: float


class TimelineSample(Struct, frozen=True, kw_only=True):
    """State of the cluster at one instant."""

    seconds: float
    running: int  # requests on workers
    queued: int  # requests in the router
    kv_share: float  # share of all blocks that sequences hold
    finished: int  # requests that ended since the sample before
    pools: tuple[PoolSample, ...] = ()


class EndedRequest(Struct, frozen=True, kw_only=True):
    """One request that is over."""

    request_id: str
    arrival: Nanos
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_token: Nanos | None  # instant; None: rejected or given up before
    end: Nanos
    refused: str = ""  # reason of the rejection
    session: int = 0  # 0: unknown
    max_tokens: int = 0  # requested answer length
    retries: int = 0  # made by the client
    chain: tuple[int, ...] = ()  # names of the prompt's blocks
    tier_tokens: dict[str, int] | None = None  # cached tokens by the tier that had them; None: all on the GPU

    @property
    def ttft_ms(self) -> float:
        assert self.first_token is not None
        return (self.first_token - self.arrival) / MILLISECOND

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first one; 0 for an answer of one token."""
        assert self.first_token is not None
        return (self.end - self.first_token) / MILLISECOND / max(1, self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        return (self.end - self.arrival) / MILLISECOND


class RequestSums:
    """Sums over ended requests."""

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
        self._tier_tokens: dict[str, int] = {}  # without the GPUs' tier

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
        """Share of all prompt tokens that came from each tier; the shares add up to `hit_rate`."""
        tokens = {GPU: self.cached_tokens - sum(self._tier_tokens.values()), **self._tier_tokens}
        return {tier: count / self.prompt_tokens if self.prompt_tokens else 0.0 for tier, count in tokens.items()}


class PredictionQuality(Struct, frozen=True, kw_only=True):
    """Relative errors of the predictions for a pool, and the source of its prices."""

    basis: str = ""  # step times rest on measurements of this model, this GPU, or this engine
    ttft_error: float = 0.0  # median, on measurements that were not used to fit
    tpot_error: float = 0.0
    power_error: float = 0.0
    price: str = ""


class PoolOutcome(Struct, frozen=True, kw_only=True):
    """Results of one pool."""

    name: str
    role: str
    gpu: str
    gpus: int
    workers: int
    utilisation: float  # share of the time that was spent in steps
    imbalance: float  # the busiest worker divided by the mean
    computed_tokens: int  # of prompts
    generated_tokens: int
    gpu_hours: float
    cost: float
    energy_kwh: float
    joules_per_token: float  # computed or generated
    cost_per_million_tokens: float  # computed or generated
    quality: PredictionQuality


class RunOutcome(Struct, frozen=True, kw_only=True):
    """Output of `fleet sim run --json`. Times are in ms, rates per second of simulated time, money in dollars."""

    digest: str
    requests: int
    refused: dict[str, int]
    simulated_seconds: float
    cpu_seconds: float
    requests_per_cpu_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]  # gaps between tokens of all requests, without those around a handoff or a preemption
    e2e_ms: dict[str, float]
    goodput_rps: float
    attainment: float
    hit_rate: float
    hit_rate_by_tier: dict[str, float]  # the shares add up to `hit_rate`
    retries: int  # made by clients
    imbalance: float  # the busiest worker divided by the mean of its pool, by time in steps; of the worst pool
    utilisation: float  # share of the time that all workers spent in steps
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
