"""Group placer: chooses the domain of each worker group that one reconcile creates.

Pure, apart from the clock. `operators.observed.domains` has the rules for the choice of a domain.

Rules:

1. Only groups that are StatefulSets, of roles with a `topology.domain`, are placed here. Other groups are placed by the
   controller of LeaderWorkerSets or by a gang scheduler.
2. A group is created only when a domain has room for all of its pods. So a group that does not fit never holds GPUs
   that other groups need.
3. If the operator may not read nodes, the scheduler chooses the domain. Pods of groups are then created with a
   scheduling gate, if the cluster supports scheduling gates, and `operators.controller.gate_keeper` opens the gates of one
   group at a time. If only a part of a group's pods found nodes, the group is removed and created again. The pods of the
   new group must not use the nodes that pods of the removed group had found.
4. A domain in which the scheduler found no nodes for a group's pods is remembered for the time FAILED (`FailedDomains`).
   Later groups of the role get this domain only if no other domain has room.
"""

import msgspec
from msgspec import Struct

from fleet.core.clock import SECOND, Clock, Nanos
from operators.api.disagg_deployment import RoleSpec
from operators.keys import ReconcileKey
from operators.manifests.names import DesiredDeployment, GroupPlacement
from operators.manifests.pods import Images, pod_template
from operators.manifests.workloads import ANYWHERE
from operators.observed.domains import ClusterRoom, GroupDemand, choose, demand_of, slots_by_domain
from operators.observed.pod_troubles import PodTrouble, TroubleReason
from operators.observed.state import ObservedState

MOST_LISTED = 4

FAILED = Nanos(1800 * SECOND)
"""The time for which a failed domain is remembered. A group without nodes is removed after at most 120 s, so the groups of
a role can try about 15 domains before the first failed domain is forgotten."""

MOST_FAILED = 64
"""The maximum number of failed domains that are remembered for one role. Beyond it, the domains that failed first are forgotten."""


class FailedDomains:
    """Remembers for the time FAILED the domains in which pods of roles found no nodes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed: dict[ReconcileKey, dict[tuple[str, str], Nanos]] = {}

    def add(self, key: ReconcileKey, role: str, domain: str) -> None:
        found = self._failed.setdefault(key, {})
        found.pop((role, domain), None)
        found[role, domain] = self._clock.now()
        own = [each for each in found if each[0] == role]
        for each in own[:-MOST_FAILED]:
            del found[each]

    def of(self, key: ReconcileKey) -> dict[str, tuple[str, ...]]:
        """Return the failed domains of a deployment by role, in the order in which they failed."""
        now = self._clock.now()
        found = {each: at for each, at in self._failed.pop(key, {}).items() if now < at + FAILED}
        if not found:
            return {}
        self._failed[key] = found
        return {role: tuple(domain for of, domain in found if of == role) for role, _ in found}

    def forget(self, key: ReconcileKey) -> None:
        self._failed.pop(key, None)


class PlacedGroup(Struct, frozen=True):
    """Names a worker group and the domain that was chosen for it."""

    name: str
    demand: GroupDemand
    domain: str


class GroupPlacer:
    def __init__(self, desired: DesiredDeployment, observed: ObservedState, images: Images) -> None:
        self.needs_room = False
        """True if a group has to be placed, but the caller has not read the room of the nodes yet."""

        self.unfit: list[PodTrouble] = []
        self.placed: list[PlacedGroup] = []
        self._desired = desired
        self._images = images
        self._room: ClusterRoom | None = observed.room
        self._avoided = observed.avoided
        self._failed_domains = observed.failed_domains
        self._gates = observed.served.scheduling_gates

    def place(self, role: RoleSpec, name: str) -> GroupPlacement | None:
        """Return where the pods of a new group may run, or None if the group cannot be created now.

        If None is returned, `needs_room` or `unfit` shows the cause. If a domain was chosen, `placed` contains it.
        """
        if not role.topology.domain:
            return ANYWHERE
        if self._room is None:
            self.needs_room = True
            return None
        if self._room.nodes is None:
            return GroupPlacement(avoided=self._avoided.get(role.name, ()), gated=self._gates)
        template = pod_template(self._desired, role, self._images, "")
        demand = demand_of(template, role.topology.domain, role.nodes_per_replica)
        domain, left = choose(self._room, demand, self._failed_domains.get(role.name, ()))
        if not domain:
            self.unfit.append(PodTrouble(TroubleReason.NoDomainFits, name, _why(self._room, demand)))
            return None
        self._room = left
        self.placed.append(PlacedGroup(name, demand, domain))
        return GroupPlacement(domain=domain)


def _why(room: ClusterRoom, demand: GroupDemand) -> str:
    """Return the message for a group that fits into no domain: how many of its pods have room in each domain."""
    slots = slots_by_domain(room, demand)
    if not slots:
        return f"no usable node has the label {demand.label}"
    fullest = sorted(slots.items(), key=lambda each: (-each[1], each[0]))
    listed = ", ".join(f"{value}: {count}" for value, count in fullest[:MOST_LISTED])
    more = f", and {len(fullest) - MOST_LISTED} more" if len(fullest) > MOST_LISTED else ""
    return f"{demand.pods} pods need room in one {demand.label}; there is room for {listed}{more}"


def with_unfit(observed: ObservedState, placer: GroupPlacer) -> ObservedState:
    """Return the observed state with a trouble added for each group that fits into no domain."""
    if not placer.unfit:
        return observed
    return msgspec.structs.replace(observed, troubles=tuple(sorted((*observed.troubles, *placer.unfit))))
