"""How many replicas of each role and revision there should be next: scaling, rebalancing and rolling out are one walk of small steps.

Rules:

1. A *revision* is everything that workers must have alike to understand each other's blocks; all workers of a deployment share one.
   Replicas of old revisions go, replicas of the present one come. A revert makes a third revision, or the first one present again: nothing
   here remembers what was under way, so it can be turned around at any moment.
2. Each call is one step: it may only ask for what is allowed with the pods that exist now, and after it the caller waits until
   something has changed. A replica is *there* until its pod is gone: one that drains holds its GPUs.
3. GPUs of all replicas that are there, or asked for, never exceed the budget. So a rebalance under a full budget shrinks, waits for
   the drain, and grows.
4. Replicas of a role never exceed its target by more than `surge` through growth; those that serve never fall below its target minus
   `unavailable` through shrinking. What does not serve anyway may always be taken.
5. A prefill replica serves only beside a decode replica of its own revision, and the other way round. So an old pair is not
   taken apart before a new one is whole. Where both sides wait for each other because of this, and for nothing else, one may lose partners
   as long as one pair is left.
6. Prefill to decode stays within the ratio's bounds while roles are scaled; a role that is within its surge and its missing replicas
   of the target counts with the target. Where no single step is possible for the ratio's sake, both are changed together. Without
   any replicas on one side there is no ratio. What is out of bounds already may move, if it does not get worse.
7. A role changes by at most `max_step` replicas a call.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct


class PairSide(StrEnum):
    """What a role does beside another one."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALONE = "alone"


class RevisionReplicas(Struct, frozen=True, kw_only=True):
    """Of one role and revision."""

    revision: str
    asked: int
    """What its child's `replicas` says."""

    pods: int = 0
    """That exist and are not on their way out."""

    ready: int = 0
    """Of these: ready, and known to the router."""

    leaving: int = 0
    """Pods that drain."""

    @property
    def there(self) -> int:
        """That hold GPUs, or soon will."""
        return max(self.asked, self.pods) + self.leaving

    @property
    def changing(self) -> bool:
        """Whether something is under way that may be waited for."""
        return self.leaving > 0 or not self.asked == self.pods == self.ready

    @property
    def staying(self) -> int:
        """Ready ones that nobody has asked to go; those that are not ready go first."""
        return min(self.ready, self.asked)


class ScaledRole(Struct, frozen=True, kw_only=True):
    """A role as it is, and as it should be."""

    name: str
    side: PairSide
    target: int
    gpus: int
    """Of one replica."""

    surge: int
    unavailable: int
    revision: str
    """The present one."""

    replicas: tuple[RevisionReplicas, ...] = ()

    @property
    def asked(self) -> int:
        return sum(each.asked for each in self.replicas)

    @property
    def there(self) -> int:
        return sum(each.there for each in self.replicas)

    @property
    def least_serving(self) -> int:
        return max(0, self.target - self.unavailable)

    @property
    def counted(self) -> int:
        """Towards the ratio."""
        return self.target if self.least_serving <= self.asked <= self.target + self.surge else self.asked


class ScalingBounds(Struct, frozen=True, kw_only=True):
    gpu_budget: int = 0
    """0: none."""

    least: tuple[int, int] = (1, 999)
    most: tuple[int, int] = (999, 1)
    """Prefill to decode."""

    max_step: int = 1


class ReplicaChange(Struct, frozen=True, order=True):
    """Ask for so many replicas of a role's revision."""

    role: str
    revision: str
    replicas: int


