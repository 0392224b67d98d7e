"""How many engines of which cut keep a promise: the fewest GPUs for a workload and its goals, or which goal cannot be kept. Pure.

Rules:

1. A cut is a model on so many GPUs of one node, by tensor parallelism. For each there is a limit: the most requests a second that one engine
   takes while both goals are kept (`open_loop`) and `HEADROOM` of its throughput is not passed. Replicas are the rate over that limit,
   rounded up; with clients that wait for answers their number over how many one engine runs at a time.
2. Engines compute prompts and answers together, or some of them prompts and others answers: then each kind has a limit of its own.
3. Of all that keep the goals the fewest GPUs count; of equals, those that need no hand-off; then those that take most.
4. More work never gets fewer GPUs, nor do looser goals get more: limits grow with goals, and are found in what grows with the load.
5. What cannot be is a `Shortfall`: of one goal, with the best that this hardware could do. It is looked for in the order in which things help:
   memory, then each goal with an engine of one's own, then the number of GPUs.
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
"""Of an engine's throughput that is planned with: what arrives is never quite what was said, and waits grow without bound near 1."""

MOST_RUNNING = 256
"""Requests in one batch, as proposals tell engines: vLLM's own default on GPUs below 70 GiB; larger ones take 1,024 when nobody says (0.32)."""

MOST_GPUS = 1_000_000
"""That are counted to when it is said how many would do."""

HALVINGS = 40
"""Of an interval in which a limit lies; more would not change a float."""

LEAST_STRIDE = 0.25
STRIDE = 1.1
"""Between the loads that are looked at, in requests that run, and as a factor: what is computed has humps, and none as narrow as that."""

ONE_CONTEXT = 0.8
"""Of the KV that an engine is computed to hold, what one request may take: engines refuse to start where the longest one would not fit, and what
they find at hand is never quite what was computed."""

LARGEST_REPLICA = 64
"""GPUs, when it is looked for what would hold a model."""


class SizingGoal(StrEnum):
    """What may stand in the way."""

    MEMORY = "memory"
    """GPUs of one node that one engine needs at least."""

    CONTEXT = "context"
    """Tokens of prompt and answer together."""

    TTFT = "ttft"
    TPOT = "tpot"
    GPUS = "gpus"


class Demand(Struct, frozen=True, kw_only=True):
    """What comes; either `rate` or `clients` is above 0."""

    request: RequestShape
    rate: float = 0.0
    """Requests a second."""

    clients: float = 0.0
    """Each of which waits for its answer and asks again."""

    def __post_init__(self) -> None:
        assert (self.rate > 0) != (self.clients > 0), "one of rate and clients"


class LatencyGoals(Struct, frozen=True, kw_only=True):
    ttft: float
    """Seconds to the first token."""

    tpot: float
    """Seconds of each further one."""

    percentile: float
    """Share of all requests that keep each of them."""


class GpuSupply(Struct, frozen=True, kw_only=True):
    """GPUs that there are."""

    gpu: Gpu
    gpus: int
    per_node: int


class SizedPool(Struct, frozen=True, kw_only=True):
    """Engines that are alike."""

    role: Role
    replicas: int


class Sizing(Struct, frozen=True, kw_only=True):
    """Enough."""

    placement: ShardedModel
    """Of each engine."""

    estimate: StepModelEstimate
    """What its step times rest on."""

    pools: tuple[SizedPool, ...]
    ttft: float
    """Seconds, at the percentile that was asked for."""

    tpot: float
    most: float
    """Requests a second, or clients, for which these engines would do."""

    @property
    def gpus(self) -> int:
        return sum(pool.replicas for pool in self.pools) * self.placement.parallelism.gpus

    @property
    def room(self) -> int:
        """Tokens of the longest request that an engine can be started for."""
        return int(ONE_CONTEXT * self.placement.kv_capacity_tokens())


class Shortfall(Struct, frozen=True, kw_only=True):
    """A goal that cannot be kept."""

    goal: SizingGoal
    wanted: float
    """Seconds, GPUs or tokens: what was asked for, or what there is."""

    best: float
    """The nearest to it that can be had; of GPUs: how many it would take. 0: nothing will do."""

    most: float = 0.0
    """Of GPUs: requests a second, or clients, that those that there are would do for."""

    placement: ShardedModel | None = None
    """Of an engine that reaches the best."""


