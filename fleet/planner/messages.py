"""Messages: defines the plans and the observations of pools that planner and orchestrator exchange.

Rules:

1. A plan states the number of replicas of some pools. An orchestrator carries it out: the Kubernetes operator, a
   supervisor or an external program. Connectors (`fleet.planner.ports`) bring these messages to the orchestrator and
   back.
2. Whoever has written a pool's number last owns this number. A planner does not change a number that a person (or, on
   Kubernetes, an HPA) has written: the pool is pinned.
3. A plan is made from an observation. If somebody has written a pool's number after the observation, the plan does not
   overwrite this number.
4. A written number stays valid after its writer has ended. The number before the plan is stored as well, so that
   anybody can restore it. If a plan supersedes an unfinished plan, the number before the unfinished plan stays stored.
   If more replicas than that serve already, their number is stored instead (`PoolObservation.fallback`).
"""

from enum import StrEnum
from typing import Annotated, NewType

from msgspec import Meta, Struct

from fleet.core.clock import Nanos

PoolName = NewType("PoolName", str)
PlanId = NewType("PlanId", str)


def worker_prefix(pool: PoolName) -> str:
    """Return the text with which the names of a pool's workers begin; a dash and a number follow it.

    Slashes become dots, because the name is also used as a file name.
    """
    return pool.replace("/", ".")


MOST_TEXT = 400  # maximum length of a text that another program or a rule gave as a cause; some of them send megabytes


def shortened(text: str) -> str:
    """Return the text, or its beginning and its length if it is longer than `MOST_TEXT` characters."""
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 40]}… ({len(text)} characters)"


MOST_REPLICAS = 10_000  # maximum number of replicas of one pool; a higher number is probably a typing error
Replicas = Annotated[int, Meta(ge=0, le=MOST_REPLICAS)]


class PlanWriter(StrEnum):
    """Kinds of writers of a pool's number of replicas. On Kubernetes, the values are names of field managers."""

    PLANNER = "fleet-planner"
    PERSON = "fleet-scale"


class PoolGapReason(StrEnum):
    """Reasons why a pool does not have the requested number of ready replicas."""

    NOT_TAKEN_UP = "not_taken_up"  # the orchestrator has not acted on the plan yet
    UNDER_WAY = "under_way"
    NO_ROOM = "no_room"  # the cluster has no node, device or quota left for the missing replicas
    FAILING = "failing"  # replicas start, and end again because of an error
    LIMITED = "limited"  # the orchestrator's own bounds, budget or ratio forbid the requested number


class PoolObservation(Struct, frozen=True, kw_only=True):
    """Describes the state of one pool at one instant."""

    name: PoolName
    wanted: int
    """Requested number of replicas, as it was written last."""

    ready: int
    """Number of replicas that serve and do not drain."""

    draining: int = 0
    """Number of replicas that finish their requests and still hold their GPUs."""

    plan: PlanId = PlanId("")
    """Id of the plan that wrote the requested number, or an empty text if no plan wrote it."""

    before: int | None = None
    """Number of replicas before the plan `plan`; None if this number is unknown. Replicas that an earlier plan had added
    and that did not serve do not count."""

    version: str = ""
    """Version of the requested number, which changes each time that somebody writes the number."""

    pinned: str = ""
    """Why a planner must not change the requested number, or an empty text if a planner may change it."""

    why: PoolGapReason | None = None
    """Why the pool does not have the requested replicas, or `NOT_TAKEN_UP` if the orchestrator has not read the
    requested number yet. None if neither is the case."""

    message: str = ""
    """Details of the reason `why`, for a person; empty if there are none."""

    @property
    def pending(self) -> int:
        """Number of requested replicas that do not serve yet."""
        return max(0, self.wanted - self.ready)

    @property
    def settled(self) -> bool:
        """True if the pool has the requested replicas, and the orchestrator has no change left to make."""
        return self.wanted == self.ready and not self.draining and self.why is None

    @property
    def unfinished(self) -> bool:
        """True if a plan wrote the requested number, and the pool is not settled yet."""
        return bool(self.plan) and not self.settled

    @property
    def fallback(self) -> int:
        """The number of replicas to which a later plan is rolled back.

        This is the requested number, less the replicas that the plan `plan` has added and that do not serve. A rollback
        must not keep these replicas. If `plan` is unfinished, the later plan has superseded it; if `plan` has ended,
        there may be no room for its missing replicas.
        """
        if self.before is None or not self.plan or not self.pending:
            return self.wanted
        return min(self.wanted, max(self.before, self.ready))

    def before_a_write(self, replicas: int) -> int:
        """Return the value that `before` gets when the number `replicas` is written.

        If the number does not change, `before` does not change either.
        """
        return self.before if self.before is not None and replicas == self.wanted else self.fallback


class Observation(Struct, frozen=True):
    """Describes the state of all pools at one instant, in the order of their names."""

    pools: tuple[PoolObservation, ...]

    def pool(self, name: PoolName) -> PoolObservation | None:
        return next((each for each in self.pools if each.name == name), None)


class Plan(Struct, frozen=True, kw_only=True):
    """States the requested number of replicas of some pools, and the time limit to reach them."""

    id: PlanId
    replicas: dict[PoolName, Replicas]
    within: Nanos
    """Time from the writing of the plan within which the replicas of the plan must serve. Replicas that do not serve at
    the end of this time are rolled back."""