def targets(pools: Sequence[ScaledRole], bounds: ScalingBounds) -> list[ScaledRole]:
    """The pools with targets that are possible: what is asked for, less what budget and ratio forbid; never more.

    Where the budget is too small, replicas are taken from the role that asks for most GPUs, the last one of a role last of all.
    Then the larger side of a ratio is lowered, to 1 at least: where that is not enough, the ratio stays out of bounds.
    """
    wanted = {pool.name: pool.target for pool in pools}
    while bounds.gpu_budget and sum(wanted[pool.name] * pool.gpus for pool in pools) > bounds.gpu_budget:
        takers = [pool for pool in pools if wanted[pool.name] and pool.gpus]
        wanted[max(takers, key=lambda pool: (wanted[pool.name] > 1, wanted[pool.name] * pool.gpus)).name] -= 1
    while (side := _too_many(_sides(pools, wanted), bounds)) is not None:
        takers = [pool for pool in pools if pool.side is side and wanted[pool.name] > 1]
        if not takers:
            break
        wanted[max(takers, key=lambda pool: wanted[pool.name]).name] -= 1
    return [msgspec.structs.replace(pool, target=wanted[pool.name]) for pool in pools]


def next_changes(pools: Sequence[ScaledRole], bounds: ScalingBounds) -> list[ReplicaChange]:
    """What to ask for now; nothing when all is as it should be, or when something that is under way has to end first.

    Targets must be possible: see `targets`.
    """
    before = {pool.name: pool for pool in pools}
    now = before
    while (moved := _one_move(now, before, bounds, orphans=False)) is not None:
        now = moved
    if now == before and not any(each.changing for pool in pools for each in pool.replicas):
        now = _one_move(before, before, bounds, orphans=True) or before
    return sorted(
        ReplicaChange(name, each.revision, each.asked)
        for name, pool in now.items()
        for each in pool.replicas
        if each.asked != next((old.asked for old in before[name].replicas if old.revision == each.revision), 0)
    )


def _one_move(
    now: dict[str, ScaledRole], before: dict[str, ScaledRole], bounds: ScalingBounds, *, orphans: bool
) -> dict[str, ScaledRole] | None:
    """The pools after one more allowed step; None when there is none. `orphans`: it may leave others without a partner."""
    held_by_ratio = False
    for direction in (-1, 1):
        for name, pool in now.items():
            if _moved_by(pool, before[name]) >= bounds.max_step:
                continue
            for after in _steps(pool, direction):
                state = now | {name: after}
                if not _allowed(now, state, bounds, orphans):
                    continue
                if _ratio_kept(now, state, bounds):
                    return state
                held_by_ratio = True
    return _together(now, bounds, orphans) if held_by_ratio and now == before else None


def _steps(pool: ScaledRole, direction: int) -> Iterator[ScaledRole]:
    """The pool with one replica less of a revision that has too many, or one more of the present one."""
    present = next((each for each in pool.replicas if each.revision == pool.revision), None)
    if direction > 0:
        if (present.asked if present else 0) < pool.target:
            yield _asking(pool, present or RevisionReplicas(revision=pool.revision, asked=0), +1)
        return
    olds = [each for each in pool.replicas if each.revision != pool.revision and each.asked]
    # What serves nobody goes first: of a revision that never came up, say.
    for each in sorted(olds, key=lambda old: (old.staying, old.asked, old.revision)):
        yield _asking(pool, each, -1)
    if present and present.asked > pool.target:
        yield _asking(pool, present, -1)


def _asking(pool: ScaledRole, of: RevisionReplicas, more: int) -> ScaledRole:
    others = tuple(each for each in pool.replicas if each.revision != of.revision)
    return msgspec.structs.replace(pool, replicas=(*others, msgspec.structs.replace(of, asked=of.asked + more)))


def _allowed(now: dict[str, ScaledRole], state: dict[str, ScaledRole], bounds: ScalingBounds, orphans: bool) -> bool:
    """By rules 3 to 5."""
    gpus = sum(pool.there * pool.gpus for pool in state.values())
    if bounds.gpu_budget and gpus > max(bounds.gpu_budget, sum(pool.there * pool.gpus for pool in now.values())):
        return False
    for name, pool in state.items():
        was = now[name]
        if pool.asked > was.asked and pool.there > pool.target + pool.surge:
            return False
        served, serving = _serving(now, was), _serving(state, pool)
        least = _least_serving(state, pool)
        if serving < served and serving < (min(1, least) if orphans and pool.asked == was.asked else least):
            return False
    return True


