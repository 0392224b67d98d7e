"""Solver: finds the cheapest numbers of replicas that serve a rate, by integer programs for the solver HiGHS. Pure.

Rules:

1. Each request needs one prefill and one decode. Pools of the role `prefill` or `decode` serve one of these phases, and
   pools of the role `both` serve both. The served rate is the smaller of the rates that all pools together can serve in
   each phase, and at most the wanted rate.
2. The highest served rate is more important than the lowest price. A replica that has to be started costs more: its
   price is increased by 1 %, and by the share that its start-up time has of `HORIZON_SECONDS`. So the mix does not
   change if the change costs more than it saves. Each candidate may have another cost than its price, such as its power
   (`Candidate.cost`). This cost then replaces the price everywhere, except in the budget.
3. A mix keeps the bounds of the pools, the budgets and the ratio. Budgets also count replicas that end, because these keep
   their GPUs until they have drained. So new replicas may use only GPUs that are free already. If the present replicas
   exceed a budget, no replica is added before enough of them have drained.
4. The rate of a replica grows with the number of replicas in its pool, but an integer program needs fixed rates. So the
   numbers of replicas of a pool are divided into ranges, and all numbers of a range have the rate per replica of its
   largest number (`Range`). This is never less than their real rate, so no mix is better than the one that the solver finds.
   The last range has the rate of a number that serves the whole rate alone, because more replicas are never needed.
5. At first, each pool has one range. If the replicas of a pool serve less than the solver assumed, the ranges of this pool
   are divided further, so that its number of replicas is the largest of a range, and the solver is called again. If the
   replicas serve what the solver assumed, the mix is the best one. The same solution, with as many replicas more as the rate
   needs, is another mix. If this one costs at most the share `NEAR` more than the solution, the search ends, because no mix is
   cheaper than the solution. A single replica usually costs more than this share of a mix with fewer than a thousand replicas, so
   such a mix is still the best one, unless it has replicas that cost far less than others. (HiGHS 1.15 takes a worse solution for the best one in
   about one of 4,000 such programs. Without its presolve it does not, but takes up to ten times as long.)
6. After `ROUNDS` calls, the solver is called a last time, for the pools with divided ranges only, and with the rate per
   replica of the smallest number of each range. This is never more than the real rate. The best one of all mixes is returned.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Protocol

import highspy
import numpy as np
from msgspec import Struct, structs

from fleet.core.roles import Role
from fleet.planner.decisions import PlanBudget, PlannedPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

HORIZON_SECONDS = 1800.0
"""Seconds for which a chosen mix probably stays. The cost of starting a replica is spread over this time."""

ROUNDS = 12
"""Number of times that the ranges of pools are divided further, at most (rule 6)."""

NEAR = 1e-3
"""Relative distance to the cost of the best mix at which the search for it ends."""

COMPLETIONS = 4
"""Number of times that a phase of a solution gets more replicas, at most."""

RANGE_GROWTH = 1.25
"""When the ranges of a pool are divided for the first time, the largest number of a range is this many times that of the range
before it, or one more."""

GAP = 1e-6
"""Relative distance to the optimal value at which the solver may stop."""

TIME_LIMIT_SECONDS = 5.0
"""Time limit in seconds for one integer program. The slowest one that was measured, for 72 pools, took 0.7 s."""

KEPT = 256
"""Number of programs whose solutions are cached. If the load is steady, two thirds of all programs occur again, for the
same decision or a later one."""

ROUNDING = 1e-9
ENOUGH = 1.0 - 1e-6
"""If at least this share of a rate can be served, the whole rate counts as served, because the rest is a rounding
error."""


class Candidate(Struct, frozen=True, kw_only=True):
    """Describes a pool for the solver: its bounds and its present replicas."""

    pool: PlannedPool
    least: int
    most: int
    cost: float | None = None
    """Cost of one replica that the solver minimises, such as its watts; None: its dollars per hour."""

    now: int = 0
    """Number of replicas that are requested now. Each replica above this number has to be started."""

    held: int = 0
    """Number of replicas that hold GPUs now, without draining ones."""

    draining: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.least <= self.most, (self.pool.name, self.least, self.most)

    @property
    def dollars(self) -> float:
        """Dollars per hour of one replica."""
        return self.pool.replica_dollars


class SolverTimeout(RuntimeError):
    """The solver did not find the optimal solution within its time limit. It is unknown whether a solution exists."""


class Rates(Protocol):
    """Port: a function that tells how many requests per second some replicas of a pool serve together."""

    def __call__(self, pool: PlannedPool, replicas: int) -> float:
        """Return the requests per second that the replicas serve together."""
        ...


class Mix(Struct, frozen=True, kw_only=True):
    """Holds a solution: the number of replicas of each candidate, the rate that they serve, and their cost."""

    replicas: tuple[int, ...]
    """Number of replicas of each candidate, in the order of the candidates."""

    served: float
    """Requests per second that the replicas serve within the goals, at most the wanted rate."""

    dollars: float
    """Dollars per hour of all replicas."""


class Range(Struct, frozen=True):
    """A range of numbers of replicas of one pool, for which the solver assumes one rate per replica."""

    least: int
    most: int
    rate: float
    """Assumed requests per second of one replica."""


Ranges = tuple[Range, ...]
"""The ranges of one pool in ascending order, from 1 replica to the maximum of the pool; empty: the maximum is 0."""


def solve(candidates: Sequence[Candidate], rate: float, rates: Rates, budget: PlanBudget) -> Mix | None:
    """Return the cheapest mix that serves the rate, or None if the limits contradict each other.

    If the limits do not allow the whole rate, return the cheapest mix that serves the largest part of it.

    Raises:
        SolverTimeout: The first program took longer than `TIME_LIMIT_SECONDS`. If a later one does, the best mix that was found
            before is returned.
    """
    simple = _one_pool_each(candidates, rate, rates, budget)
    if simple is not None:
        return simple
    mixes: list[Mix] = []
    try:
        for found in _solutions(candidates, rate, rates, budget):
            mixes.append(_mix(candidates, _trimmed(candidates, found, rate, rates, budget), rate, rates))  # noqa: PERF401 - kept at a timeout
    except SolverTimeout:
        if not mixes:
            raise
    if not mixes:
        return None
    most = max(each.served for each in mixes)
    return min(
        (each for each in mixes if each.served >= most * ENOUGH), key=lambda mix: _cost(candidates, mix.replicas)
    )


def _solutions(
    candidates: Sequence[Candidate], rate: float, rates: Rates, budget: PlanBudget
) -> Iterator[Sequence[int]]:
    """Yield the numbers of replicas that each call of the solver finds (rules 5 and 6); nothing if the limits contradict each other.

    Raises:
        SolverTimeout: A program took longer than `TIME_LIMIT_SECONDS`.
    """
    ranges = [_one_range(each, rate, rates) for each in candidates]
    for _ in range(ROUNDS):
        found = _solve(candidates, rate, ranges, budget)
        if found is None:
            return
        yield found
        assumed = [_assumed(each, count) for each, count in zip(ranges, found, strict=True)]
        expected = _served(candidates, assumed, rate)
        if served(candidates, found, rate, rates) >= expected * ENOUGH:
            return
        if expected >= rate * ENOUGH and (near := _completed(candidates, found, rate, rates, budget)) is not None:
            yield near
            if _cost(candidates, near) <= _cost(candidates, found) * (1.0 + NEAR):
                return
        ranges = [
            _divided(one, each, count, rate, rates) if count and rates(one.pool, count) < total * ENOUGH else each
            for one, each, count, total in zip(candidates, ranges, found, assumed, strict=True)
        ]
    divided = [
        one if len(each) > 1 else structs.replace(one, most=one.least)
        for one, each in zip(candidates, ranges, strict=True)
    ]
    least = [_least_rates(one, each, rates) for one, each in zip(divided, ranges, strict=True)]
    if (found := _solve(divided, rate, least, budget)) is not None:
        yield found


def _completed(
    candidates: Sequence[Candidate], found: Sequence[int], rate: float, rates: Rates, budget: PlanBudget
) -> list[int] | None:
    """Return a solution with as many replicas more as the rate needs; None if no further ones are allowed in its pools.

    Each phase gets them in the pool with the lowest cost per request.
    """
    replicas = list(found)
    for phase in (Role.PREFILL, Role.DECODE):
        able = [
            index for index, each in enumerate(candidates) if each.pool.role in {phase, Role.BOTH} and replicas[index]
        ]
        for _ in range(COMPLETIONS):
            totals = {index: rates(candidates[index].pool, replicas[index]) for index in able}
            lacking = rate - sum(totals.values())
            room = [index for index in able if totals[index] and replicas[index] < candidates[index].most]
            if lacking <= rate * ROUNDING or not room:
                break
            best = min(room, key=lambda index: _price(candidates[index]) * replicas[index] / totals[index])
            more = ceil(lacking * replicas[best] / totals[best])
            replicas[best] = min(candidates[best].most, replicas[best] + more)
    if served(candidates, replicas, rate, rates) < rate * ENOUGH or not within_budget(candidates, replicas, budget):
        return None
    return replicas


def _cost(candidates: Sequence[Candidate], replicas: Sequence[int]) -> float:
    """Return what the solver minimises: the price of all replicas, and that of starting those that do not exist yet."""
    return sum(
        _price(each) * count + _start_price(each) * max(0, count - each.now)
        for each, count in zip(candidates, replicas, strict=True)
    )


def _price(candidate: Candidate) -> float:
    """Return the cost of a replica or, if it is 0, its number of GPUs."""
    cost = candidate.dollars if candidate.cost is None else candidate.cost
    return cost or float(candidate.pool.replica_gpus or 1)


def _start_price(candidate: Candidate) -> float:
    """Return the price of starting a replica (rule 2)."""
    return _price(candidate) * (0.01 + candidate.pool.start_seconds / HORIZON_SECONDS)


def _assumed(ranges: Ranges, replicas: int) -> float:
    """Return the requests per second of all replicas of a pool that the solver assumes."""
    return next((each.rate * replicas for each in ranges if each.least <= replicas <= each.most), 0.0)


def _divided(candidate: Candidate, ranges: Ranges, replicas: int, rate: float, rates: Rates) -> Ranges:
    """Return ranges of which `replicas` is the largest number of one (rule 5).

    A pool with one range gets ranges whose largest numbers grow by `RANGE_GROWTH`, up to the number that serves the rate alone.
    """
    ends = {each.most for each in ranges} | {replicas}
    if len(ranges) == 1:
        end = 1
        while end < ranges[0].most and end * ranges[0].rate < rate:
            ends.add(end)
            end = max(end + 1, int(end * RANGE_GROWTH))
    last = max(ends)
    divided, least = [], 1
    for end in sorted(ends):
        assumed = ranges[-1].rate if end == last else rates(candidate.pool, end) / end
        divided.append(Range(least, end, assumed))
        least = end + 1
    return tuple(divided)


def _least_rates(candidate: Candidate, ranges: Ranges, rates: Rates) -> Ranges:
    """Return the same ranges with the rates of their smallest numbers (rule 6)."""
    return tuple(
        structs.replace(each, rate=rates(candidate.pool, each.least) / each.least)
        for each in ranges
        if each.least <= candidate.most
    )


def served(candidates: Sequence[Candidate], replicas: Sequence[int], rate: float, rates: Rates) -> float:
    """Return the requests per second that the given replicas serve, but at most `rate`."""
    totals = [rates(each.pool, count) if count else 0.0 for each, count in zip(candidates, replicas, strict=True)]
    return _served(candidates, totals, rate)


def within_budget(candidates: Sequence[Candidate], replicas: Sequence[int], budget: PlanBudget) -> bool:
    """Return whether the limits allow a change to the given replicas.

    Budgets have to be kept at every instant of the change, and the ratio after the change.
    """
    gpus = dollars = 0.0
    for each, count in zip(candidates, replicas, strict=True):
        held = max(count, each.held) + each.draining
        gpus += held * each.pool.replica_gpus
        dollars += held * each.dollars
    return (
        (budget.gpus is None or gpus <= budget.gpus)
        and (budget.dollars_per_hour is None or dollars <= budget.dollars_per_hour + ROUNDING)
        and within_ratio(candidates, replicas, budget)
    )


def within_ratio(candidates: Sequence[Candidate], replicas: Sequence[int], budget: PlanBudget) -> bool:
    """Return whether the numbers of prefill and decode replicas keep the bounds of the ratio."""
    prefill = sum(count for each, count in zip(candidates, replicas, strict=True) if each.pool.role is Role.PREFILL)
    decode = sum(count for each, count in zip(candidates, replicas, strict=True) if each.pool.role is Role.DECODE)
    return (budget.least_ratio is None or prefill >= budget.least_ratio * decode - ROUNDING) and (
        budget.most_ratio is None or prefill <= budget.most_ratio * decode + ROUNDING
    )


def _served(candidates: Sequence[Candidate], totals: Sequence[float], rate: float) -> float:
    prefill = sum(total for each, total in zip(candidates, totals, strict=True) if each.pool.role is not Role.DECODE)
    decode = sum(total for each, total in zip(candidates, totals, strict=True) if each.pool.role is not Role.PREFILL)
    return min(rate, prefill, decode)


def _mix(candidates: Sequence[Candidate], replicas: Sequence[int], rate: float, rates: Rates) -> Mix:
    return Mix(
        replicas=tuple(replicas),
        served=served(candidates, replicas, rate, rates),
        dollars=sum(each.dollars * count for each, count in zip(candidates, replicas, strict=True)),
    )


def _trimmed(
    candidates: Sequence[Candidate], replicas: Sequence[int], rate: float, rates: Rates, budget: PlanBudget
) -> list[int]:
    """Return the numbers of replicas without those that the rate does not need.

    Such replicas can remain in a solution if the solver computed with rates that are too low (rule 6), or because it stops
    at a small distance from the best solution (`GAP`).

    The most expensive replicas are removed first.
    """
    trimmed, wanted = list(replicas), served(candidates, replicas, rate, rates) * (1.0 - ROUNDING)
    for index in sorted(range(len(trimmed)), key=lambda index: -_price(candidates[index])):
        while trimmed[index] > candidates[index].least:
            trimmed[index] -= 1
            if served(candidates, trimmed, rate, rates) < wanted or not within_ratio(candidates, trimmed, budget):
                trimmed[index] += 1
                break
    return trimmed


def _one_pool_each(candidates: Sequence[Candidate], rate: float, rates: Rates, budget: PlanBudget) -> Mix | None:
    """Return the mix with the smallest number of replicas of each pool, or None if the solver is needed to find the best mix.

    The solver is not needed if no two pools serve the same phase, and if the limits allow the result. No other pool can
    then replace these replicas, so the result is optimal. Most deployments have such pools, and the solver would take
    longer.
    """
    roles = [each.pool.role for each in candidates]
    if len(set(roles)) != len(roles) or (Role.BOTH in roles and len(roles) > 1):
        return None
    if Role.BOTH not in roles and set(roles) != {Role.PREFILL, Role.DECODE}:
        return None
    most = min(rates(each.pool, each.most) if each.most else 0.0 for each in candidates)
    replicas = [fewest(each, min(rate, most), rates) for each in candidates]
    return _mix(candidates, replicas, rate, rates) if within_budget(candidates, replicas, budget) else None


def fewest(candidate: Candidate, rate: float, rates: Rates) -> int:
    """Return the smallest number of replicas of a pool, within its bounds, that serves a rate.

    The caller must make sure that the maximum number of replicas serves the rate.
    """
    if rate <= 0.0:
        return candidate.least
    low, high = max(1, candidate.least), candidate.most
    while low < high:
        middle = (low + high) // 2
        if rates(candidate.pool, middle) >= rate * (1.0 - ROUNDING):
            high = middle
        else:
            low = middle + 1
    return low


def _one_range(candidate: Candidate, rate: float, rates: Rates) -> Ranges:
    """Return one range of all numbers of replicas of a pool.

    It has the rate per replica of a number that serves the whole rate alone. This number is at least 1, the pool's minimum, and the
    present number of the pool, but at most the maximum of the pool.
    """
    if candidate.most == 0:
        return ()
    one = rates(candidate.pool, 1)
    enough = max(1, candidate.least, candidate.now, ceil(rate / one) if one > 0.0 else candidate.most)
    count = min(candidate.most, enough)
    return (Range(1, candidate.most, rates(candidate.pool, count) / count),)


def _highs() -> Any:
    """Return a new solver object; each program needs one of its own.

    The planners of a cluster share a process, and each decides in a thread of its own. HiGHS releases Python's global lock while it
    runs. So two programs that run in one object at the same time would overwrite each other, or crash the process. It takes 0.1 ms
    to create an object.
    """
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", GAP)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", TIME_LIMIT_SECONDS)
    # This heuristic looks for a first solution of hard programs; for our programs it only takes time.
    solver.setOptionValue("mip_heuristic_run_feasibility_jump", False)
    return solver


def _solve(
    candidates: Sequence[Candidate], rate: float, ranges: Sequence[Ranges], budget: PlanBudget
) -> list[int] | None:
    """Return the cheapest numbers that serve the largest possible rate, or None if the limits contradict each other.

    Usually the limits allow the whole rate, and one program is enough. If not, a program without prices computes the
    highest rate, which becomes a bound of another program. No program has both the rate and the prices in its objective:
    the distance at which the solver may stop (`GAP`) is relative to the whole objective, so a large weight of the rate
    would allow for needless replicas.
    """
    program = (tuple(candidates), rate, tuple(ranges), budget)
    if (found := _minimise(*program, least_served=rate * ENOUGH)) is not None:
        return list(found[0])
    if (most := _minimise(*program, by_price=False)) is None:
        return None
    return list((_minimise(*program, least_served=most[1] * ENOUGH) or most)[0])


@lru_cache(maxsize=KEPT)
def _minimise(
    candidates: tuple[Candidate, ...],
    rate: float,
    ranges: tuple[Ranges, ...],
    budget: PlanBudget,
    *,
    by_price: bool = True,
    least_served: float = 0.0,
) -> tuple[tuple[int, ...], float] | None:
    """Solve one integer program; return the number of replicas of each candidate and the served rate.

    The variables are the served rate r and, for each candidate, n (replicas), s (started replicas) and h (replicas that
    hold GPUs). A candidate with several ranges has two more variables for each range: b is 1 if its number of replicas is in
    the range, and m is this number then, and otherwise 0. Minimise the cost of n and s or, if `by_price` is false, minus r.
    The constraints are: n - s <= now, h - n >= 0, h >= held, both phases serve r, r >= least_served, budgets
    and ratio; with several ranges also n = the sum of all m, the sum of all b <= 1, and b * least <= m <= b * most. Return
    None if there is no solution.
    """
    count = len(candidates)
    divided = [(index, each) for index, ranges_ in enumerate(ranges) if len(ranges_) > 1 for each in ranges_]
    numbers, chosen = 3 * count + 1, 3 * count + 1 + len(divided)
    columns = chosen + len(divided)
    cost = [_price(each) for each in candidates]
    start = [_start_price(each) for each in candidates]
    rows = _Rows(columns)
    for index, each in enumerate(candidates):
        rows.add({index: 1.0, count + index: -1.0}, -inf, float(each.now))
        rows.add({2 * count + index: 1.0, index: -1.0}, 0.0, inf)
    totals: list[dict[int, float]] = [
        {index: each[0].rate} if len(each) == 1 else {} for index, each in enumerate(ranges)
    ]
    for place, (index, one_range) in enumerate(divided):
        totals[index][numbers + place] = one_range.rate
        rows.add({numbers + place: 1.0, chosen + place: -float(one_range.least)}, 0.0, inf)
        rows.add({numbers + place: 1.0, chosen + place: -float(one_range.most)}, -inf, 0.0)
    for index in dict(divided):
        places = [place for place, (other, _) in enumerate(divided) if other == index]
        rows.add({index: 1.0} | {numbers + place: -1.0 for place in places}, 0.0, 0.0)
        rows.add({chosen + place: 1.0 for place in places}, 0.0, 1.0)
    for other_role in (Role.DECODE, Role.PREFILL):
        phase = {
            column: one
            for each, total in zip(candidates, totals, strict=True)
            if each.pool.role is not other_role
            for column, one in total.items()
        }
        rows.add({**phase, 3 * count: -1.0}, 0.0, inf)
    for limit, prices in (
        (budget.gpus, [float(each.pool.replica_gpus) for each in candidates]),
        (budget.dollars_per_hour, [each.dollars for each in candidates]),
    ):
        if limit is None:
            continue
        held = sum(one * each.held for one, each in zip(prices, candidates, strict=True))
        drains = sum(one * each.draining for one, each in zip(prices, candidates, strict=True))
        rows.add(dict(enumerate(prices)), -inf, limit)
        # If the present replicas already exceed a limit, they may stay, but no replica may be added.
        rows.add({2 * count + index: one for index, one in enumerate(prices)}, -inf, max(limit - drains, held))
    for ratio, sign in ((budget.least_ratio, 1.0), (budget.most_ratio, -1.0)):
        if ratio is not None:
            rows.add(
                {
                    index: sign if each.pool.role is Role.PREFILL else -sign * ratio
                    for index, each in enumerate(candidates)
                    if each.pool.role is not Role.BOTH
                },
                0.0,
                inf,
            )
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = columns, rows.count
    objective = [*cost, *start, *([0.0] * (count + 1))] if by_price else [*([0.0] * 3 * count), -1.0]
    program.col_cost_ = np.array([*objective, *([0.0] * (2 * len(divided)))])
    program.col_lower_ = np.array(
        [
            *(float(each.least) for each in candidates),
            *([0.0] * count),
            *(float(each.held) for each in candidates),
            least_served,
            *([0.0] * (2 * len(divided))),
        ]
    )
    program.col_upper_ = np.array(
        [
            *(float(each.most) for each in candidates),
            *([inf] * (2 * count)),
            max(0.0, rate),
            *(float(each.most) for _, each in divided),
            *([1.0] * len(divided)),
        ]
    )
    program.row_lower_, program.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_, program.a_matrix_.index_, program.a_matrix_.value_ = rows.matrix()
    whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    program.integrality_ = [whole] * count + [real] * (2 * count + 1 + len(divided)) + [whole] * len(divided)
    solver = _highs()
    solver.passModel(program)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kTimeLimit:
        raise SolverTimeout(f"the solver found no optimal solution for {count} pools within {TIME_LIMIT_SECONDS:g} s")
    if status != highspy.HighsModelStatus.kOptimal:
        return None
    values = solver.getSolution().col_value
    return tuple(round(each) for each in values[:count]), float(values[3 * count])


class _Rows:
    """Builds the sparse matrix of an integer program row by row, with the bounds of each row."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._starts = [0]
        self._indices: list[int] = []
        self._values: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    @property
    def count(self) -> int:
        return len(self.lower)

    def add(self, row: dict[int, float], lower: float, upper: float) -> None:
        self._indices.extend(row)
        self._values.extend(row.values())
        self._starts.append(len(self._indices))
        self.lower.append(lower)
        self.upper.append(upper)

    def matrix(self) -> "tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]]":
        return (
            np.array(self._starts, dtype=np.int32),
            np.array(self._indices, dtype=np.int32),
            np.array(self._values, dtype=np.float64),
        )
