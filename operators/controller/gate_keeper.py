"""Gate keeper: lets one group of pods at a time pass the scheduler, while the operator cannot choose domains itself. Pure.

Rules:

1. All pods of a group are made with a scheduling gate. The scheduler does not see them, so they hold no GPUs.
2. One group at a time passes: its gates are opened when all of its pods exist and no other group of this operator has pods
   that are open and without a node. So two groups cannot each hold half of a domain and wait for the other half.
3. Groups pass in the order in which they came. A group keeps its place until the cache shows that it is open, so that nobody
   overtakes it between the decision and the write. A group that the operator has not heard of for STALE is forgotten.
4. A group of which some pods are open already goes on at once: it may hold GPUs. This also covers a pod that was
   replaced later, and an operator that was killed between two writes.
5. A group for which no node was found gives its turn back if others wait: it is removed, made again, and waits behind them.
   If nobody waits it stays, because a node may be on its way.
"""

from collections.abc import Iterable, Sequence

from fleet.core.clock import SECOND, Nanos
from fleet.net.kubernetes import kinds
from fleet.net.kubernetes.views import Pod
from operators.controller.reconcile import Action, OpenGate, Remove
from operators.keys import ReconcileKey
from operators.observed.gates import GatedGroup, is_passing

STALE = Nanos(30 * SECOND)


class GateKeeper:
    def __init__(self) -> None:
        self._waiting: dict[tuple[ReconcileKey, str], Nanos] = {}

    def decide(
        self, key: ReconcileKey, groups: Sequence[GatedGroup], pods: Iterable[Pod], now: Nanos
    ) -> tuple[Action, ...]:
        """Return the gates to open, and the groups to remove because others wait.

        Args:
            key: The deployment.
            groups: Its groups with gates.
            pods: All pods that this operator knows.
            now: The present time.
        """
        closed = [each for each in groups if each.closed and not each.begun]
        self._queue(key, closed, now)
        opened = [each for each in groups if each.closed and each.begun]
        if closed and not is_passing(pods):
            first_key, first = next(iter(self._waiting))
            opened += [each for each in closed if (key, each.name) == (first_key, first)]
        given_back = [each.name for each in groups if each.unplaced and self._waiting]
        return (
            *(OpenGate(pod) for each in opened for pod in each.closed),
            *(Remove(kinds.STATEFUL_SET.name, name) for name in given_back[-1:]),
        )

    def waits(self, key: ReconcileKey) -> bool:
        """Return whether a group of the deployment waits for its turn."""
        return any(waiting == key for waiting, _ in self._waiting)

    def forget(self, key: ReconcileKey) -> None:
        """Forget a deployment that has gone."""
        self._queue(key, (), Nanos(0))

    def _queue(self, key: ReconcileKey, closed: Sequence[GatedGroup], now: Nanos) -> None:
        names = {each.name for each in closed}
        self._waiting = {
            (waiting, name): now if waiting == key else at
            for (waiting, name), at in self._waiting.items()
            if (name in names if waiting == key else now < at + STALE)
        }
        for name in sorted(names):
            self._waiting.setdefault((key, name), now)