def size(
    sized: SizedModel, demand: Demand, goals: LatencyGoals, supply: GpuSupply, backend: str = "vllm"
) -> Sizing | Shortfall:
    """Find out.

    Args:
        sized: The model.
        demand: On it.
        goals: To be kept.
        supply: To keep them with.
        backend: Engine whose measured efficiencies count.
    """
    needed = demand.request.prompt_tokens + demand.request.answer_tokens
    if sized.context and needed > sized.context:
        return Shortfall(goal=SizingGoal.CONTEXT, wanted=needed, best=sized.context)
    within, room = min(supply.per_node, supply.gpus), ceil(needed / ONE_CONTEXT)
    cuts = [_SizedSharding(each, demand, goals, backend) for each in _cuts(sized, supply.gpu, within, room)]
    if not cuts:
        larger = next(_cuts(sized, supply.gpu, LARGEST_REPLICA, room), None)
        best = larger.parallelism.gpus if larger is not None else 0
        return Shortfall(goal=SizingGoal.MEMORY, wanted=within, best=best, placement=larger)
    enough = [way for cut in cuts if (way := _fewest(cut, demand)) is not None]
    if not enough:
        return _out_of_reach(cuts, goals)
    best_way = min(enough, key=_order)
    if best_way.gpus <= supply.gpus:
        return best_way
    most = max(_most_of(cut, demand, supply.gpus) for cut in cuts)
    return Shortfall(
        goal=SizingGoal.GPUS, wanted=supply.gpus, best=best_way.gpus, most=most, placement=best_way.placement
    )


class _SizedSharding:
    """A cut, and the limits of one engine of it."""

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
        """How many run on average, while hardly anybody comes."""
        return 1.0 if self.occupancy.waiting_clients else 0.0

    # Prompts and answers together.

    @cached_property
    def together(self) -> float:
        """Most that run in one engine; 0: not even one."""

        def kept(running: float) -> bool:
            return (
                self.first(running) <= self.goals.ttft
                and self.token(running) <= self.goals.tpot
                and self._has_room(running)
                and self._has_headroom(aggregated_rate, running)
            )

        return _unbroken(kept, self.idle, self.room)

    def first(self, running: float) -> float:
        return aggregated_ttft(self.engine, self.request, self.occupancy, running)

    def token(self, running: float) -> float:
        return aggregated_tpot(self.engine, self.request, self.occupancy, running)

    # Apart.

    @cached_property
    def answers(self) -> float:
        """Most that run in an engine that computes answers alone; 0: not even one."""

        def kept(running: float) -> bool:
            return (
                self.answer(running) <= self.goals.tpot
                and self._has_room(running)
                and self._has_headroom(decode_rate, running)
            )

        return _highest(kept, self.idle, self.room)

    def answer(self, running: float) -> float:
        return decode_tpot(self.engine, self.request, self.occupancy, running, self.transfer)

    @cached_property
    def prompts(self) -> float:
        """Most prompts a second of an engine that computes them alone; 0: none."""
        most = HEADROOM * highest_prefill_rate(self.engine, self.request)
        return _highest(lambda rate: self.prompt(rate) <= self.goals.ttft, 0.0, most)

    def prompt(self, rate: float) -> float:
        return prefill_ttft(self.engine, self.request, self.occupancy, rate)

    def _has_room(self, running: float) -> bool:
        return self.occupancy.others(running) + 1.0 <= max(1.0, self.room)

    def _has_headroom(self, rate: Callable[[EngineReplica, RequestShape, float], float], running: float) -> bool:
        """Clients that wait bring no more than there are of them."""
        if self.occupancy.waiting_clients:
            return True
        return rate(self.engine, self.request, running) <= HEADROOM * rate(self.engine, self.request, self.room)


def _cuts(sized: SizedModel, gpu: Gpu, most: int, room_tokens: int) -> Iterator[ShardedModel]:
    """By tensor parallelism alone: all that our workers start on one node."""
    for each in feasible(sized.model, gpu, most, room_tokens=room_tokens):
        way = each.parallelism
        if way.tp == way.gpus and way.ep == 1:
            yield each


def _fewest(cut: _SizedSharding, demand: Demand) -> Sizing | None:
    ways = [way for way in (_together(cut, demand), _apart(cut, demand)) if way is not None]
    return min(ways, key=_order, default=None)


def _order(way: Sizing) -> tuple[int, int, float]:
    return way.gpus, len(way.pools), -way.most


def _together(cut: _SizedSharding, demand: Demand) -> Sizing | None:
    if not (running := cut.together):
        return None
    if demand.clients:
        replicas = _times(demand.clients, running)
        most, here = replicas * running, max(1.0, demand.clients / replicas)
    else:
        limit = aggregated_rate(cut.engine, cut.request, running)
        replicas = _times(demand.rate, limit)
        most, here = replicas * limit, _running(cut, aggregated_rate, demand.rate / replicas)
    pools = (SizedPool(role=Role.BOTH, replicas=replicas),)
    return _sizing(cut, pools, cut.first(here), cut.token(here), most)


