"""Sizing: computes the fewest GPUs that keep all goals of a workload, or the goal that cannot be kept.

Rules:

1. A model is sharded by tensor parallelism over GPUs of one node. For each sharding, one engine has a limit: the highest
   rate of requests that keeps both latency goals (`open_loop`). The rate may use at most the share `HEADROOM` of the
   engine's throughput. The number of replicas is the demanded rate divided by this limit, rounded up. If the load is a
   number of clients that wait for their answers, the limit is a number of running requests instead of a rate. Then
   `HEADROOM` applies only to prefill engines.
2. Aggregated and disaggregated serving are both computed. In disaggregated serving, prefill engines and decode engines
   have limits of their own.
3. The solution with the fewest GPUs is chosen. Among solutions with equal numbers of GPUs, aggregated serving is
   preferred, and then the highest capacity.
4. More load never leads to fewer GPUs, because the limit of an engine does not depend on the load. Looser goals never
   lead to more GPUs, because they never lower the limit of an engine.
5. If no solution exists, the result is a `Shortfall`: it names one goal, and the best value that the hardware can
   reach. The goals are checked in this order: context, memory, the latency goals for a request that is alone, and the
   number of GPUs.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import cached_property
from math import ceil

from msgspec import Struct, structs

from fleet.core.roles import Role
from fleet.hardware.gpus import Gpu
from fleet.hardware.known_models import SizedModel
from fleet.hardware.latency.coefficients import StepModelEstimate, estimate
from fleet.hardware.latency.limits import highest, highest_unbroken
from fleet.hardware.latency.open_loop import (
    BatchOccupancy,
    EngineReplica,
    RequestShape,
    aggregated_rate,
    aggregated_tpot,
    aggregated_ttft,
    decode_rate,
    decode_tpot,
    highest_concurrency,
    highest_prefill_rate,
    prefill_ttft,
)
from fleet.hardware.latency.prediction import BUDGET_TOKENS, transfer_seconds
from fleet.hardware.sharding import ShardedModel, feasible

HEADROOM = 0.8
"""Maximum share of an engine's throughput that may be used. It is below 1, because the real load differs from the
stated one, and because waiting times grow without bound if the share comes near 1."""

MOST_RUNNING = 256
"""Maximum number of requests in one batch. Proposals configure engines with this value. It is vLLM's default for GPUs
with less than 70 GiB; for larger GPUs, the default of vLLM 0.32 is 1,024."""

MOST_GPUS = 1_000_000
"""Upper limit of all computed numbers of replicas, so that they stay finite."""

ONE_CONTEXT = 0.8
"""Maximum share of the computed KV capacity that one request may take. Engines do not start if the longest request does
not fit into their KV cache, and their real capacity differs slightly from the computed one."""

LARGEST_REPLICA = 64
"""Maximum number of GPUs per replica that are tried if no sharding on the available GPUs holds the model. The result
tells the user how many GPUs would be enough."""


class SizingGoal(StrEnum):
    """Goals that a solution has to keep."""

    MEMORY = "memory"
    """One engine must fit on the GPUs of one node. The values of this goal are numbers of GPUs."""

    CONTEXT = "context"
    """The request must fit into the model's context. The values of this goal are tokens of prompt and answer
    together."""

    TTFT = "ttft"
    TPOT = "tpot"
    GPUS = "gpus"


class Demand(Struct, frozen=True, kw_only=True):
    """Describes the load of a model; either `rate` or `clients` is above 0, but not both."""

    request: RequestShape
    rate: float = 0.0
    """Requests per second."""

    clients: float = 0.0
    """Number of clients, each of which waits for its answer before it sends the next request."""

    def __post_init__(self) -> None:
        assert (self.rate > 0) != (self.clients > 0), "one of rate and clients"


class LatencyGoals(Struct, frozen=True, kw_only=True):
    ttft: float
    """Maximum TTFT in seconds."""

    tpot: float
    """Maximum TPOT in seconds."""

    percentile: float
    """Share of all requests that have to keep each goal, from 0 to 1."""


class GpuSupply(Struct, frozen=True, kw_only=True):
    """Describes the available GPUs: their type, their number, and the number per node."""

    gpu: Gpu
    gpus: int
    per_node: int


class SizedPool(Struct, frozen=True, kw_only=True):
    """Holds the number of replicas of one role."""

    role: Role
    replicas: int


class Sizing(Struct, frozen=True, kw_only=True):
    """Holds a solution that keeps all goals."""

    placement: ShardedModel
    """The model as each engine shards it over its GPUs."""

    estimate: StepModelEstimate
    """The step model of the engines, with its errors and the measurements from which it was estimated."""

    pools: tuple[SizedPool, ...]
    ttft: float
    """Predicted TTFT in seconds, at the percentile of the goals."""

    tpot: float
    most: float
    """Requests per second, or number of clients, that these engines can serve."""

    @property
    def gpus(self) -> int:
        return sum(pool.replicas for pool in self.pools) * self.placement.parallelism.gpus

    @property
    def room(self) -> int:
        """Maximum length of a request in tokens for which the engines can be configured."""
        return int(ONE_CONTEXT * self.placement.kv_capacity_tokens())


class Shortfall(Struct, frozen=True, kw_only=True):
    """Describes a goal that cannot be kept."""

    goal: SizingGoal
    wanted: float
    """The wanted value: seconds for a latency, tokens for a context. For memory and GPUs it is the available number of
    GPUs."""

    best: float
    """Best possible value of the goal. For memory and GPUs it is the needed number of GPUs. For memory it is 0 if even
    `LARGEST_REPLICA` GPUs are not enough."""

    most: float = 0.0
    """For the goal `GPUS`: requests per second, or number of clients, that the available GPUs can serve."""

    placement: ShardedModel | None = None
    """The sharding that reaches the best value; None if there is none, and for the goal `CONTEXT`."""


def size(
    sized: SizedModel, demand: Demand, goals: LatencyGoals, supply: GpuSupply, backend: str = "vllm"
) -> Sizing | Shortfall:
    """Return the solution with the fewest GPUs that keeps all goals, or a goal that cannot be kept."""
    needed = demand.request.prompt_tokens + demand.request.answer_tokens
    if sized.context and needed > sized.context:
        return Shortfall(goal=SizingGoal.CONTEXT, wanted=needed, best=sized.context)
    within, room = min(supply.per_node, supply.gpus), ceil(needed / ONE_CONTEXT)
    shardings = [
        _SizedSharding(each, demand, goals, backend) for each in node_shardings(sized, supply.gpu, within, room)
    ]
    if not shardings:
        larger = next(node_shardings(sized, supply.gpu, LARGEST_REPLICA, room), None)
        best = larger.parallelism.gpus if larger is not None else 0
        return Shortfall(goal=SizingGoal.MEMORY, wanted=within, best=best, placement=larger)
    enough = [way for sharding in shardings if (way := _fewest(sharding, demand)) is not None]
    if not enough:
        return _missed_goal(shardings, goals)
    best_way = min(enough, key=_order)
    if best_way.gpus <= supply.gpus:
        return best_way
    most = max(_capacity(sharding, demand, supply.gpus) for sharding in shardings)
    return Shortfall(
        goal=SizingGoal.GPUS, wanted=supply.gpus, best=best_way.gpus, most=most, placement=best_way.placement
    )


class _SizedSharding:
    """Computes the limits of one engine with one sharding of the model."""

    def __init__(self, placement: ShardedModel, demand: Demand, goals: LatencyGoals, backend: str) -> None:
        self.placement = placement
        self.estimate = estimate(placement, backend)
        self.request = demand.request
        self.goals = goals
        self.occupancy = BatchOccupancy(percentile=goals.percentile, waiting_clients=demand.clients > 0)
        self.engine = EngineReplica(
            step=self.estimate.step,
            client=self.estimate.client,
            capacity_tokens=placement.kv_capacity_tokens(),
            most_running=MOST_RUNNING,
            budget_tokens=BUDGET_TOKENS,
        )
        self.room = highest_concurrency(self.engine, self.request)
        self.transfer = transfer_seconds(placement, placement, ceil(self.request.prompt_tokens))

    @property
    def gpus(self) -> int:
        return self.placement.parallelism.gpus

    @property
    def idle(self) -> float:
        """Mean number of running requests at the lowest load that a search for a limit tries.

        It is 1 if each client always has a request, and 0 if requests arrive at a rate, which may be near 0.
        """
        return 1.0 if self.occupancy.waiting_clients else 0.0

    # The methods below are for aggregated serving.

    @cached_property
    def aggregated(self) -> float:
        """Maximum number of running requests with which an aggregated engine keeps the goals, within `room` and `HEADROOM`.

        The number is 0 if even a lone request misses a goal.
        """

        def kept(running: float) -> bool:
            return (
                self.ttft(running) <= self.goals.ttft
                and self.tpot(running) <= self.goals.tpot
                and self._has_room(running)
                and self._has_headroom(aggregated_rate, running)
            )

        return highest_unbroken(kept, self.idle, self.room)

    def ttft(self, running: float) -> float:
        return aggregated_ttft(self.engine, self.request, self.occupancy, running)

    def tpot(self, running: float) -> float:
        return aggregated_tpot(self.engine, self.request, self.occupancy, running)

    # The methods below are for disaggregated serving.

    @cached_property
    def decode_running(self) -> float:
        """Maximum number of running requests with which a decode engine keeps the TPOT goal, within `room` and `HEADROOM`.

        The number is 0 if even a lone request misses the goal.
        """

        def kept(running: float) -> bool:
            return (
                self.decode_tpot(running) <= self.goals.tpot
                and self._has_room(running)
                and self._has_headroom(decode_rate, running)
            )

        return highest(kept, self.idle, self.room)

    def decode_tpot(self, running: float) -> float:
        return decode_tpot(self.engine, self.request, self.occupancy, running, self.transfer)

    @cached_property
    def prefill_rate(self) -> float:
        """Maximum number of prompts per second with which a prefill engine keeps the TTFT goal, within `HEADROOM`.

        The number is 0 if even a lone prompt misses the goal.
        """
        most = HEADROOM * highest_prefill_rate(self.engine, self.request)
        return highest(lambda rate: self.prefill_ttft(rate) <= self.goals.ttft, 0.0, most)

    def prefill_ttft(self, rate: float) -> float:
        return prefill_ttft(self.engine, self.request, self.occupancy, rate)

    def _has_room(self, running: float) -> bool:
        return self.occupancy.others(running) + 1.0 <= max(1.0, self.room)

    def _has_headroom(self, rate: Callable[[EngineReplica, RequestShape, float], float], running: float) -> bool:
        """Return whether an engine with this load uses at most the share `HEADROOM` of its throughput.

        Always return True for clients that wait for their answers, because these clients limit the load themselves.
        """
        if self.occupancy.waiting_clients:
            return True
        return rate(self.engine, self.request, running) <= HEADROOM * rate(self.engine, self.request, self.room)


def node_shardings(sized: SizedModel, gpu: Gpu, most: int, room_tokens: int) -> Iterator[ShardedModel]:
    """Yield the shardings over at most `most` GPUs of one node with room for `room_tokens` tokens.

    The shardings use only tensor parallelism, as Fleet's workers on one node do.
    """
    for each in feasible(sized.model, gpu, most, room_tokens=room_tokens):
        way = each.parallelism
        if way.tp == way.gpus and way.ep == 1:
            yield each


def _fewest(sharding: _SizedSharding, demand: Demand) -> Sizing | None:
    ways = [way for way in (_aggregated(sharding, demand), _disaggregated(sharding, demand)) if way is not None]
    return min(ways, key=_order, default=None)


def _order(way: Sizing) -> tuple[int, int, float]:
    return way.gpus, len(way.pools), -way.most


def _aggregated(sharding: _SizedSharding, demand: Demand) -> Sizing | None:
    if not (running := sharding.aggregated):
        return None
    if demand.clients:
        replicas = _replicas(demand.clients, running)
        most, here = replicas * running, max(1.0, demand.clients / replicas)
    else:
        limit = aggregated_rate(sharding.engine, sharding.request, running)
        replicas = _replicas(demand.rate, limit)
        most, here = replicas * limit, _running_at(sharding, aggregated_rate, demand.rate / replicas)
    pools = (SizedPool(role=Role.BOTH, replicas=replicas),)
    return _sizing(sharding, pools, sharding.ttft(here), sharding.tpot(here), most)


def _disaggregated(sharding: _SizedSharding, demand: Demand) -> Sizing | None:
    running, prompts = sharding.decode_running, sharding.prefill_rate
    if not running or not prompts:
        return None
    if demand.clients:
        decode = _replicas(demand.clients, running)
        here = max(1.0, demand.clients / decode)
        prefill = _replicas(rate := _highest_client_rate(sharding, demand.clients, here), prompts)
        # Only the decode engines limit the number of clients: if prompts wait for prefill, clients send fewer requests.
        most = decode * running
    else:
        limit = decode_rate(sharding.engine, sharding.request, running)
        rate = demand.rate
        decode, prefill = _replicas(rate, limit), _replicas(rate, prompts)
        most = min(decode * limit, prefill * prompts)
        here = _running_at(sharding, decode_rate, rate / decode)
    pools = (SizedPool(role=Role.PREFILL, replicas=prefill), SizedPool(role=Role.DECODE, replicas=decode))
    return _sizing(sharding, pools, sharding.prefill_ttft(rate / prefill), sharding.decode_tpot(here), most)


def _highest_client_rate(sharding: _SizedSharding, clients: float, running: float) -> float:
    """Return the rate at which waiting clients would send if no prompt had to wait for another one."""
    answer = sharding.request.answer_tokens * sharding.decode_tpot(running)
    return clients / (sharding.prefill_ttft(0.0) + answer)


def _sizing(sharding: _SizedSharding, pools: tuple[SizedPool, ...], ttft: float, tpot: float, most: float) -> Sizing:
    return Sizing(
        placement=sharding.placement, estimate=sharding.estimate, pools=pools, ttft=ttft, tpot=tpot, most=most
    )


def _replicas(load: float, limit: float) -> int:
    """Return the load divided by the limit, rounded up, and at least 1."""
    return max(1, ceil(min(load / limit, MOST_GPUS) - 1e-9))


def _running_at(
    sharding: _SizedSharding, rate: Callable[[EngineReplica, RequestShape, float], float], wanted: float
) -> float:
    """Return the mean number of running requests of an engine that serves `wanted` requests per second."""
    return highest(lambda running: rate(sharding.engine, sharding.request, running) <= wanted, 0.0, sharding.room)


def _capacity(sharding: _SizedSharding, demand: Demand, gpus: int) -> float:
    """Return the requests per second, or the clients, that `gpus` GPUs can serve, up to the load of `demand`."""

    def enough(load: float) -> bool:
        changed = structs.replace(demand, **{"clients" if demand.clients else "rate": load})
        way = _fewest(sharding, changed)
        return way is not None and way.gpus <= gpus

    load = demand.clients or demand.rate
    return highest(enough, 1e-6 * load, load)


def _missed_goal(shardings: list[_SizedSharding], goals: LatencyGoals) -> Shortfall:
    """Choose the sharding on which a lone request comes nearest to both goals; return the goal that it misses most there."""

    def missed(sharding: _SizedSharding) -> tuple[float, float, float, float]:
        ways = (
            (sharding.ttft(sharding.idle), sharding.tpot(sharding.idle)),
            (sharding.prefill_ttft(0.0), sharding.decode_tpot(sharding.idle)),
        )
        return min((max(ttft / goals.ttft, tpot / goals.tpot), ttft, tpot, sharding.gpus) for ttft, tpot in ways)

    nearest = min(shardings, key=missed)
    _, ttft, tpot, _ = missed(nearest)
    if ttft / goals.ttft >= tpot / goals.tpot:
        return Shortfall(goal=SizingGoal.TTFT, wanted=goals.ttft, best=ttft, placement=nearest.placement)
    return Shortfall(goal=SizingGoal.TPOT, wanted=goals.tpot, best=tpot, placement=nearest.placement)
