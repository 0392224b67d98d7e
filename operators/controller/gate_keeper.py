"""Gate keeper: opens the scheduling gates of one worker group at a time, if the operator cannot choose domains. Pure.

Rules:

1. All pods of a group are created with a scheduling gate. The scheduler ignores pods with a gate, so these pods hold no
   GPUs. To open a gate means to remove it from the pod.
2. The scheduler places only one group at a time. The gates of a group are opened only when all of its pods exist. They
   stay closed while pods of another group of this operator, whose gates are open, still wait for nodes (rule 5 limits this
   time). So two groups cannot each hold half of a domain and wait for the other half.
3. The operator's gate is the last gate to open. A group whose pods also have gates of other controllers is not in the
   queue. The scheduler would not look at these pods, so all other groups would wait until the other controllers remove
   their gates.
4. Groups get their turn in the order in which they entered the queue. A group keeps its position until the informer's cache
   shows that its gates are open, so that no other group overtakes it between the decision and the write. A group that no
   reconcile has named for the time STALE is removed from the queue.
5. The turn of a group is limited. If its gates are not open after OPENING, for example because the API server refuses
   the write, the group is moved to the end of the queue. Pods that have no gate any more may still wait for a node.
   These pods make other groups wait for TURN at most, even if no scheduler reports on them.
6. If the gates of some pods of a group are open already, its other gates are opened at once, because the group may hold
   GPUs. This also covers a pod that was replaced later, and an operator that was killed between two writes.
7. A group for which no node was found loses its turn if other groups wait: it is removed, created again, and queued behind
   them. If no other group waits, the group is not removed, because a new node may be starting.
"""

from collections.abc import Iterable, Sequence

from fleet.core.clock import SECOND, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.views import Pod
from operators.controller.reconcile import Action, OpenGate, Remove
from operators.keys import ReconcileKey
from operators.observed.gates import GatedGroup, is_passing

STALE = Nanos(30 * SECOND)
OPENING = Nanos(30 * SECOND)
"""The time limit from the decision to open a group's gates until the cache shows them open. After it, the next group
gets the turn."""

TURN = Nanos(180 * SECOND)
"""The maximum time that a pod without a gate and without a node makes other groups wait. It is long enough for a group that
the scheduler has examined: in this time, all pods of the group have got nodes, or the group was removed
(`operators.observed.observe.PARTIAL_GROUP_SECONDS`)."""

Place = tuple[ReconcileKey, str]


class GateKeeper:
    def __init__(self) -> None:
        self._waiting: dict[Place, Nanos] = {}
        self._turn: tuple[Place, Nanos] | None = None
        """The group whose gates are being opened, and the instant at which its turn began; None if no group has the
        turn."""

        self._passing: dict[str, Nanos] = {}
        """Pods without a gate that wait for a node: the uid of each, and the instant at which it was first seen
        waiting."""

    def decide(
        self, key: ReconcileKey, groups: Sequence[GatedGroup], pods: Iterable[Pod], now: Nanos
    ) -> tuple[Action, ...]:
        """Return actions that open gates, and an action that removes a group without nodes while other groups wait.

        Args:
            key: The key of the deployment.
            groups: All groups of the deployment whose pods were created with a gate.
            pods: All pods that this operator knows.
            now: The present time.
        """
        closed = [each for each in groups if each.closed and not each.begun and not each.held]
        self._queue(key, closed, now)
        opened = [each for each in groups if each.closed and each.begun]
        if closed and self._is_occupied(pods, now):
            self._turn = None
        elif closed:
            first = self._next(now)
            opened += [each for each in closed if (key, each.name) == first]
        given_back = [each.name for each in groups if each.unplaced and self._waiting]
        return (
            *(OpenGate(pod) for each in opened for pod in each.closed),
            *(Remove(kinds.STATEFUL_SET.name, name) for name in given_back[-1:]),
        )

    def waits(self, key: ReconcileKey) -> bool:
        """Return whether a group of the deployment waits in the queue for its turn."""
        return any(waiting == key for waiting, _ in self._waiting)

    def forget(self, key: ReconcileKey) -> None:
        """Remove the groups of a deleted deployment from the queue."""
        self._queue(key, (), Nanos(0))

    def _is_occupied(self, pods: Iterable[Pod], now: Nanos) -> bool:
        """Return whether a pod without a gate has waited for a node for less than TURN.

        In this case, all groups in the queue still have to wait (rule 2).
        """
        uids = [each.metadata.uid for each in pods if is_passing(each)]
        self._passing = {uid: self._passing.get(uid, now) for uid in uids}
        return any(now < since + TURN for since in self._passing.values())

    def _next(self, now: Nanos) -> Place:
        """Return the first group of the queue.

        If the gates of the first group could not be opened within OPENING, move this group to the end of the queue and
        return the next one.
        """
        first = next(iter(self._waiting))
        if self._turn is not None and self._turn[0] == first and now >= self._turn[1] + OPENING:
            self._waiting[first] = self._waiting.pop(first)
            first = next(iter(self._waiting))
            self._turn = None
        if self._turn is None or self._turn[0] != first:
            self._turn = (first, now)
        return first

    def _queue(self, key: ReconcileKey, closed: Sequence[GatedGroup], now: Nanos) -> None:
        names = {each.name for each in closed}
        self._waiting = {
            (waiting, name): now if waiting == key else at
            for (waiting, name), at in self._waiting.items()
            if (name in names if waiting == key else now < at + STALE)
        }
        for name in sorted(names):
            self._waiting.setdefault((key, name), now)
