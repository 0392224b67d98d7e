"""Open loop: computes percentiles of TTFT and TPOT at one engine to which requests arrive at random times.

Rules:

1. An engine prefills and decodes (aggregated), or only prefills, or only decodes. Its load is the mean number of
   running requests (`running`); the load of an engine that only prefills is the number of prompts per second.
2. While an aggregated engine decodes one whole answer, it computes one prompt for each running request. So it serves
   `running / (answer × step + running × prompt)` requests per second. Here `answer` is the number of tokens of an
   answer, `step` is the time of a decode step, and `prompt` is the time of a prefill. The TPOT of the engine is the time
   of a decode step, plus the time of these prefills divided by `answer`.
3. If requests arrive at a rate, the number of other requests that run at the same time is Poisson-distributed, as in
   M/G/inf. The percentiles of this number are taken from the normal distribution with the same mean and variance. If
   clients wait for their answers, this number is `running` - 1 at every percentile. The TPOT at a percentile is computed
   with this number at the same percentile.
4. Prompts wait for earlier prompts, as in an M/D/1 queue with the utilisation `u` and the service time `s`. The share
   `u` of all prompts has to wait. The waiting times have an exponential tail of rate 2 (1 - u) / s (Kingman's
   heavy-traffic limit, 1962; the mean is that of Pollaczek and Khinchine's formula). Waiting prompts are computed in
   full steps, which several prompts share, so `s` is the part of one prompt in the time of a full step. All prompts of
   one step end together. So a prompt also waits for later prompts that its step has room for. The model
   assumes that these later prompts are at most half as many as the waiting prompts that arrived earlier. A prompt waits
   at least until the running step has ended.
5. `replicas` is the number of engines over which a router balances the requests; the router knows the load of each engine.
   If `replicas` is 1, the requests come to the engine at random, as if they were spread over several engines at random.
   If `replicas` is more than 1, a prompt waits only if all engines are busy (Sakasegawa's approximation
   of Erlang's C formula, 1977). Waiting times shrink with the number of engines (Allen and Cunneen's formula). The
   number of requests on one engine varies less than with random spreading: the model assumes that the share `IMBALANCE` of
   the variance with random spreading remains.
6. Requests may arrive in bursts: `dispersion` is the variance of the number of arrivals, divided by its mean (1 for
   Poisson arrivals). `spread` is the squared coefficient of variation of the prompt lengths. Waiting times are
   proportional to `dispersion` + `spread` (Kingman, 1961).

All times are in seconds.
"""

from math import inf, log, sqrt
from statistics import NormalDist

from msgspec import Struct

from fleet.hardware.latency.closed_loop import BenchmarkClient
from fleet.hardware.latency.step_model import StepModel, pairs

IMBALANCE = 0.25
"""Variance of the number of requests on one engine if a router balances them over very many engines, divided by the
variance if they are spread at random (rule 5). This value is an assumption. The planner corrects its predictions by
measured latencies (`fleet.planner.sizing.capacity`)."""


class RequestShape(Struct, frozen=True, kw_only=True):
    """Describes the mean lengths of requests in tokens."""

    prompt_tokens: float
    answer_tokens: float
    cached_tokens: float = 0.0
    """Number of prompt tokens whose KV the engine finds in a cache."""

    @property
    def new_tokens(self) -> float:
        return self.prompt_tokens - self.cached_tokens

    @property
    def context(self) -> float:
        """Mean number of context tokens of a running request: its prompt and half of its answer."""
        return self.prompt_tokens + 0.5 * self.answer_tokens


class EngineReplica(Struct, frozen=True, kw_only=True):
    """Describes the engine of one replica: its step times, its KV capacity and its limits."""

    step: StepModel
    client: BenchmarkClient
    capacity_tokens: float
    """Number of tokens whose KV the engine can hold."""

    most_running: float
    budget_tokens: float
    """Maximum number of prompt tokens in one step."""


class BatchOccupancy(Struct, frozen=True, kw_only=True):
    """Computes how many other requests run beside one request, and how long a prompt waits (rules 3 to 6)."""

    percentile: float
    waiting_clients: bool
    """True if each client sends its next request after it has got its answer; False if requests arrive at a rate."""

    replicas: float = 1.0
    """Number of engines over which a router balances the requests (rule 5)."""

    dispersion: float = 1.0
    spread: float = 0.0

    def others(self, running: float) -> float:
        """Return the number of other requests that run beside one request, at `percentile` (rule 3).

        `running` is the mean number of running requests of the engine.
        """
        if self.waiting_clients:
            return max(0.0, running - 1.0)
        shared = 1.0 / self.replicas + IMBALANCE * (1.0 - 1.0 / self.replicas)
        # Long answers smooth out bursts of arrivals, so only half of the dispersion above 1 counts (Eckberg, 1983).
        variance = running * shared * 0.5 * (1.0 + self.dispersion)
        return running + max(0.0, NormalDist().inv_cdf(self.percentile)) * sqrt(variance)

    def wait(self, rate: float, busy: float, share: float, beside: float, longest: float) -> float:
        """Return the seconds that a prompt waits for other prompts, at `percentile` (rules 4 to 6).

        The result is `longest` if prompts arrive faster than full steps can compute them.

        Args:
            rate: Prompts per second that arrive at one engine.
            busy: Seconds of a step that computes this prompt, or a chunk of it, and no other prompt.
            share: Seconds that one prompt adds to a full step.
            beside: Number of further prompts for which a step has room.
            longest: Upper limit of the result in seconds; infinite if there is no limit.
        """
        used = rate * share
        if used >= 1.0:
            return longest
        rest = 1.0 - self.percentile
        # This is the exponent in Sakasegawa's formula; bursts have the same effect as fewer engines.
        together = sqrt(2.0 * (self.replicas / self.dispersion + 1.0)) - 1.0
        waits = used**together  # probability that all engines are busy
        slowness = share * (self.dispersion + self.spread) / (2.0 * self.replicas * (1.0 - used))
        queued = log(waits / rest) * slowness if waits > rest else 0.0
        met = min(1.0, rate * busy) ** together  # probability that a step is running on all engines
        residual = busy * (1.0 - rest / met) if met > rest else 0.0
        return min(max(queued + min(0.5 * queued, beside * share), residual), longest)


