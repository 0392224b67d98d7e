"""Simulated cluster of the leaderboard: defines the engines and the latency goals, and runs one policy on one workload.

Rules:

1. `fleet.sim` runs the production router's machine with a policy, and engines in virtual time. Step times follow the linear model of
`fleet.hardware.latency.linear`. Most policies do not know the step times, and can only learn from what the router observes.
2. All policies get the same requests from the same seed. A later turn of a conversation arrives a pause after the answer to the turn
before has ended. All other requests arrive at fixed times, whether the cluster keeps up or not.
3. Policies are ranked by goodput: requests per second whose TTFT and TPOT kept the goals. The goals depend on the engine, and are
   the same for all policies.
"""

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct

from fleet.batching.attempts import EngineLimits
from fleet.core.clock import SECOND, Nanos
from fleet.core.roles import Role
from fleet.hardware.latency.linear import EngineLatency
from fleet.router.policy import PlacementPolicy
from fleet.router.settings.router import RouterSettings
from fleet.sim.cluster.pools import PoolProfile
from fleet.sim.results.outcomes import EndedRequest, Slo
from fleet.sim.run import RunPlan, simulate
from fleet.sim.workload.clients import SessionClients
from loadtests.router.simulated.traffic import RouterTraffic

SLACK_SECONDS, PACES = 0.5, 5.0  # constants of the goals; `goals_of` explains them
PERCENTILE = 99
NEVER = Nanos(10**9 * SECOND)  # time between samples of the timeline; none is taken, because nothing uses them
PATIENT = RouterSettings(explained_requests=1, max_queued=1_000_000, max_queue_seconds=1e9)
"""Settings with which no request is rejected because it waits too long, so that overload shows in the latencies."""


class SimulatedDevice(Struct, frozen=True, kw_only=True):
    """Engines of the cluster. The default resembles an 8-billion model on one H100: 20k prompt tokens a second, 8 ms a step."""

    latency: EngineLatency = EngineLatency(
        prefill_base_ms=2.0,
        prefill_ms_per_token=0.05,
        prefill_ms_per_token_and_context=1e-6,
        step_base_ms=8.0,
        step_ms_per_sequence=0.05,
        step_ms_per_context_token=4e-5,
    )
    kv_tokens: int = 400_000
    max_running: int = 64
    chunk_tokens: int = 2048


class AnswerGoals(Struct, frozen=True, kw_only=True):
    """Latency goals of an answer."""

    ttft_seconds: float
    """TTFT goal of an empty prompt; each prompt token adds `ttft_seconds_per_token`."""

    ttft_seconds_per_token: float
    tpot_seconds: float

    def kept(self, ended: EndedRequest) -> bool:
        if ended.refused or ended.first_token is None:
            return False
        goal = self.ttft_seconds + self.ttft_seconds_per_token * ended.prompt_tokens
        return ended.ttft_ms <= 1000 * goal and ended.tpot_ms <= 1000 * self.tpot_seconds


class PolicyOutcome(Struct, frozen=True, kw_only=True):
    """Outcome of one policy on one workload."""

    requests: int
    refused: int
    goodput: float  # requests per second that kept both goals
    attainment: float  # share of the requests that kept both goals
    hit_rate: float  # share of prompt tokens that were cached
    imbalance: float  # time in steps of the busiest worker, divided by the mean over all workers
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    seconds: float  # time from the first arrival to the last answer
    busy: float  # share of the time that engines spent in steps


def goals_of(device: SimulatedDevice) -> AnswerGoals:
    """Return the goals: a TTFT of half a second plus twice the time to compute the prompt, and a TPOT of five idle steps."""
    latency = device.latency
    return AnswerGoals(
        ttft_seconds=SLACK_SECONDS,
        ttft_seconds_per_token=2 * latency.prefill_ms_per_token / 1000,
        tpot_seconds=PACES * latency.step_base_ms / 1000,
    )


