"""Solver: finds the cheapest numbers of replicas that serve a rate, by integer programs for the solver HiGHS. Pure.

Rules:

1. Each request needs one prefill and one decode. Pools of the role `prefill` or `decode` serve one of these phases, and
   pools of the role `both` serve both. The served rate is the smaller of the rates that all pools together can serve in
   each phase, and at most the wanted rate.
2. The highest served rate is more important than the lowest price. A replica that has to be started costs more: its
   price is increased by 1 %, and by the share that its start-up time has of `HORIZON_SECONDS`. So the mix does not
   change if the change costs more than it saves.
3. A mix keeps the bounds of the pools, the budgets and the ratio. Budgets also count replicas that end, because these keep
   their GPUs until they have drained. So new replicas may use only GPUs that are free already. If the present replicas
   exceed a budget, no replica is added before enough of them have drained.
4. An integer program needs a fixed rate for each replica, but this rate grows with the number of replicas in the pool.
   So the solver is called again with the rates for the numbers of replicas that it has found. This is repeated until the
   replicas really serve the rate that the solver computed, but the solver is called at most `ROUNDS` times. The rates per
   replica only fall from one call to the next one.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Protocol

import highspy
import numpy as np
from msgspec import Struct

from fleet.core.roles import Role
from fleet.planner.decisions import PlanBudget, PlannedPool

if TYPE_CHECKING:
    from numpy.typing import NDArray

HORIZON_SECONDS = 1800.0
"""Seconds for which a chosen mix probably stays. The cost of starting a replica is spread over this time."""

ROUNDS = 8
SERVED_FIRST = 100.0
"""Weight of the served rate in the objective of the program, relative to prices. One more served request per second
weighs this many times as much as its price in the pool where it is most expensive, counted once for each phase."""

GAP = 1e-6
"""Relative distance to the optimal value at which the solver may stop."""

TIME_LIMIT_SECONDS = 5.0
"""Time limit in seconds for one integer program. The largest programs that were measured take a quarter of a second."""

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


def solve(candidates: Sequence[Candidate], rate: float, rates: Rates, budget: PlanBudget) -> Mix | None:
    """Return the cheapest mix that serves the rate, or None if the limits contradict each other.

    If the limits do not allow the whole rate, return the cheapest mix that serves the largest part of it.

    Raises:
        SolverTimeout: A program took longer than `TIME_LIMIT_SECONDS`.
    """
    simple = _one_pool_each(candidates, rate, rates, budget)
    if simple is not None:
        return simple
    per_replica = [_alone(each, rate, rates) for each in candidates]
    found: list[int] | None = None
    for _ in range(ROUNDS):
        found = _solve(candidates, rate, per_replica, budget)
        if found is None:
            return None
        lower = [
            min(each, rates(one.pool, count) / count) if count else each
            for one, count, each in zip(candidates, found, per_replica, strict=True)
        ]
        promised = _served(candidates, [each * count for each, count in zip(per_replica, found, strict=True)], rate)
        if served(candidates, found, rate, rates) >= promised * (1.0 - 1e-6):
            break
        per_replica = lower
    assert found is not None
    return _mix(candidates, _trimmed(candidates, found, rate, rates, budget), rate, rates)


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

    Such replicas can remain in a solution, because the solver computes with one fixed rate for each replica of a pool
    (rule 4), and this rate may be too low.

    The most expensive replicas are removed first.
    """
    trimmed, wanted = list(replicas), served(candidates, replicas, rate, rates) * (1.0 - ROUNDING)
    for index in sorted(range(len(trimmed)), key=lambda index: -candidates[index].dollars):
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


def _alone(candidate: Candidate, rate: float, rates: Rates) -> float:
    """Return the rate per replica if the pool has enough replicas to serve the whole rate alone.

    This number of replicas is limited to the maximum of the pool, but is at least 1, the pool's minimum, and the present
    number of the pool. Return 0 if the maximum is 0.
    """
    if candidate.most == 0:
        return 0.0
    one = rates(candidate.pool, 1)
    count = max(
        1, candidate.least, candidate.now, min(candidate.most, ceil(rate / one) if one > 0.0 else candidate.most)
    )
    return rates(candidate.pool, count) / count


