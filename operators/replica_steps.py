"""Replica steps: computes the next number of replicas of each role and revision. Pure.

Scaling, rebalancing and rollouts all consist of the same small steps: one replica of a role is added or removed.
`operators.controller.reconcile` asks this module for the next steps (`next_changes`).

Rules:

1. A *revision* stands for the pod templates and settings of all workers; only workers of one revision understand each
   other's blocks. In the end, all workers of a deployment have the present revision: replicas of old revisions are
   removed, and replicas of the present one are added. If a specification is reverted, its old revision becomes the
   present one again. This module remembers nothing between calls, so any change can be reversed at any moment.
2. Each call takes as many steps as these rules allow, and the caller then waits until the pods have changed. The limits
   below count the replicas that exist now and those that the steps request. A replica *exists* until its pod has gone:
   a draining replica still holds its GPUs.
3. No step lets the GPUs of all existing and requested replicas exceed the budget. If they exceed the budget already, no
   step adds GPUs. So if the budget is used up, a rebalance first shrinks one role, waits for its drain, and then grows
   the other role.
4. Growth never takes a role above its target plus `surge`, and shrinking never takes its serving replicas below its
   target minus `unavailable`. Replicas that cannot serve may always be removed.
5. A prefill replica serves only together with a decode replica of its own revision, and a decode replica only together
   with a prefill replica of its own revision. So the last pair of an old revision stays until a pair of the new revision
   is ready. If this rule allows no step, and no earlier step is still under way, replicas may lose their partners. Even
   then, at least one replica of each role that must serve stays able to serve.
6. The ratio of prefill to decode replicas stays within its bounds while roles are scaled. During a rollout, the
   replicas of a role may differ from its target by at most `surge` (above) or `unavailable` (below). Within these limits,
   the ratio is computed with the target of the role, and not with its replicas. If the ratio allows no step of a single
   role, prefill and decode roles change together. If there are no prefill replicas or no decode replicas, the ratio is
   not checked. If the present ratio or the ratio of the targets is out of its bounds, a step may take the ratio as far
   out of its bounds as the worse one of these two ratios.
7. In one call, the number of a role's replicas in one revision changes by at most `max_step`. A change of prefill and
   decode roles together (rule 6) may be larger, if the ratio allows no smaller one.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct


class PairSide(StrEnum):
    """Side of a role in pairs: its replicas are prefill workers or decode workers of pairs, or serve alone."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALONE = "alone"


class RevisionReplicas(Struct, frozen=True, kw_only=True):
    """Numbers of requested and existing replicas of one role in one revision."""

    revision: str
    asked: int
    """The number of replicas that the child object of the role and revision requests."""

    pods: int = 0
    """The number of existing replicas that are not being deleted."""

    ready: int = 0
    """The number of replicas that are ready, and that at least one router knows. If it is unknown which workers routers know, ready
    replicas suffice."""

    leaving: int = 0
    """The number of replicas that are being deleted and still drain."""

    @property
    def there(self) -> int:
        """The number of replicas that hold GPUs or will soon hold them, including draining ones."""
        return max(self.asked, self.pods) + self.leaving

    @property
    def changing(self) -> bool:
        """True if replicas are still to be created, to become ready or to end, so that the caller may wait for them."""
        return self.leaving > 0 or not self.asked == self.pods == self.ready

    @property
    def staying(self) -> int:
        """The number of ready replicas that are left when the requested number is reached.

        The controllers of Kubernetes remove replicas that are not ready first.
        """
        return min(self.ready, self.asked)


class ScaledRole(Struct, frozen=True, kw_only=True):
    """Describes one role: its target, its limits for a rollout, and its replicas in each revision."""

    name: str
    side: PairSide
    target: int
    gpus: int
    """The number of GPUs of one replica."""

    surge: int
    unavailable: int
    revision: str
    """The present revision."""

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
        """The number of replicas with which the role counts in the ratio of prefill to decode (rule 6)."""
        return self.target if self.least_serving <= self.asked <= self.target + self.surge else self.asked


class ScalingBounds(Struct, frozen=True, kw_only=True):
    gpu_budget: int = 0
    """Maximum number of GPUs of all roles together; 0 means no limit."""

    least: tuple[int, int] = (1, 999)
    most: tuple[int, int] = (999, 1)
    """Maximum ratio of prefill to decode replicas, as a pair: (2, 1) allows two prefill replicas for each decode
    replica."""

    max_step: int = 1


class ReplicaChange(Struct, frozen=True, order=True):
    """Describes one change: the new number of replicas of one role and revision."""

    role: str
    revision: str
    replicas: int


