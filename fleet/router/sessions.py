"""Where the requests of a session went.

Rules:

1. A session is bound to the worker of its last placement, until it has been idle for longer than the time to live.
2. At most so many sessions are remembered; the one that has been idle longest goes first.
3. What a binding means is not decided here: a wish ("soft") or a condition ("hard"), see `RouterSettings.session_affinity`.
4. A session's requests may come by any router of the cluster. So what is bound or forgotten here is told to the others, as the news
   since the last time, and what they tell counts as if it had happened here; it is not told on. Of either there are `MOST_TOLD` at
   most: of the news the first, to a router that is reached later the latest bindings.
"""

from collections import OrderedDict
from itertools import islice

from msgspec import Struct

from fleet.clock import SECOND, Nanos
from fleet.ids import WorkerId

SessionKey = tuple[str, str]
"""Tenant and session: what one tenant calls its sessions is nothing to another."""

MOST_TOLD = 10_000  # at once: some 1 MB


class SessionBinding(Struct, frozen=True, kw_only=True):
    """Where the requests of a session go."""

    key: SessionKey
    worker_id: WorkerId | None  # None: it has been forgotten


class Sessions:
    """Bindings of one router, those used last at the end."""

    def __init__(self, ttl_seconds: float, capacity: int, *, telling: bool = False):
        """Nothing is bound.

        Args:
            ttl_seconds: To live.
            capacity: Bindings, at most.
            telling: Whether somebody asks for news.
        """
        self._ttl = int(ttl_seconds * SECOND)
        self._capacity = capacity
        self._telling = telling
        self._bindings: OrderedDict[SessionKey, tuple[WorkerId, Nanos]] = OrderedDict()
        self._news: dict[SessionKey, WorkerId | None] = {}

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
        self._note(key, worker_id)
        self._bind(key, worker_id, now)

    def forget(self, key: SessionKey) -> None:
        self._note(key, None)
        self._bindings.pop(key, None)

    def heard(self, binding: SessionBinding, now: Nanos) -> None:
        """Another router has bound or forgotten a session."""
        if binding.worker_id is None:
            self._bindings.pop(binding.key, None)
        else:
            self._bind(binding.key, binding.worker_id, now)

    def news(self) -> list[SessionBinding]:
        """What was bound or forgotten here since it was asked for."""
        news, self._news = self._news, {}
        return [SessionBinding(key=key, worker_id=worker_id) for key, worker_id in news.items()]

    def latest(self) -> list[SessionBinding]:
        """What was bound last, the latest at the end."""
        latest = list(islice(reversed(self._bindings.items()), MOST_TOLD))
        return [SessionBinding(key=key, worker_id=worker_id) for key, (worker_id, _) in reversed(latest)]

    def _note(self, key: SessionKey, worker_id: WorkerId | None) -> None:
        if self._telling and (key in self._news or len(self._news) < MOST_TOLD):
            self._news[key] = worker_id

    def _bind(self, key: SessionKey, worker_id: WorkerId, now: Nanos) -> None:
        bindings = self._bindings
        bindings[key] = worker_id, now
        bindings.move_to_end(key)
        while bindings and (len(bindings) > self._capacity or now - next(iter(bindings.values()))[1] > self._ttl):
            bindings.popitem(last=False)
