"""Plans, and what there is of them.

Rules:

1. A plan says how many replicas some pools are to have. Who carries it out is somebody else: an operator, a supervisor, an
   orchestrator. Between the two stand connectors (`fleet.planner.ports`), and all of them tell the same with these words.
2. The last one to write a pool's number owns it. A planner leaves alone what a person has written (or an HPA, on Kubernetes):
   the pool is pinned.
3. A plan rests on what was seen before. What has changed since is not overwritten: who comes late changes nothing.
4. What is wanted stays wanted when whoever wrote it has gone: it is worked towards further on. Beside it stands what was wanted before,
   so that anybody can go back.
"""

from enum import StrEnum
from typing import Annotated, NewType

from msgspec import Meta, Struct

from fleet.core.clock import Nanos

PoolName = NewType("PoolName", str)
PlanId = NewType("PlanId", str)
MOST_REPLICAS = 10_000  # of one pool; more is a slip of the pen
Replicas = Annotated[int, Meta(ge=0, le=MOST_REPLICAS)]


class PlanWriter(StrEnum):
    """On whose behalf numbers are written; the values are what Kubernetes calls a field manager."""

    PLANNER = "fleet-planner"
    PERSON = "fleet-scale"


class PoolGapReason(StrEnum):
    """Why a pool has other replicas than are wanted, or may have them soon."""

    NOT_TAKEN_UP = "not_taken_up"  # nobody has acted on the plan yet
    UNDER_WAY = "under_way"
    NO_ROOM = "no_room"  # no node, device or quota is left for them
    FAILING = "failing"  # they begin, and end
    LIMITED = "limited"  # bounds, budget or ratio forbid it


class PoolObservation(Struct, frozen=True, kw_only=True):
    """One pool."""

    name: PoolName
    wanted: int
    """Replicas, as last written."""

    ready: int
    """That serve, and have not been told to go."""

    draining: int = 0
    """That finish what they have, and hold their devices meanwhile."""

    plan: PlanId = PlanId("")
    """By which the number was written; empty: by none."""

    before: int | None = None
    """What was wanted before that; None: nobody knows."""

    version: str = ""
    """Differs whenever somebody has written the number."""

    pinned: str = ""
    """Why the number is not for this writer to change; empty: it is."""

    why: PoolGapReason | None = None
    """It has not as many as wanted, or whoever obeys has not read that yet; None where neither is so."""

    message: str = ""
    """For a person: more about that."""

    @property
    def pending(self) -> int:
        """Replicas that are wanted and do not serve."""
        return max(0, self.wanted - self.ready)

    @property
    def settled(self) -> bool:
        """As wanted, and it stays so: what only happens to be there before a plan is taken up may still change."""
        return self.wanted == self.ready and not self.draining and self.why is None

    @property
    def unfinished(self) -> bool:
        """It has not come to what a plan wants of it, whether somebody waits for that or not."""
        return bool(self.plan) and not self.settled

    def before_a_write(self, replicas: int) -> int:
        """What was wanted before, once so many are written: whoever wants the same again goes on with the plan that is there."""
        return self.before if self.before is not None and replicas == self.wanted else self.wanted


class Observation(Struct, frozen=True):
    """All pools, in the order of their names."""

    pools: tuple[PoolObservation, ...]

    def pool(self, name: PoolName) -> PoolObservation | None:
        return next((each for each in self.pools if each.name == name), None)


class Plan(Struct, frozen=True, kw_only=True):
    """What some of the pools are to be."""

    id: PlanId
    replicas: dict[PoolName, Replicas]
    within: Nanos
    """For the replicas to serve, from when the plan is written; the intent is given up then."""
