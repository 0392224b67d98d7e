"""Session table: to which worker the requests of each session went.

Rules:

1. A session is bound to the worker of its last placement, until it has been idle for longer than the time to live. With "hard" affinity, the
   binding also ends when a request is rejected because that worker has gone.
2. The number of sessions is limited; the one that has been idle longest is forgotten first.
3. The setting `RouterSettings.session_affinity` decides what a binding means; `fleet.router.placer` (`with_session`) applies it.
   "soft" is a preference (`fleet.router.placement.policies.pipeline`, item 8), "hard" is a condition (`must_keep` in
   `fleet.router.placement.candidate_table`).
4. A session's requests may come through any router of the cluster. So each router announces its new and its ended bindings to its peers. A
   binding from a peer counts like one of this router, but is not passed on. One announcement has at most `MAX_SESSION_NEWS` bindings.
   If there are more, it has the first ones since the last announcement, or, for a router that connects later, the latest ones.
5. If several routers report about one session, the binding with the latest *stamp* counts. The router that places a request gives the
   stamp, and the stamp never changes. So all routers agree, in whatever order the announcements come; after an interrupted connection they
   agree again. Stamps are instants of a common clock: the clock of the router itself, advanced to the latest stamp that it has received. So
   routers that have exchanged stamps need no synchronised clocks; until then, stamps are as accurate as the Unix time of the host. The end
   of a binding is not stored. So a router that later receives an older binding of the session uses it, until the session's next request.
"""

from collections import OrderedDict
from itertools import islice

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId

SessionKey = tuple[str, str]
"""Tenant and session; two tenants may use the same session names."""

MAX_SESSION_NEWS = 10_000  # maximum number of bindings in one announcement, which then has a size of about 1 MB


class SessionBinding(Struct, frozen=True, kw_only=True):
    """Message between peer routers: the worker to which a session is bound, or the end of the binding."""

    key: SessionKey
    worker_id: WorkerId | None  # None: the binding has ended
    # Instant of the common clock in nanoseconds (rule 5); 0: the peer has an older version, which sends no stamp.
    stamp: int = 0


class SessionTable:
    """Keeps the session bindings of one router, in the order of their last use."""

    def __init__(self, ttl_seconds: float, capacity: int, *, telling: bool = False):
        """Start empty.

        Args:
            ttl_seconds: Seconds after which the binding of an idle session ends (rule 1).
            capacity: Maximum number of sessions that are kept (rule 2).
            telling: True if bindings are announced to peer routers.
        """
        self._ttl = int(ttl_seconds * SECOND)
        self._capacity = capacity
        self._telling = telling
        # The bindings by session. Values: the worker, the instant of the last use, and the stamp.
        self._bindings: OrderedDict[SessionKey, tuple[WorkerId, Nanos, int]] = OrderedDict()
        # The bindings to announce, by session. Values: the worker (None: the binding has ended) and the stamp.
        self._news: dict[SessionKey, tuple[WorkerId | None, int]] = {}
        self.has_moved = False
        """True if this router has bound a session to another worker, or for the first time, or has ended a binding, since the last call of
        `news`. Always false without `telling`."""

        self.dropped: list[SessionKey] = []
        """The sessions whose bindings have ended by age or by the limit (rules 1 and 2) since the last call of `take_dropped`."""
        self._ahead = 0  # nanoseconds by which the common clock is ahead of this router's own clock
        self._stamp = 0  # the latest stamp that this router has given or received

    def __len__(self) -> int:
        return len(self._bindings)

    def bound(self, key: SessionKey, now: Nanos) -> WorkerId | None:
        """Return the worker of a session; None if the session is not bound. End a binding that was idle for longer than the time to live."""
        if (binding := self._bindings.get(key)) is None:
            return None
        worker_id, used, _ = binding
        if now - used > self._ttl:
            del self._bindings[key]
            self.dropped.append(key)
            return None
        return worker_id

    def bind(self, key: SessionKey, worker_id: WorkerId, now: Nanos) -> None:
        stamp = 0
        if self._telling:
            stamp = self._note(key, worker_id, now)
            known = self._bindings.get(key)
            self.has_moved = self.has_moved or known is None or known[0] != worker_id
        self._bind(key, worker_id, now, stamp)

    def forget(self, key: SessionKey, now: Nanos) -> None:
        if self._telling:
            self._note(key, None, now)
            self.has_moved = True
        self._bindings.pop(key, None)

    def advance_clock(self, clock: int, now: Nanos) -> None:
        """Advance the common clock if the clock of a peer is ahead of it (rule 5)."""
        self._ahead = max(self._ahead, clock - now)

    def apply(self, binding: SessionBinding, now: Nanos) -> None:
        """Apply a binding, or the end of a binding, that a peer router has announced. Do nothing if a later binding is known (rule 5)."""
        key, worker_id = binding.key, binding.worker_id
        if binding.stamp:
            self.advance_clock(binding.stamp, now)
            self._stamp = max(self._stamp, binding.stamp)
        stamp = binding.stamp or self._next_stamp(now)
        if (known := self._bindings.get(key)) is not None and (known[2], known[0]) >= (stamp, worker_id or ""):
            return
        if worker_id is None:
            self._bindings.pop(key, None)
        else:
            self._bind(key, worker_id, now, stamp)

    def take_dropped(self) -> list[SessionKey]:
        """Return the sessions whose bindings have ended by age or by the limit (rules 1 and 2) since the last call."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def news(self) -> list[SessionBinding]:
        """Return, for the peers, the bindings that this router has made or ended since the last call, up to the limit of rule 4."""
        news, self._news, self.has_moved = self._news, {}, False
        return [SessionBinding(key=key, worker_id=worker_id, stamp=stamp) for key, (worker_id, stamp) in news.items()]

    def latest(self) -> list[SessionBinding]:
        """Return the `MAX_SESSION_NEWS` most recently used bindings, for a peer that connects later. The most recent one is last."""
        latest = list(islice(reversed(self._bindings.items()), MAX_SESSION_NEWS))
        return [
            SessionBinding(key=key, worker_id=worker_id, stamp=stamp) for key, (worker_id, _, stamp) in reversed(latest)
        ]

    def _note(self, key: SessionKey, worker_id: WorkerId | None, now: Nanos) -> int:
        """Record a binding or its end for the next announcement, unless the announcement is full (rule 4). Return the binding's stamp."""
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