def _apart(cut: _SizedSharding, demand: Demand) -> Sizing | None:
    running, prompts = cut.answers, cut.prompts
    if not running or not prompts:
        return None
    if demand.clients:
        decode = _times(demand.clients, running)
        here = max(1.0, demand.clients / decode)
        prefill = _times(rate := _asked(cut, demand.clients, here), prompts)
        # Were prefill what limits them, clients would wait there, and ask less often.
        most = decode * running
    else:
        limit = decode_rate(cut.engine, cut.request, running)
        rate = demand.rate
        decode, prefill = _times(rate, limit), _times(rate, prompts)
        most = min(decode * limit, prefill * prompts)
        here = _running(cut, decode_rate, rate / decode)
    pools = (SizedPool(role=Role.PREFILL, replicas=prefill), SizedPool(role=Role.DECODE, replicas=decode))
    return _sizing(cut, pools, cut.prompt(rate / prefill), cut.answer(here), most)


def _asked(cut: _SizedSharding, clients: float, running: float) -> float:
    """Requests a second of clients that wait, at most: as if no prompt had to wait for another one."""
    answer = cut.request.answer_tokens * cut.answer(running)
    return clients / (cut.prompt(0.0) + answer)


def _sizing(cut: _SizedSharding, pools: tuple[SizedPool, ...], ttft: float, tpot: float, most: float) -> Sizing:
    return Sizing(placement=cut.placement, estimate=cut.estimate, pools=pools, ttft=ttft, tpot=tpot, most=most)


def _times(load: float, limit: float) -> int:
    """How often a limit goes into a load, the last time perhaps not quite; at least once."""
    return max(1, ceil(min(load / limit, MOST_GPUS) - 1e-9))


def _running(cut: _SizedSharding, rate: Callable[[EngineReplica, RequestShape, float], float], wanted: float) -> float:
    """How many run at that rate."""
    return _highest(lambda running: rate(cut.engine, cut.request, running) <= wanted, 0.0, cut.room)


def _most_of(cut: _SizedSharding, demand: Demand, gpus: int) -> float:
    """Requests a second, or clients, that so many GPUs would do for."""

    def enough(load: float) -> bool:
        changed = structs.replace(demand, **{"clients" if demand.clients else "rate": load})
        way = _fewest(cut, changed)
        return way is not None and way.gpus <= gpus

    load = demand.clients or demand.rate
    return _highest(enough, 1e-6 * load, load)


def _out_of_reach(cuts: list[_SizedSharding], goals: LatencyGoals) -> Shortfall:
    """The goal that is missed by most, on the cut that comes nearest to keeping both, with nobody else there."""

    def missed(cut: _SizedSharding) -> tuple[float, float, float, float]:
        ways = (
            (cut.first(cut.idle), cut.token(cut.idle)),
            (cut.prompt(0.0), cut.answer(cut.idle)),
        )
        return min((max(ttft / goals.ttft, tpot / goals.tpot), ttft, tpot, cut.gpus) for ttft, tpot in ways)

    nearest = min(cuts, key=missed)
    _, ttft, tpot, _ = missed(nearest)
    if ttft / goals.ttft >= tpot / goals.tpot:
        return Shortfall(goal=SizingGoal.TTFT, wanted=goals.ttft, best=ttft, placement=nearest.placement)
    return Shortfall(goal=SizingGoal.TPOT, wanted=goals.tpot, best=tpot, placement=nearest.placement)


def _unbroken(kept: Callable[[float], bool], least: float, most: float) -> float:
    """The highest load below which all are kept, where a higher one may be kept again; 0 where the least is not.

    In a full batch a short prompt costs the others less than in a small one, so a goal may be missed by few and kept by many.
    """
    if not kept(least):
        return 0.0
    low = least
    while low < most:
        high = min(most, max(STRIDE * low, low + LEAST_STRIDE))
        if not kept(high):
            return _highest(kept, low, high)
        low = high
    return low


def _highest(kept: Callable[[float], bool], least: float, most: float) -> float:
    """The highest load that is kept, where what is not kept is higher; 0 where the least is not."""
    if not kept(least):
        return 0.0
    if kept(most):
        return max(most, least)
    low, high = least, most
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if kept(middle):
            low = middle
        else:
            high = middle
    return low
