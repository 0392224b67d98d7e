"""Where the requests of a session went.

Rules:

1. A session is bound to the worker of its last placement, until it has been idle for longer than the time to live.
2. At most so many sessions are remembered; the one that has been idle longest goes first.
3. What a binding means is not decided here: a wish ("soft") or a condition ("hard"), see `RouterSettings.session_affinity`.
4. A session's requests may come by any router of the cluster. So what is bound or forgotten here is told to the others, as the news
   since the last time, and what they tell counts as if it had happened here; it is not told on. Of either there are `MAX_SESSION_NEWS` at
   most: of the news the first, to a router that is reached later the latest bindings.
5. Of what several routers say of one session the latest counts, by the *stamp* that the router gave it which placed the request. It
   never changes on its way, so all come to the same, in whatever order they hear it, and at once when a link that was cut is whole
   again. Stamps are instants of a clock that the routers have in common: each one's own, put forward to the latest that it has heard
   of. Routers that have met need no synchronised clocks for that; who never has is as right as Unix time on its host.
   That a session was forgotten is not kept, so who hears later of an older binding has it again, until its next request.
"""

from collections import OrderedDict
from itertools import islice

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId

SessionKey = tuple[str, str]
"""Tenant and session: what one tenant calls its sessions is nothing to another."""

MAX_SESSION_NEWS = 10_000  # at once: some 1 MB


class SessionBinding(Struct, frozen=True, kw_only=True):
    """Where the requests of a session go."""

    key: SessionKey
    worker_id: WorkerId | None  # None: it has been forgotten
    stamp: int = 0  # when, by the common clock (rule 5), in nanoseconds; 0: of an older version, which does not say


class SessionTable:
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
        self._bindings: OrderedDict[SessionKey, tuple[WorkerId, Nanos, int]] = OrderedDict()  # worker, last use, stamp
        self._news: dict[SessionKey, tuple[WorkerId | None, int]] = {}  # worker, stamp
        self._dropped: list[SessionKey] = []
        self._ahead = 0  # of this router's clock is the common one
        self._stamp = 0  # the latest of all

    def __len__(self) -> int:
        return len(self._bindings)

    def bound(self, key: SessionKey, now: Nanos) -> WorkerId | None:
        """The worker of a session; None when it has none, or has been idle for too long."""
        if (binding := self._bindings.get(key)) is None:
            return None
        worker_id, used, _ = binding
        if now - used > self._ttl:
            del self._bindings[key]
            self._dropped.append(key)
            return None
        return worker_id

    def bind(self, key: SessionKey, worker_id: WorkerId, now: Nanos) -> None:
        stamp = self._note(key, worker_id, now) if self._telling else 0
        self._bind(key, worker_id, now, stamp)

    def forget(self, key: SessionKey, now: Nanos) -> None:
        if self._telling:
            self._note(key, None, now)
        self._bindings.pop(key, None)

    def clock_heard(self, clock: int, now: Nanos) -> None:
        """A clock says that it is so many nanoseconds past (rule 5)."""
        self._ahead = max(self._ahead, clock - now)

    def heard(self, binding: SessionBinding, now: Nanos) -> None:
        """Another router has bound or forgotten a session."""
        key, worker_id = binding.key, binding.worker_id
        if binding.stamp:
            self.clock_heard(binding.stamp, now)
            self._stamp = max(self._stamp, binding.stamp)
        stamp = binding.stamp or self._next_stamp(now)
        if (known := self._bindings.get(key)) is not None and (known[2], known[0]) >= (stamp, worker_id or ""):
            return
        if worker_id is None:
            self._bindings.pop(key, None)
        else:
            self._bind(key, worker_id, now, stamp)

    def dropped(self) -> list[SessionKey]:
        """What was forgotten by rules 1 and 2 since it was asked for."""
        if not self._dropped:
            return []
        dropped, self._dropped = self._dropped, []
        return dropped

    def news(self) -> list[SessionBinding]:
        """What was bound or forgotten here since it was asked for."""
        news, self._news = self._news, {}
        return [SessionBinding(key=key, worker_id=worker_id, stamp=stamp) for key, (worker_id, stamp) in news.items()]

    def latest(self) -> list[SessionBinding]:
        """What was bound last, the latest at the end."""
        latest = list(islice(reversed(self._bindings.items()), MAX_SESSION_NEWS))
        return [
            SessionBinding(key=key, worker_id=worker_id, stamp=stamp) for key, (worker_id, _, stamp) in reversed(latest)
        ]

    def _note(self, key: SessionKey, worker_id: WorkerId | None, now: Nanos) -> int:
        """Have it told; returns its stamp."""
        stamp = self._next_stamp(now)
        if key in self._news or len(self._news) < MAX_SESSION_NEWS:
            self._news[key] = worker_id, stamp
        return stamp

    def _next_stamp(self, now: Nanos) -> int:
        self._stamp = stamp = max(now + self._ahead, self._stamp + 1)
        return stamp

    def _bind(self, key: SessionKey, worker_id: WorkerId, now: Nanos, stamp: int) -> None:
        bindings = self._bindings
        bindings[key] = worker_id, now, stamp
        bindings.move_to_end(key)
        while bindings and (len(bindings) > self._capacity or now - next(iter(bindings.values()))[1] > self._ttl):
            self._dropped.append(bindings.popitem(last=False)[0])