def aggregated_rate(engine: EngineReplica, request: RequestShape, running: float) -> float:
    """Return the requests per second that an aggregated engine serves if `running` requests run."""
    decode = _decode(engine, request, running)
    return running / (request.answer_tokens * decode + running * _added(engine, request, running))


def aggregated_tpot(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float) -> float:
    """Return the TPOT in seconds of an aggregated engine with `running` requests on average.

    The result is the TPOT at the percentile of `occupancy`.
    """
    others = occupancy.others(running)
    return _decode(engine, request, 1.0 + others) + others * _added(engine, request, others) / request.answer_tokens


def aggregated_ttft(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float) -> float:
    """Return the TTFT in seconds of an aggregated engine with `running` requests on average.

    The result is the TTFT at the percentile of `occupancy`.
    """
    others = occupancy.others(running)
    own = _prompt(engine, request, others)
    share = max(_added(engine, request, running), _full(engine, request))
    busy = _chunk(engine, request, others)
    longest = others * own if occupancy.waiting_clients else inf
    wait = occupancy.wait(aggregated_rate(engine, request, running), busy, share, _beside(engine, request), longest)
    return own + wait + (_decode(engine, request, others) if others else 0.0) + _around(engine, request)


def prefill_ttft(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, rate: float) -> float:
    """Return the TTFT in seconds of a prefill engine at which `rate` prompts arrive per second.

    The result is the TTFT at the percentile of `occupancy`.
    """
    own = _prompt(engine, request, 0.0)
    busy = _chunk(engine, request, 0.0)
    return (
        own
        + occupancy.wait(rate, busy, _full(engine, request), _beside(engine, request), inf)
        + _around(engine, request)
    )


def highest_prefill_rate(engine: EngineReplica, request: RequestShape) -> float:
    """Return the prompts per second above which the queue of a prefill engine grows without bound."""
    return 1.0 / _full(engine, request)


def decode_rate(engine: EngineReplica, request: RequestShape, running: float) -> float:
    """Return the requests per second that a decode engine serves if `running` requests run."""
    return running / (request.answer_tokens * _decode(engine, request, running))


def decode_tpot(
    engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float, transfer: float
) -> float:
    """Return the TPOT in seconds of a decode engine with `running` requests on average.

    The result is the TPOT at the percentile of `occupancy`. The time of the KV transfer (`transfer`, in seconds) is
    spread over the tokens of the answer.
    """
    return _decode(engine, request, 1.0 + occupancy.others(running)) + transfer / request.answer_tokens


def highest_concurrency(engine: EngineReplica, request: RequestShape) -> float:
    """Return the maximum number of requests that an engine can run at once, by its KV capacity and its batch limit."""
    return min(engine.most_running, engine.capacity_tokens / (request.prompt_tokens + request.answer_tokens))


def _decode(engine: EngineReplica, request: RequestShape, running: float) -> float:
    running = max(1.0, running)
    return engine.step.seconds(0.0, 0.0, running, running * request.context)


def _chunks(engine: EngineReplica, request: RequestShape) -> float:
    return max(1.0, request.new_tokens / engine.budget_tokens)


def _chunk(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """Return the seconds of a step that computes one prompt chunk and decodes for `others` other requests."""
    chunks = _chunks(engine, request)
    new = request.new_tokens
    return engine.step.seconds(
        new / chunks, pairs(new, request.cached_tokens) / chunks, others, others * request.context
    )


def _prompt(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """Return the seconds for all chunks of a prompt, in steps that also decode for `others` other requests."""
    return _chunks(engine, request) * _chunk(engine, request, others)


def _added(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """Return the seconds that the computation of a prompt adds to the decode steps of `others` running requests."""
    others = max(1.0, others)
    return _prompt(engine, request, others) - _chunks(engine, request) * _decode(engine, request, others)


def _full(engine: EngineReplica, request: RequestShape) -> float:
    """Return the seconds that one prompt adds to full steps, which it shares with other prompts (`s` in rule 4)."""
    share = engine.budget_tokens / request.new_tokens
    return (
        engine.step.seconds(engine.budget_tokens, share * pairs(request.new_tokens, request.cached_tokens), 0.0, 0.0)
        / share
    )


def _beside(engine: EngineReplica, request: RequestShape) -> float:
    return max(0.0, engine.budget_tokens / request.new_tokens - 1.0)


def _around(engine: EngineReplica, request: RequestShape) -> float:
    """Return the seconds of the TTFT that pass outside the engine."""
    return engine.client.front + engine.client.front_token * request.prompt_tokens
