"""Session table: the worker that a session's requests went to.

Rules:

1. A session is bound to the worker of its last placement, until it has been idle for longer than the time to live.
2. The number of sessions is limited; the one that has been idle longest is forgotten first.
3. The setting `RouterSettings.session_affinity` decides what a binding means; `fleet.router.placer` (`with_session`) applies it.
   "soft" is a preference (`fleet.router.placement.policies.fleet`, rule 8), "hard" is a condition (`must_keep` in
   `fleet.router.placement.candidate_table`).
4. A session's requests may come through any router of the cluster. So bindings and their ends are announced to the peers as news since
   the last time. News from a peer count as if they had happened here, and are not passed on. At most `MAX_SESSION_NEWS` are
   announced: the first ones of the news, and the latest bindings for a router that is reached later.
5. If several routers report about one session, the latest binding counts, by the *stamp* of the router that placed the request. The
   stamp is passed on unchanged. So all routers agree, in whatever order they hear the news, and as soon as a cut link works again. Stamps
   are instants of a common clock: each router's own clock, advanced to the latest stamp that it has heard. Routers that have met need
   no synchronised clocks for that; a router that never has is as accurate as the Unix time of its host. The end of a binding
   is not stored, so a router that later hears of an older binding has it again, until the session's next request.
"""

from collections import OrderedDict
from itertools import islice

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId

SessionKey = tuple[str, str]
"""Tenant and session; two tenants may use the same session names."""

MAX_SESSION_NEWS = 10_000  # most bindings in one announcement, which then has about 1 MB


class SessionBinding(Struct, frozen=True, kw_only=True):
    """The worker of a session."""

    key: SessionKey
    worker_id: WorkerId | None  # None: the session was forgotten
    stamp: int = 0  # instant of the common clock in nanoseconds (rule 5); 0: an older version did not send it


class SessionTable:
    """Keeps the session bindings of one router, ordered by their last use; the latest is at the end."""

    def __init__(self, ttl_seconds: float, capacity: int, *, telling: bool = False):
        """Start empty.

        Args:
            ttl_seconds: Time to live of an idle session.
            capacity: The most sessions.
            telling: True if there are peers to announce news to.
        """
        self._ttl = int(ttl_seconds * SECOND)
        self._capacity = capacity
        self._telling = telling
        # values: worker, instant of the last use, stamp
        self._bindings: OrderedDict[SessionKey, tuple[WorkerId, Nanos, int]] = OrderedDict()
        self._news: dict[SessionKey, tuple[WorkerId | None, int]] = {}  # values: worker (None: forgotten), stamp
        self.dropped: list[SessionKey] = []
        """The sessions that rules 1 and 2 ended, until `take_dropped` returns them."""
        self._ahead = 0  # nanoseconds by which the common clock is ahead of this router's clock
        self._stamp = 0  # the latest stamp that this router gave or heard

    def __len__(self) -> int:
        return len(self._bindings)

    def bound(self, key: SessionKey, now: Nanos) -> WorkerId | None:
        """Return the worker of a session; None if there is none or the session was idle for too long."""
        if (binding := self._bindings.get(key)) is None:
            return None
        worker_id, used, _ = binding
        if now - used > self._ttl:
            del self._bindings[key]
            self.dropped.append(key)
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
        """Advance the common clock to a peer's clock (rule 5)."""
        self._ahead = max(self._ahead, clock - now)

    def heard(self, binding: SessionBinding, now: Nanos) -> None:
        """Apply a binding, or its end, from a peer router."""
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

    def take_dropped(self) -> list[SessionKey]:
        """Return the sessions that rules 1 and 2 ended since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def news(self) -> list[SessionBinding]:
        """Return the bindings and ends of bindings on this router since the last call."""
        news, self._news = self._news, {}
        return [SessionBinding(key=key, worker_id=worker_id, stamp=stamp) for key, (worker_id, stamp) in news.items()]

    def latest(self) -> list[SessionBinding]:
        """Return the latest bindings, the last one at the end."""
        latest = list(islice(reversed(self._bindings.items()), MAX_SESSION_NEWS))
        return [
            SessionBinding(key=key, worker_id=worker_id, stamp=stamp) for key, (worker_id, _, stamp) in reversed(latest)
        ]

    def _note(self, key: SessionKey, worker_id: WorkerId | None, now: Nanos) -> int:
        """Announce a binding; return its stamp."""
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
            self.dropped.append(bindings.popitem(last=False)[0])
