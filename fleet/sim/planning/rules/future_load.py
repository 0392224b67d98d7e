"""Future load: estimates the replicas that the requests of a replay will need, for rules that know all requests in advance.

The need of a pool is an estimate that ignores queueing: the work of the requests that arrive around an instant, divided by the
work that one replica does in that time. Rules use needs only to guide their search. The results of these rules are measured by
replays, like those of every other rule.
"""

from collections.abc import Sequence
from math import ceil

from fleet.core.clock import SECOND
from fleet.core.roles import Role
from fleet.planner.messages import PoolName
from fleet.sim.planning.capacity import TrafficShape
from fleet.sim.planning.rule_context import RuleContext
from kvstore.eviction.trace_replay import TraceRequest

BIN_SECONDS = 5.0


def mean_shape(requests: Sequence[TraceRequest], cached_share: float) -> TrafficShape:
    """Return the mean lengths of requests, with `cached_share` limited to 0.95."""
    return TrafficShape(
        prompt_tokens=sum(each.prompt_tokens for each in requests) / len(requests),
        answer_tokens=sum(each.output_tokens for each in requests) / len(requests),
        cached_share=min(0.95, cached_share),
    )


def needs(context: RuleContext, name: PoolName, shape: TrafficShape, span_seconds: float) -> list[float]:
    """Return the number of replicas that the load keeps busy: one value for each bin of `BIN_SECONDS` seconds.

    Each value is the mean over its bin and the bins of about `span_seconds / 2` seconds before and after it, as far as there are any.
    """
    role, requests = context.pool(name).role, context.future
    bins = [0.0] * (int(requests[-1].arrival / SECOND / BIN_SECONDS) + 1)
    for each in requests:
        bins[int(each.arrival / SECOND / BIN_SECONDS)] += _weight(role, each, shape)
    capacity = context.rate(name, shape) * BIN_SECONDS
    half = max(0, round(span_seconds / BIN_SECONDS / 2))
    sums = [0.0]
    for work in bins:
        sums.append(sums[-1] + work)
    found = []
    for place in range(len(bins)):
        first, last = max(0, place - half), min(len(bins), place + half + 1)
        found.append((sums[last] - sums[first]) / (last - first) / capacity)
    return found


def _weight(role: Role, request: TraceRequest, shape: TrafficShape) -> float:
    """Return the work of a request for a pool with this role. A request with the mean lengths in `shape` has the work 1."""
    prompt = request.prompt_tokens / shape.prompt_tokens
    answer = request.output_tokens / shape.answer_tokens
    return {Role.PREFILL: prompt, Role.DECODE: answer}.get(role, 0.5 * (prompt + answer))


def peak_replicas(context: RuleContext, shape: TrafficShape, span_seconds: float, use: float) -> dict[PoolName, int]:
    """Return, for each pool, the number of replicas with which the highest load is the share `use` of their throughput.

    The load is averaged over `span_seconds` seconds.
    """
    return {
        pool.name: context.bounded(pool.name, ceil(max(needs(context, pool.name, shape, span_seconds)) / use))
        for pool in context.pools
    }
