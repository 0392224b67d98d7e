"""Results of a run: ended requests, sums over them, samples of the timeline, and the output of `fleet sim run`."""

from typing import Annotated

from msgspec import Meta, Struct

from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.sim.results.quantiles import Quantiles

Milliseconds = Annotated[float, Meta(gt=0, le=1e12)]

GPU = "gpu"
"""Name under which cached tokens are counted that an engine had in its own GPU memory, and did not load from a store."""


class Slo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Latency targets that a request must keep to count as good. The defaults suit a chat."""

    ttft_ms: Milliseconds = 2000.0
    tpot_ms: Milliseconds = 50.0
    e2e_ms: Milliseconds | None = None
    """Target for the end-to-end latency; None: there is no such target."""

    def __post_init__(self) -> None:
        if self.e2e_ms is not None and self.e2e_ms < self.ttft_ms:
            raise ValueError(
                f"e2e_ms: {self.e2e_ms:g} for a whole answer is less than ttft_ms, {self.ttft_ms:g}, for its start"
            )

    def kept_by(self, ended: "EndedRequest") -> bool:
        """Return True if a request kept all targets. The request must have a first token."""
        return self.allows(ended.ttft_ms, ended.tpot_ms, ended.e2e_ms)

    def allows(self, ttft_ms: float, tpot_ms: float, e2e_ms: float) -> bool:
        """Return True if an answer with these latencies keeps all targets."""
        return ttft_ms <= self.ttft_ms and tpot_ms <= self.tpot_ms and (self.e2e_ms is None or e2e_ms <= self.e2e_ms)


class PoolSample(Struct, frozen=True, kw_only=True):
    """State of one pool at one instant: its workers, its requests, and the share of its KV blocks that is in use."""

    name: str
    workers: int  # workers that are up
    running: int  # requests on the workers of the pool
    waiting: int  # requests among `running` that wait in an engine for a place in its batch
    kv_share: float


class TimelineSample(Struct, frozen=True, kw_only=True):
    """State of the whole cluster at one instant: its requests, the share of its KV blocks that is in use, and its pools."""

    seconds: float
    running: int  # requests on workers
    queued: int  # requests that are on no worker: they wait in the router, or their messages are under way
    kv_share: float  # share of all KV blocks that attempts and handoffs use; idle blocks of prefix caches do not count
    finished: int  # requests that ended since the previous sample
    pools: tuple[PoolSample, ...] = ()


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that has ended, with the times and tokens that its client saw."""

    request_id: str
    arrival: Nanos
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    first_token: Nanos | None  # instant of the first token; None: the request ended without a token
    end: Nanos
    refused: str = ""  # reason of the rejection; empty: the request was not rejected
    session: int = 0  # number of the session; 0: the request belongs to no known session
    max_tokens: int = 0  # number of answer tokens that the client asked for
    retries: int = 0  # number of times that the client sent the request again
    chain: tuple[int, ...] = ()  # names of the prompt's blocks, as the workload states them
    # cached prompt tokens from each tier of a store; None: all cached tokens came from GPU memory
    tier_tokens: dict[str, int] | None = None

    @property
    def ttft_ms(self) -> float:
        assert self.first_token is not None
        return (self.first_token - self.arrival) / MILLISECOND

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first one, in ms; 0 for an answer of one token."""
        assert self.first_token is not None
        return (self.end - self.first_token) / MILLISECOND / max(1, self.output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        return (self.end - self.arrival) / MILLISECOND


class RequestSums:
    """Adds up ended requests: the counts of all, and the tokens and the distributions of latencies of the answered ones."""

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
        self._tier_tokens: dict[str, int] = {}  # cached prompt tokens by tier of the store, without GPU memory

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
    """States how well the latencies and the power of a pool are predicted, and the source of the pool's price."""

    # kind of measurements from which the step times were estimated: a value of
    # `fleet.hardware.latency.coefficients.EstimateBasis`; empty: unknown
    basis: str = ""
    # median relative error of the TTFT on measurements that were not used for the fit; a guess if no GPU of this maker was
    # measured (`fleet.hardware.latency.coefficients.OTHER_MAKERS_ERRORS`)
    ttft_error: float = 0.0
    tpot_error: float = 0.0
    power_error: float = 0.0
    price: str = ""


class PoolOutcome(Struct, frozen=True, kw_only=True):
    """Results of one pool in a run. Costs are in dollars."""

    name: str
    role: str
    gpu: str
    gpus: int
    workers: int
    utilisation: float  # time that the workers spent in steps, divided by the time for which they occupied their GPUs
    imbalance: float  # time that the busiest worker spent in steps, divided by the mean over the workers
    computed_tokens: int  # number of prompt tokens that the workers computed, so without tokens from caches
    generated_tokens: int
    gpu_hours: float
    cost: float
    energy_kwh: float
    joules_per_token: float  # energy of the pool in joules, divided by the number of computed and generated tokens
    cost_per_million_tokens: float  # cost of the pool, divided by the millions of computed and generated tokens
    quality: PredictionQuality


class RunOutcome(Struct, frozen=True, kw_only=True):
    """Results of a run, as `fleet sim run --json` prints them. Latencies are in ms, rates per simulated second, costs in dollars."""

    digest: str
    requests: int
    refused: dict[str, int]
    simulated_seconds: float
    cpu_seconds: float
    requests_per_cpu_second: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]  # gaps between tokens in all answers; gaps at a handoff or a preemption are left out
    e2e_ms: dict[str, float]
    goodput_rps: float
    attainment: float
    hit_rate: float
    hit_rate_by_tier: dict[str, float]  # share of all prompt tokens that came from each tier; the sum is `hit_rate`
    retries: int  # number of times that clients sent a request again
    # time that the busiest worker spent in steps, divided by the mean of its pool; the highest value among the pools
    imbalance: float
    utilisation: float  # time that all workers spent in steps, divided by the time for which they occupied their GPUs
    disaggregated: int  # number of decisions that chose a prefill and a decode worker together
    preempted: int
    moved_gb: float  # gigabytes of all transfers between workers, including lost ones
    gpu_hours: float
    cost: float
    cost_per_million_tokens: float  # cost of the run, divided by the millions of prompt and answer tokens
    energy_kwh: float
    joules_per_token: float  # energy of all GPUs in joules, divided by the number of tokens in all answers
    pools: list[PoolOutcome] = []


def seconds(nanos: Nanos) -> float:
    return nanos / SECOND
