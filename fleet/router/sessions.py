"""Where the requests of a session went.

Rules:

1. A session is bound to the worker of its last placement, until it has been idle for longer than the time to live.
2. At most so many sessions are remembered; the one that has been idle longest goes first.
3. What a binding means is not decided here: a wish ("soft") or a condition ("hard"), see `RouterSettings.session_affinity`.
"""

from collections import OrderedDict

from fleet.clock import SECOND, Nanos
from fleet.ids import WorkerId

SessionKey = tuple[str, str]
"""Tenant and session: what one tenant calls its sessions is nothing to another."""


class Sessions:
    """Bindings of one router, those used last at the end."""

    def __init__(self, ttl_seconds: float, capacity: int):
        self._ttl = int(ttl_seconds * SECOND)
        self._capacity = capacity
        self._bindings: OrderedDict[SessionKey, tuple[WorkerId, Nanos]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bindings)

    def bound(self, key: SessionKey, now: Nanos) -> WorkerId | None:
        """The worker of a session; None when it has none, or has been idle for too long."""
        if (binding := self._bindings.get(key)) is None:
            return None
        worker_id, used = binding
        if now - used > self._ttl:
            del self._bindings[key]
            return None
        return worker_id

    def bind(self, key: SessionKey, worker_id: WorkerId, now: Nanos) -> None:
        bindings = self._bindings
        bindings[key] = worker_id, now
        bindings.move_to_end(key)
        while bindings and (len(bindings) > self._capacity or now - next(iter(bindings.values()))[1] > self._ttl):
            bindings.popitem(last=False)

    def forget(self, key: SessionKey) -> None:
        self._bindings.pop(key, None)