def run(
    workload: RouterTraffic, workers: int, device: SimulatedDevice, policy: PlacementPolicy, seed: int
) -> PolicyOutcome:
    """Run one policy on one workload with the goals of the device."""
    ended: list[EndedRequest] = []
    ran = simulate(
        plan_of(workload, workers, device, policy, seed), workload.traffic(), on_end=ended.append, sample_every=NEVER
    )
    return outcome(ended, goals_of(device), imbalance=ran.outcome.imbalance, busy=ran.outcome.utilisation)


def plan_of(
    workload: RouterTraffic, workers: int, device: SimulatedDevice, policy: PlacementPolicy, seed: int
) -> RunPlan:
    limits = EngineLimits(
        kv_blocks=device.kv_tokens // workload.block_tokens,
        block_tokens=workload.block_tokens,
        max_running=device.max_running,
        step_tokens=device.chunk_tokens,
    )
    pool = PoolProfile(
        name="both",
        role=Role.BOTH,
        workers=workers,
        times=device.latency,
        limits=limits,
        gpus=1,
        dollars_per_hour=0.0,
        busy_watts=0.0,
        idle_watts=0.0,
        kv_bytes_per_token=1.0,
        bandwidth=1.0,
        link_latency=Nanos(0),
        start_time=Nanos(0),
    )
    return RunPlan(
        pools=(pool,),
        router=PATIENT,
        slo=Slo(),
        block_tokens=workload.block_tokens,
        message_delay=Nanos(0),
        seed=seed,
        policy=policy,
        clients=SessionClients(users=0),
    )


def outcome(ended: Sequence[EndedRequest], goals: AnswerGoals, *, imbalance: float, busy: float) -> PolicyOutcome:
    """Return the outcome of a run.

    Args:
        ended: All requests of the run; at least one of them was answered.
        goals: Latency goals. Goodput is counted per second from the first to the last arrival, so that it does not depend on
            how long a slow policy takes for the last answers.
        imbalance: Imbalance of the workers.
        busy: Share of the time that the workers spent in steps.
    """
    served = [each for each in ended if not each.refused and each.first_token is not None]
    ttfts = sorted(each.ttft_ms / 1000 for each in served)
    kept = sum(map(goals.kept, ended))
    first = min(each.arrival for each in ended)
    arriving = (max(each.arrival for each in ended) - first) / SECOND
    return PolicyOutcome(
        requests=len(ended),
        refused=len(ended) - len(served),
        goodput=kept / arriving if arriving else 0.0,
        attainment=kept / len(ended),
        hit_rate=sum(each.cached_tokens for each in served) / sum(each.prompt_tokens for each in served),
        imbalance=imbalance,
        ttft_mean=sum(ttfts) / len(ttfts),
        ttft_p50=ttfts[len(ttfts) // 2],
        ttft_p99=ttfts[len(ttfts) * PERCENTILE // 100],
        tpot_mean=sum(each.tpot_ms for each in served) / 1000 / len(served),
        seconds=(max(each.end for each in served) - first) / SECOND,
        busy=busy,
    )


def ideal_rate(workload: RouterTraffic, workers: int, device: SimulatedDevice) -> float:
    """Return the requests per second that the engines could serve with one common cache and no imbalance.

    The work of a request is to compute the prompt tokens that this cache lacks, and its share of decode steps in a half-full batch.
    """
    latency = device.latency
    room = workers * device.kv_tokens // workload.block_tokens
    cache: OrderedDict[int, None] = OrderedDict()
    milliseconds = 0.0
    half = max(1, device.max_running // 2)
    for request in workload.in_order():
        hits = next((place for place, key in enumerate(request.chain) if key not in cache), len(request.chain))
        for key in reversed(request.chain):
            cache.pop(key, None)
            cache[key] = None
        while len(cache) > room:
            cache.popitem(last=False)
        unseen = max(1, request.prompt_tokens - hits * workload.block_tokens)
        context = request.prompt_tokens + request.output_tokens / 2
        milliseconds += unseen * latency.prefill_ms_per_token
        milliseconds += request.output_tokens * (
            latency.step_base_ms / half + latency.step_ms_per_sequence + latency.step_ms_per_context_token * context
        )
    return workers * workload.requests / (milliseconds / 1000)
