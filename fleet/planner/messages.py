"""Messages between planner and orchestrator: plans and observations of pools.

Rules:

1. A plan states the number of replicas of some pools. An operator, a supervisor or another orchestrator executes it. Connectors
   (`fleet.planner.ports`) lie between planner and orchestrator; all of them use these messages.
2. The last writer of a pool's number owns it. A planner does not change a number that a person has written (or an HPA, on
   Kubernetes): the pool is pinned.
3. A plan rests on an observation. A pool that has changed since the observation is not overwritten.
4. A wanted number stays valid after its writer has ended. The number before it is kept, so that anybody can return to it.
"""

from enum import StrEnum
from typing import Annotated, NewType

from msgspec import Meta, Struct

from fleet.core.clock import Nanos

PoolName = NewType("PoolName", str)
PlanId = NewType("PlanId", str)


def worker_prefix(pool: PoolName) -> str:
    """Return the common prefix of the names of a pool's workers, to which a dash and a number are added.

    Slashes become dots, because the name is also used as a file name.
    """
    return pool.replace("/", ".")


MOST_REPLICAS = 10_000  # limit for one pool; a higher number is probably a typing error
Replicas = Annotated[int, Meta(ge=0, le=MOST_REPLICAS)]


class PlanWriter(StrEnum):
    """Writer of a number; the values are field managers in Kubernetes."""

    PLANNER = "fleet-planner"
    PERSON = "fleet-scale"


class PoolGapReason(StrEnum):
    """Why a pool has, or may soon have, another number of replicas than wanted."""

    NOT_TAKEN_UP = "not_taken_up"  # the orchestrator has not acted on the plan yet
    UNDER_WAY = "under_way"
    NO_ROOM = "no_room"  # no node, device or quota is left
    FAILING = "failing"  # replicas start and end again
    LIMITED = "limited"  # bounds, budget or ratio forbid the number


class PoolObservation(Struct, frozen=True, kw_only=True):
    """Observation of one pool."""

    name: PoolName
    wanted: int
    """Number of replicas that was written last."""

    ready: int
    """Replicas that serve and do not drain."""

    draining: int = 0
    """Replicas that finish their requests and still hold their devices."""

    plan: PlanId = PlanId("")
    """Plan that wrote the number; empty: none."""

    before: int | None = None
    """Number that was wanted before; None: unknown."""

    version: str = ""
    """Changes with each write of the number."""

    pinned: str = ""
    """Why this writer must not change the number; empty: it may."""

    why: PoolGapReason | None = None
    """Why the number is not reached, or not read by the orchestrator yet; None if neither is so."""

    message: str = ""
    """Details for a person."""

    @property
    def pending(self) -> int:
        """Wanted replicas that do not serve."""
        return max(0, self.wanted - self.ready)

    @property
    def settled(self) -> bool:
        """True if the pool has the wanted replicas for good; before the orchestrator has read a plan, they may still change."""
        return self.wanted == self.ready and not self.draining and self.why is None

    @property
    def unfinished(self) -> bool:
        """True if a plan for this pool is not settled."""
        return bool(self.plan) and not self.settled

    def before_a_write(self, replicas: int) -> int:
        """Return the value of `before` after `replicas` are written; writing the same number again keeps it."""
        return self.before if self.before is not None and replicas == self.wanted else self.wanted


class Observation(Struct, frozen=True):
    """All pools in the order of their names."""

    pools: tuple[PoolObservation, ...]

    def pool(self, name: PoolName) -> PoolObservation | None:
        return next((each for each in self.pools if each.name == name), None)


class Plan(Struct, frozen=True, kw_only=True):
    """Wanted replicas of some pools."""

    id: PlanId
    replicas: dict[PoolName, Replicas]
    within: Nanos
    """Time from writing the plan until its replicas must serve; afterwards the rest is rolled back."""
