"""Room reader: reads nodes and pods when a group has to be placed, and remembers what was promised to groups.

Rules:

1. Nodes and pods of the whole cluster are listed only when a group is about to be made, and at most once in FRESH.
2. A group without pods yet is remembered as promised, so that two groups do not get the same room.
3. An operator that may not read them says so, and asks again after a while.
"""

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import KubernetesApi, RequestDenied
from operators.controller.group_placer import PlacedGroup
from operators.observed.domains import ClusterRoom, Node, PlacedPod, cluster_room

FRESH = Nanos(1 * SECOND)
PROMISED = Nanos(60 * SECOND)
"""The longest time that a group without pods holds its room."""

DENIED = Nanos(60 * SECOND)


class RoomReader:
    def __init__(self, cluster: KubernetesApi, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._nodes: tuple[Node, ...] = ()
        self._pods: tuple[PlacedPod, ...] = ()
        self._read_at: Nanos | None = None
        self._denied_at: Nanos | None = None
        self._promised: dict[tuple[str, str], tuple[PlacedGroup, Nanos]] = {}

    async def read(self) -> ClusterRoom:
        """Return the room on all nodes, or that it cannot be known.

        Raises:
            KubernetesError: The API server failed.
        """
        now = self._clock.now()
        if self._denied_at is not None and now < self._denied_at + DENIED:
            return ClusterRoom()
        if self._read_at is None or now >= self._read_at + FRESH:
            try:
                nodes = await self._cluster.list(kinds.NODE, Node, "")
                pods = await self._cluster.list(kinds.POD, PlacedPod, "")
            except RequestDenied:
                self._denied_at = now
                return ClusterRoom()
            self._nodes, self._pods, self._read_at, self._denied_at = nodes.items, pods.items, now, None
        self._forget_kept_promises(now)
        return cluster_room(
            self._nodes, self._pods, [(each.demand, each.domain) for each, _ in self._promised.values()]
        )

    def promise(self, namespace: str, group: PlacedGroup) -> None:
        """Count the room of a group that was just made as taken, until its pods exist."""
        self._promised[namespace, group.name] = (group, self._clock.now())

    def _forget_kept_promises(self, now: Nanos) -> None:
        """Forget groups whose pods exist, because these hold the room from then on."""
        pods: dict[tuple[str, str], int] = {}
        for each in self._pods:
            place = (each.metadata.namespace, each.metadata.name.rpartition("-")[0])
            pods[place] = pods.get(place, 0) + 1
        self._promised = {
            place: (group, at)
            for place, (group, at) in self._promised.items()
            if now < at + PROMISED and pods.get(place, 0) < group.demand.pods
        }