def _least_serving(state: dict[str, ScaledRole], pool: ScaledRole) -> int:
    """None where the other side may have no replicas: then none of these can serve."""
    alone = pool.side is PairSide.ALONE
    needed = alone or any(each.least_serving for each in state.values() if each.side not in (PairSide.ALONE, pool.side))
    return pool.least_serving if needed else 0


def _serving(state: dict[str, ScaledRole], pool: ScaledRole) -> int:
    """Replicas of the pool that can serve: of revisions that the other side has as well."""
    if pool.side is PairSide.ALONE:
        return sum(each.staying for each in pool.replicas)
    other = PairSide.DECODE if pool.side is PairSide.PREFILL else PairSide.PREFILL
    partners = {
        each.revision
        for each_pool in state.values()
        if each_pool.side is other
        for each in each_pool.replicas
        if each.staying
    }
    return sum(each.staying for each in pool.replicas if each.revision in partners)


def _together(now: dict[str, ScaledRole], bounds: ScalingBounds, orphans: bool) -> dict[str, ScaledRole] | None:
    """The nearest state on the straight way to the targets in which the ratio is kept."""
    ways = {name: pool.target - pool.asked for name, pool in now.items() if pool.side is not PairSide.ALONE}
    longest = max((abs(way) for way in ways.values()), default=0)
    for part in range(1, longest + 1):
        state = dict(now)
        for name, way in ways.items():
            for _ in range(round(abs(way) * part / longest)):
                state[name] = next(_steps(state[name], 1 if way > 0 else -1), state[name])
        if _allowed(now, state, bounds, orphans) and _ratio_kept(now, state, bounds):
            return state
    return None


def _moved_by(pool: ScaledRole, before: ScaledRole) -> int:
    asked = {each.revision: each.asked for each in before.replicas}
    return max((abs(each.asked - asked.get(each.revision, 0)) for each in pool.replicas), default=0)


def _ratio_kept(now: dict[str, ScaledRole], state: dict[str, ScaledRole], bounds: ScalingBounds) -> bool:
    def sides(pools: dict[str, ScaledRole]) -> tuple[int, int]:
        return _sides(list(pools.values()), {name: pool.counted for name, pool in pools.items()})

    meant = _sides(list(now.values()), {name: pool.target for name, pool in now.items()})
    return _outside(sides(state), bounds) <= max(_outside(sides(now), bounds), _outside(meant, bounds))


def _sides(pools: Sequence[ScaledRole], count: dict[str, int]) -> tuple[int, int]:
    """Prefill and decode replicas."""
    prefill = sum(count[pool.name] for pool in pools if pool.side is PairSide.PREFILL)
    return prefill, sum(count[pool.name] for pool in pools if pool.side is PairSide.DECODE)


def _too_many(sides: tuple[int, int], bounds: ScalingBounds) -> PairSide | None:
    prefill, decode = sides
    if not prefill or not decode:
        return None
    if prefill * bounds.most[1] > decode * bounds.most[0]:
        return PairSide.PREFILL
    if prefill * bounds.least[1] < decode * bounds.least[0]:
        return PairSide.DECODE
    return None


def _outside(sides: tuple[int, int], bounds: ScalingBounds) -> float:
    """How far out of bounds a ratio is; 0 inside."""
    prefill, decode = sides
    if not prefill or not decode:
        return 0.0
    ratio, least, most = prefill / decode, bounds.least[0] / bounds.least[1], bounds.most[0] / bounds.most[1]
    inside = (
        prefill * bounds.most[1] <= decode * bounds.most[0] and prefill * bounds.least[1] >= decode * bounds.least[0]
    )
    return 0.0 if inside else max(ratio / most, least / ratio)