@cache
def _highs() -> Any:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", GAP)
    solver.setOptionValue("threads", 1)
    # This heuristic looks for a first solution of hard programs; for our programs it only takes time.
    solver.setOptionValue("mip_heuristic_run_feasibility_jump", False)
    return solver


def _solve(
    candidates: Sequence[Candidate], rate: float, per_replica: Sequence[float], budget: PlanBudget
) -> list[int] | None:
    """Return the cheapest numbers that serve the largest possible rate, or None if the limits contradict each other.

    Usually one program with a high weight on the served rate is enough. But the last small part of the rate may weigh
    less than the price of the replica that would serve it. In this case, a program without prices first computes the
    highest rate, which becomes a bound of another program.
    """
    program = (tuple(candidates), rate, tuple(per_replica), budget)
    found = _minimise(*program)
    if found is None or found[1] >= rate * ENOUGH:
        return list(found[0]) if found is not None else None
    most = _minimise(*program, by_price=False)
    if most is None or found[1] >= most[1] * ENOUGH:
        return list(found[0])
    bounded = _minimise(*program, least_served=most[1] * ENOUGH)
    return list((bounded or most)[0])


@lru_cache(maxsize=KEPT)
def _minimise(
    candidates: tuple[Candidate, ...],
    rate: float,
    per_replica: tuple[float, ...],
    budget: PlanBudget,
    *,
    by_price: bool = True,
    least_served: float = 0.0,
) -> tuple[tuple[int, ...], float] | None:
    """Solve one integer program; return the number of replicas of each candidate and the served rate.

    The variables are the served rate r and, for each candidate, n (replicas), s (started replicas) and h (replicas that
    hold GPUs). Minimise the cost of n and s (only if `by_price`) minus r times its weight. The cost of a replica is its price or, if
    the price is 0, its number of GPUs. The constraints are:
    n - s <= now, h - n >= 0, h >= held, both phases serve r, r >= least_served, budgets and ratio. Return None if there
    is no solution.
    """
    count = len(candidates)
    cost = [each.dollars or float(each.pool.replica_gpus or 1) for each in candidates]
    start = [
        price * (0.01 + each.pool.start_seconds / HORIZON_SECONDS) for price, each in zip(cost, candidates, strict=True)
    ]
    best = [one for one in per_replica if one > 0.0]
    weight = (
        SERVED_FIRST
        * 2.0
        * max(
            [(price + more) / one for price, more, one in zip(cost, start, per_replica, strict=True) if one > 0.0],
            default=1.0,
        )
        if best
        else 1.0
    )
    rows = _Rows(3 * count + 1)
    for index, each in enumerate(candidates):
        rows.add({index: 1.0, count + index: -1.0}, -inf, float(each.now))
        rows.add({2 * count + index: 1.0, index: -1.0}, 0.0, inf)
    for other in (Role.DECODE, Role.PREFILL):
        phase = {index: per_replica[index] for index, each in enumerate(candidates) if each.pool.role is not other}
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
    program.num_col_, program.num_row_ = 3 * count + 1, rows.count
    objective = [*cost, *start] if by_price else [0.0] * (2 * count)
    program.col_cost_ = np.array([*objective, *([0.0] * count), -weight])
    program.col_lower_ = np.array(
        [
            *(float(each.least) for each in candidates),
            *([0.0] * count),
            *(float(each.held) for each in candidates),
            least_served,
        ]
    )
    program.col_upper_ = np.array([*(float(each.most) for each in candidates), *([inf] * (2 * count)), max(0.0, rate)])
    program.row_lower_, program.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_, program.a_matrix_.index_, program.a_matrix_.value_ = rows.matrix()
    program.integrality_ = [highspy.HighsVarType.kInteger] * count + [highspy.HighsVarType.kContinuous] * (
        2 * count + 1
    )
    solver = _highs()
    solver.clearModel()
    solver.passModel(program)
    solver.setOptionValue("time_limit", TIME_LIMIT_SECONDS)
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
