"""Group placer: chooses the domain of each worker group that one reconcile creates.

Pure. `operators.observed.domains` has the rules for the choice of a domain.

Rules:

1. Only groups that are StatefulSets, of roles with a `topology.domain`, are placed here. Other groups are placed by the
   controller of LeaderWorkerSets or by a gang scheduler.
2. A group is created only when a domain has room for all of its pods. So a group that does not fit never holds GPUs
   that other groups need.
3. If the operator may not read nodes, the scheduler chooses the domain. Pods of groups are then created with a
   scheduling gate, if the cluster supports scheduling gates, and `operators.controller.gate_keeper` lets one group at a
   time pass. If only a part of a group's pods found nodes, the group is removed and created again. The new group may
   not use the nodes that the old one had found.
"""

import msgspec
from msgspec import Struct

from operators.api.disagg_deployment import RoleSpec
from operators.manifests.names import DesiredDeployment, GroupPlacement
from operators.manifests.pods import Images, pod_template
from operators.manifests.workloads import ANYWHERE
from operators.observed.domains import ClusterRoom, GroupDemand, choose, demand_of, slots_by_domain
from operators.observed.pod_troubles import PodTrouble, TroubleReason
from operators.observed.state import ObservedState

MOST_TOLD = 4


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
        self._gates = observed.served.scheduling_gates

    def place(self, role: RoleSpec, name: str) -> GroupPlacement | None:
        """Return where the pods of a new group may run, or None if the group cannot be created now."""
        if not role.topology.domain:
            return ANYWHERE
        if self._room is None:
            self.needs_room = True
            return None
        if self._room.nodes is None:
            return GroupPlacement(avoided=self._avoided.get(role.name, ()), gated=self._gates)
        template = pod_template(self._desired, role, self._images, "")
        demand = demand_of(template, role.topology.domain, role.nodes_per_replica)
        domain, left = choose(self._room, demand)
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
    told = ", ".join(f"{value}: {count}" for value, count in fullest[:MOST_TOLD])
    more = f", and {len(fullest) - MOST_TOLD} more" if len(fullest) > MOST_TOLD else ""
    return f"{demand.pods} pods need room in one {demand.label}; there is room for {told}{more}"


def with_unfit(observed: ObservedState, placer: GroupPlacer) -> ObservedState:
    """Return the observed state with a trouble added for each group that fits into no domain."""
    if not placer.unfit:
        return observed
    return msgspec.structs.replace(observed, troubles=tuple(sorted((*observed.troubles, *placer.unfit))))
