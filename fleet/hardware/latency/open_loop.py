"""What clients see at one engine while requests come to it by chance: the tail of first tokens, and of a token's time.

Rules:

1. An engine is in one of three positions: it computes prompts and answers together, prompts alone, or answers alone. What it is under is
   told by how many requests it runs on average (`running`), or, of prompts alone, by how many come a second.
2. While it answers one request with others, a turn of all of them is their answers' steps and one prompt each. So
   `running / (answer × step + running × prompt)` requests come and go a second, and a token's time is its step and its share of prompts.
3. How many others are there when one runs is Poisson-distributed about their mean where requests come at a rate (as in M/G/inf; its tail is
   taken from the normal distribution of that mean and variance), and never more than there are clients where these wait for answers. A
   percentile of a token's time is the time among that many others.
4. Prompts wait for prompts before them: as in M/D/1, where a share `u` waits at all, and waits have an exponential tail of rate 2 (1 - u) / s (Kingman's
   heavy-traffic limit, 1962; its mean is Pollaczek's and Khinchine's). Prompts that wait are computed in full
   steps, so `s` is a prompt's share of one. Those in one step end together, so that one waits for some that came later, too: half as many as
   were before it, as far as a step has room. Nobody's wait is less than a step that is under way.
5. As if requests were spread over engines by chance. A router that looks does better; nothing is counted on that.

Arithmetic only; all times are seconds.
"""

from math import inf, log, sqrt
from statistics import NormalDist

from msgspec import Struct

from fleet.hardware.latency.closed_loop import BenchmarkClient
from fleet.hardware.latency.step_model import StepModel, pairs


class RequestShape(Struct, frozen=True, kw_only=True):
    """What all of them are like."""

    prompt_tokens: float
    answer_tokens: float
    cached_tokens: float = 0.0
    """Of the prompt, whose KV is there already."""

    @property
    def new_tokens(self) -> float:
        return self.prompt_tokens - self.cached_tokens

    @property
    def context(self) -> float:
        """Of a running request, on average."""
        return self.prompt_tokens + 0.5 * self.answer_tokens


class EngineReplica(Struct, frozen=True, kw_only=True):
    """One replica of a model."""

    step: StepModel
    client: BenchmarkClient
    capacity_tokens: float
    """KV that it holds."""

    most_running: float
    budget_tokens: float
    """Prompt tokens in one step."""


class BatchOccupancy(Struct, frozen=True, kw_only=True):
    """How many others there are when a request runs."""

    percentile: float
    waiting_clients: bool
    """Each sends its next request when it has its answer; else requests come whatever becomes of those before."""

    def others(self, running: float) -> float:
        """So many or fewer, in that share of all cases, where `running` is the mean."""
        if self.waiting_clients:
            return max(0.0, running - 1.0)
        return running + max(0.0, NormalDist().inv_cdf(self.percentile)) * sqrt(running)

    def wait(self, rate: float, busy: float, share: float, beside: float, longest: float) -> float:
        """For other prompts, before one's own is computed.

        Args:
            rate: Of prompts, a second.
            busy: A prompt's step when it is alone.
            share: Of a full step that a prompt takes.
            beside: Other prompts that a step has room for.
            longest: That it can take.
        """
        used = rate * share
        if used >= 1.0:
            return inf
        rest = 1.0 - self.percentile
        queued = log(used / rest) * share / (2.0 * (1.0 - used)) if used > rest else 0.0
        met = min(1.0, rate * busy)  # chance to meet a step that is under way
        residual = busy * (1.0 - rest / met) if met > rest else 0.0
        return min(max(queued + min(0.5 * queued, beside * share), residual), longest)


def aggregated_rate(engine: EngineReplica, request: RequestShape, running: float) -> float:
    """Requests a second of an engine that computes prompts and answers, with so many of them running."""
    decode = _decode(engine, request, running)
    return running / (request.answer_tokens * decode + running * _added(engine, request, running))


def aggregated_tpot(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float) -> float:
    """A token's time at such an engine."""
    others = occupancy.others(running)
    return _decode(engine, request, 1.0 + others) + others * _added(engine, request, others) / request.answer_tokens


def aggregated_ttft(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float) -> float:
    """The first token's at such an engine."""
    others = occupancy.others(running)
    own = _prompt(engine, request, others)
    share = max(_added(engine, request, running), _full(engine, request))
    busy = _chunk(engine, request, others)
    longest = others * own if occupancy.waiting_clients else inf
    wait = occupancy.wait(aggregated_rate(engine, request, running), busy, share, _beside(engine, request), longest)
    return own + wait + (_decode(engine, request, others) if others else 0.0) + _around(engine, request)


def prefill_ttft(engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, rate: float) -> float:
    """The first token's time at an engine that computes prompts alone, so many a second."""
    own = _prompt(engine, request, 0.0)
    busy = _chunk(engine, request, 0.0)
    return (
        own
        + occupancy.wait(rate, busy, _full(engine, request), _beside(engine, request), inf)
        + _around(engine, request)
    )


def highest_prefill_rate(engine: EngineReplica, request: RequestShape) -> float:
    """Requests a second beyond which prompts would pile up at such an engine."""
    return 1.0 / _full(engine, request)


def decode_rate(engine: EngineReplica, request: RequestShape, running: float) -> float:
    """Requests a second of an engine that computes answers alone, with so many of them running."""
    return running / (request.answer_tokens * _decode(engine, request, running))


def decode_tpot(
    engine: EngineReplica, request: RequestShape, occupancy: BatchOccupancy, running: float, transfer: float
) -> float:
    """A token's time at such an engine; `transfer`: until a prompt's KV has come, which is shared out among the answer's tokens."""
    return _decode(engine, request, 1.0 + occupancy.others(running)) + transfer / request.answer_tokens


def highest_concurrency(engine: EngineReplica, request: RequestShape) -> float:
    """Requests for which there is room."""
    return min(engine.most_running, engine.capacity_tokens / (request.prompt_tokens + request.answer_tokens))


def _decode(engine: EngineReplica, request: RequestShape, running: float) -> float:
    running = max(1.0, running)
    return engine.step.seconds(0.0, 0.0, running, running * request.context)


def _chunks(engine: EngineReplica, request: RequestShape) -> float:
    return max(1.0, request.new_tokens / engine.budget_tokens)


def _chunk(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """One step with a chunk of a prompt, along with the others' tokens."""
    chunks = _chunks(engine, request)
    new = request.new_tokens
    return engine.step.seconds(
        new / chunks, pairs(new, request.cached_tokens) / chunks, others, others * request.context
    )


def _prompt(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """All chunks of a prompt."""
    return _chunks(engine, request) * _chunk(engine, request, others)


def _added(engine: EngineReplica, request: RequestShape, others: float) -> float:
    """What a prompt adds to the steps of those who run."""
    others = max(1.0, others)
    return _prompt(engine, request, others) - _chunks(engine, request) * _decode(engine, request, others)


def _full(engine: EngineReplica, request: RequestShape) -> float:
    """A prompt's share of full steps."""
    share = engine.budget_tokens / request.new_tokens
    return (
        engine.step.seconds(engine.budget_tokens, share * pairs(request.new_tokens, request.cached_tokens), 0.0, 0.0)
        / share
    )


def _beside(engine: EngineReplica, request: RequestShape) -> float:
    return max(0.0, engine.budget_tokens / request.new_tokens - 1.0)


def _around(engine: EngineReplica, request: RequestShape) -> float:
    """What lies between the client's clock and the engine's."""
    return engine.client.front + engine.client.front_token * request.prompt_tokens
