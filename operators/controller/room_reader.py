"""Room reader: computes the free resources (room) of nodes, from which domains for worker groups are chosen.

Rules:

1. Nodes and pods of the whole cluster are listed only when a group is about to be created, because these lists may be
   long. They are listed at most once in the time FRESH.
2. The room of a new group counts as taken (promised) until the group's pods exist, but at most for the time PROMISED. So
   two groups do not get the same room.
3. If the operator has no right to list nodes and pods, `read` returns an unknown room (`nodes` is None). It asks the API
   server again only after the time DENIED.
"""

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.ports import KubernetesApi, RequestDenied
from operators.controller.group_placer import PlacedGroup
from operators.observed.domains import ClusterRoom, Node, PlacedPod, cluster_room

FRESH = Nanos(1 * SECOND)
PROMISED = Nanos(60 * SECOND)
"""The maximum time for which a group without pods holds the room that it was promised."""

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
        """Return the room on all nodes; its field `nodes` is None if the operator has no right to list nodes and pods.

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
        """Count the room of a group that was just created as taken, until the pods of the group exist, at most for the time PROMISED."""
        self._promised[namespace, group.name] = (group, self._clock.now())

    def _forget_kept_promises(self, now: Nanos) -> None:
        """Forget promises to groups whose pods all exist by now, because the requests of these pods count instead, and expired promises."""
        pods: dict[tuple[str, str], int] = {}
        for each in self._pods:
            place = (each.metadata.namespace, each.metadata.name.rpartition("-")[0])
            pods[place] = pods.get(place, 0) + 1
        self._promised = {
            place: (group, at)
            for place, (group, at) in self._promised.items()
            if now < at + PROMISED and pods.get(place, 0) < group.demand.pods
        }
