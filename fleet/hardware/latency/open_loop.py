"""Open loop: percentiles of TTFT and TPOT at one engine while requests arrive at random.

Rules:

1. An engine prefills and decodes (aggregated), or only prefills, or only decodes. Its load is the mean number of running requests
   (`running`), or for prefills alone the number of prompts per second.
2. In an aggregated engine, all running requests together take the time of the decode steps of one answer, and of one prefill for
   each. So `running / (answer × step + running × prompt)` requests are served per second, and the TPOT is the duration of a step and
   its share of prefills.
3. If requests come at a rate, the number of other running requests beside one request is Poisson-distributed (as in M/G/inf; the tail
   is taken from the normal distribution with that mean and variance). If clients wait for answers, this number is at most the number
   of clients. A percentile of the TPOT is the TPOT with the same percentile of this number.
4. Prompts wait for prompts before them, as in M/D/1: a share `u` waits at all, and waits have an exponential tail of rate
   2 (1 - u) / s (Kingman's heavy-traffic limit, 1962; its mean is that of Pollaczek and Khinchine). Waiting prompts are computed in
   full steps, so `s` is a prompt's share of a full step. Prompts of one step end together, so a prompt also waits for some that came
   later: half as many as were before it, as far as a step has room. A wait is at least the remaining time of the running step.
5. Without a stated number of engines, requests are assumed to be spread over engines at random. If the number is stated (`replicas`),
   a router that knows the load of all engines distributes the requests. A prompt then waits only if all engines are busy (Sakasegawa's
   approximation of Erlang's C formula, 1977), and waits shrink with the number of engines (Allen and Cunneen's formula). The share
   `IMBALANCE` of the variance of random spreading remains.
6. Arrivals may be bursty: `dispersion` is the variance of the number of arrivals divided by its mean (1: Poisson). `spread` is the
   squared coefficient of variation of the prompts' lengths. Waits grow with their sum (Kingman, 1961).

All times are seconds.
"""

from math import inf, log, sqrt
from statistics import NormalDist

from msgspec import Struct

from fleet.hardware.latency.closed_loop import BenchmarkClient
from fleet.hardware.latency.step_model import StepModel, pairs

IMBALANCE = 0.25
"""Share of the variance of random spreading that a router leaves between its engines; an assumption, which measured latencies correct."""


class RequestShape(Struct, frozen=True, kw_only=True):
    """Lengths of the requests in tokens."""

    prompt_tokens: float
    answer_tokens: float
    cached_tokens: float = 0.0
    """Number of prompt tokens whose KV is cached."""

    @property
    def new_tokens(self) -> float:
        return self.prompt_tokens - self.cached_tokens

    @property
    def context(self) -> float:
        """Mean context of a running request."""
        return self.prompt_tokens + 0.5 * self.answer_tokens


class EngineReplica(Struct, frozen=True, kw_only=True):
    """One replica of a model."""

    step: StepModel
    client: BenchmarkClient
    capacity_tokens: float
    """Tokens of KV that it can hold."""

    most_running: float
    budget_tokens: float
    """Most prompt tokens in one step."""


class BatchOccupancy(Struct, frozen=True, kw_only=True):
    """Distribution of the number of other running requests beside one request (rule 3)."""

    percentile: float
    waiting_clients: bool
    """True if each client sends its next request after its answer; otherwise requests come at a rate."""

    replicas: float = 1.0
    """Number of engines to which a router that knows their load distributes the requests (rule 5)."""

    dispersion: float = 1.0
    spread: float = 0.0

    def others(self, running: float) -> float:
        """Return the percentile of the number of other requests, whose mean is `running`."""
        if self.waiting_clients:
            return max(0.0, running - 1.0)
        shared = 1.0 / self.replicas + IMBALANCE * (1.0 - 1.0 / self.replicas)
        # Long answers smooth bursts, so only half of their excess counts (Eckberg, 1983).
        variance = running * shared * 0.5 * (1.0 + self.dispersion)
        return running + max(0.0, NormalDist().inv_cdf(self.percentile)) * sqrt(variance)

    def wait(self, rate: float, busy: float, share: float, beside: float, longest: float) -> float:
        """Return the percentile of a prompt's wait for other prompts.

        Args:
            rate: Prompts per second of one engine.
            busy: Duration of a prompt's step when the prompt is alone.
            share: Part of a full step that a prompt takes.
            beside: Number of other prompts for which a step has room.
            longest: Upper limit of the wait.
        """
        used = rate * share
        if used >= 1.0:
            return inf
        rest = 1.0 - self.percentile
        # Exponent of Sakasegawa's formula; bursts have the effect of fewer engines.
        together = sqrt(2.0 * (self.replicas / self.dispersion + 1.0)) - 1.0
        waits = used**together  # probability that all engines are busy
        slowness = share * (self.dispersion + self.spread) / (2.0 * self.replicas * (1.0 - used))
        queued = log(waits / rest) * slowness if waits > rest else 0.0
        met = min(1.0, rate * busy) ** together  # probability that a step is running on all engines
        residual = busy * (1.0 - rest / met) if met > rest else 0.0
        return min(max(queued + min(0.5 * queued, beside * share), residual), longest)