def targets(pools: Sequence[ScaledRole], bounds: ScalingBounds) -> list[ScaledRole]:
    """Return the roles with possible targets: the requested targets, lowered until GPU budget and ratio allow them.

    If the budget is too small, the target of the role that requests the most GPUs is lowered by one. This is repeated
    until the budget is enough. A target is lowered to 0 only if no role with GPUs has a target above 1. After that, if
    there are too many prefill replicas for the ratio, the targets of prefill roles are lowered, but not below 1; too
    many decode replicas are treated in the same way. If that is not enough, the ratio stays out of its bounds.
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
    """Return the changes that the next steps make together (rule 2).

    The list is empty if all targets are reached, if the next step has to wait until the pods have changed, or if the rules allow no step.

    The targets in `pools` must be possible, as the function `targets` returns them.
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
    """Return the roles after one more allowed step or joint change (rule 6), or None if neither is allowed.

    `before` holds the roles before the first of the steps that one call of `next_changes` makes, because `max_step`
    limits the sum of these steps. If `orphans` is true, the step may leave replicas of another role without a partner of
    their revision (rule 5).
    """
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
    """Yield the role after each possible step in one direction.

    A step with `direction` -1 takes one replica from an old revision, or from the present one if it has too many. A
    step with `direction` 1 adds one replica to the present revision.
    """
    present = next((each for each in pool.replicas if each.revision == pool.revision), None)
    if direction > 0:
        if (present.asked if present else 0) < pool.target:
            yield _asking(pool, present or RevisionReplicas(revision=pool.revision, asked=0), +1)
        return
    olds = [each for each in pool.replicas if each.revision != pool.revision and each.asked]
    # Replicas that do not serve are removed first, such as the replicas of a revision that never became ready.
    for each in sorted(olds, key=lambda old: (old.staying, old.asked, old.revision)):
        yield _asking(pool, each, -1)
    if present and present.asked > pool.target:
        yield _asking(pool, present, -1)


def _asking(pool: ScaledRole, of: RevisionReplicas, more: int) -> ScaledRole:
    others = tuple(each for each in pool.replicas if each.revision != of.revision)
    return msgspec.structs.replace(pool, replicas=(*others, msgspec.structs.replace(of, asked=of.asked + more)))


def _allowed(now: dict[str, ScaledRole], state: dict[str, ScaledRole], bounds: ScalingBounds, orphans: bool) -> bool:
    """Return whether the step from `now` to `state` keeps rules 3 to 5."""
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
    """Return the minimum number of replicas of a role that must serve.

    For a prefill role, the number is 0 if no decode replica has to serve, because prefill replicas serve only together
    with decode replicas. For a decode role, it is 0 if no prefill replica has to serve.
    """
    alone = pool.side is PairSide.ALONE
    needed = alone or any(each.least_serving for each in state.values() if each.side not in (PairSide.ALONE, pool.side))
    return pool.least_serving if needed else 0


def _serving(state: dict[str, ScaledRole], pool: ScaledRole) -> int:
    """Return the number of replicas of a role that can serve.

    For a prefill role, these are the ready replicas whose revision also has ready decode replicas. For a decode role,
    these are the ready replicas whose revision also has ready prefill replicas.
    """
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
    """Return the roles after a joint change of prefill and decode roles (rule 6), or None if no such change is allowed.

    The number of replicas of each role changes in proportion to its distance from its target, so that the ratio is kept.
    The smallest allowed change of this kind is returned.
    """
    distances = {name: pool.target - pool.asked for name, pool in now.items() if pool.side is not PairSide.ALONE}
    longest = max(map(abs, distances.values()), default=0)
    for part in range(1, longest + 1):
        state = dict(now)
        for name, distance in distances.items():
            for _ in range(round(abs(distance) * part / longest)):
                state[name] = next(_steps(state[name], 1 if distance > 0 else -1), state[name])
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
    """Return the number of prefill replicas and the number of decode replicas."""
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
    """Return the factor by which a ratio of prefill to decode is out of its bounds.

    Return 0 if it is within its bounds, or if there are no prefill replicas or no decode replicas.
    """
    prefill, decode = sides
    if not prefill or not decode:
        return 0.0
    ratio, least, most = prefill / decode, bounds.least[0] / bounds.least[1], bounds.most[0] / bounds.most[1]
    inside = (
        prefill * bounds.most[1] <= decode * bounds.most[0] and prefill * bounds.least[1] >= decode * bounds.least[0]
    )
    return 0.0 if inside else max(ratio / most, least / ratio)