def aggregated_rate(engine: EngineReplica, request: RequestShape, running: float) -> float:
    """Return the requests per second of an aggregated engine."""
    decode = _decode(engine, request, running)
    return running / (request.answer_tokens * decode + running * _added(engine, request, running))


def aggregated_tpot(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float) -> float:
    """Return the TPOT of an aggregated engine."""
    others = occupancy.others(running)
    return _decode(engine, request, 1.0 + others) + others * _added(engine, request, others) / request.answer_tokens


def aggregated_ttft(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float) -> float:
    """Return the TTFT of an aggregated engine."""
    others = occupancy.others(running)
    own = _prompt(engine, request, others)
    share = max(_added(engine, request, running), _full(engine, request))
    busy = _chunk(engine, request, others)
    longest = others * own if occupancy.waiting_clients else inf
    wait = occupancy.wait(aggregated_rate(engine, request, running), busy, share, _beside(engine, request), longest)
    return own + wait + (_decode(engine, request, others) if others else 0.0) + _around(engine, request)


def prefill_ttft(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, rate: float) -> float:
    """Return the TTFT of an engine that only prefills, with `rate` prompts per second."""
    own = _prompt(engine, request, 0.0)
    busy = _chunk(engine, request, 0.0)
    return (
        own
        + occupancy.wait(rate, busy, _full(engine, request), _beside(engine, request), inf)
        + _around(engine, request)
    )


def highest_prefill_rate(engine: EngineReplica, request: RequestShape) -> float:
    """Return the prompts per second beyond which the queue of an engine that only prefills grows without bound."""
    return 1.0 / _full(engine, request)


def decode_rate(engine: EngineReplica, request: RequestShape, running: float) -> float:
    """Return the requests per second of an engine that only decodes."""
    return running / (request.answer_tokens * _decode(engine, request, running))


def decode_tpot(
    engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float, transfer: float
) -> float:
    """Return the TPOT of an engine that only decodes; the transfer time of the KV is divided among the answer's tokens."""
    return _decode(engine, request, 1.0 + occupancy.others(running)) + transfer / request.answer_tokens


def highest_concurrency(engine: EngineReplica, request: RequestShape) -> float:
    """Return the number of requests for whose KV an engine has room."""
    return min(engine.most_running, engine.capacity_tokens / (request.prompt_tokens + request.answer_tokens))


def _decode(engine: EngineReplica, request: RequestShape, running: float) -> float:
    running = max(1.0, running)
    return engine.step.seconds(0.0, 0.0, running, running * request.context)


def _chunks(engine: EngineReplica, request: RequestShape) -> float:
    return max(1.0, request.new_tokens / engine.budget_tokens)


def _chunk(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """Return the time of one step with a prompt chunk, together with the decoding of others."""
    chunks = _chunks(engine, request)
    new = request.new_tokens
    return engine.step.seconds(
        new / chunks, pairs(new, request.cached_tokens) / chunks, others, others * request.context
    )


def _prompt(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """Return the time for all chunks of a prompt."""
    return _chunks(engine, request) * _chunk(engine, request, others)


def _added(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """Return the time that a prompt adds to the steps of running requests."""
    others = max(1.0, others)
    return _prompt(engine, request, others) - _chunks(engine, request) * _decode(engine, request, others)


def _full(engine: EngineReplica, request: RequestShape) -> float:
    """Return a prompt's share of full steps."""
    share = engine.budget_tokens / request.new_tokens
    return (
        engine.step.seconds(engine.budget_tokens, share * pairs(request.new_tokens, request.cached_tokens), 0.0, 0.0)
        / share
    )


def _beside(engine: EngineReplica, request: RequestShape) -> float:
    return max(0.0, engine.budget_tokens / request.new_tokens - 1.0)


def _around(engine: EngineReplica, request: RequestShape) -> float:
    """Return the seconds that the client measures outside the engine."""
    return engine.client.front + engine.client.front_token * request.prompt_tokens
