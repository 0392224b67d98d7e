"""Wait groups: queued requests of one model that the same set of workers can serve. They are tried as one.

Rules:

1. Queued requests are in one wait group if exactly the same workers can serve them. So when one request of a group was tried without
   success, the other requests of the group need not be tried.
2. A rejected group waits for certain workers, none of which has room. Groups that wait for the same workers share a `BlockedOn`. The
   `BlockedOn` is closed until something changes at one of these workers (`changed`); then its groups are tried again. As soon as one of
   these groups is rejected again and waits for exactly the same workers, the `BlockedOn` is closed for all its groups. When other workers
   may be able to serve the groups (`all_changed`), no group is blocked any more.
3. A group is *untried* if it was not tried since it was formed, or since the last change by which other workers may be able to serve it. It
   is tried once, and is then blocked if the workers that it waits for are known. So after such a change, each group has only one first try.
4. No group stays blocked for ever: the workers that it waits for have requests. When such a request ends, or such a worker leaves, this
   counts as a change. A group that waits for unknown workers is never blocked, and is tried whenever anything changes.
"""

from collections.abc import Callable, Hashable, Iterator

from fleet.core.ids import WorkerId
from fleet.router.sessions import SessionKey

BusyWorkers = frozenset[WorkerId]
"""The workers that could serve a request but have no room for it now; empty if these workers are not known."""
UNKNOWN_WORKERS: BusyWorkers = frozenset()

HasRoom = Callable[[WorkerId], bool]
"""A function that returns True if a worker has room."""


class BlockedOn:
    """The workers that one or more wait groups wait for. While `closed` is true, nothing has changed at any of these workers (rule 2)."""

    __slots__ = ("busy", "changed", "closed", "groups", "lost")

    def __init__(self, busy: BusyWorkers) -> None:
        self.busy = busy
        self.closed = False
        self.changed: set[WorkerId] = set()  # workers that have changed since `closed` was last true
        # True if one of the workers has gone. The groups are then tried again, because requests that only this worker could serve have to
        # be rejected.
        self.lost = False
        self.groups = 0  # number of wait groups that share this object


class WaitGroup:
    """Queued requests that the same set of workers can serve. They are tried as one."""

    __slots__ = ("blocked_on", "rejected_in", "session", "turn", "value", "waiting")

    def __init__(self, value: Hashable, session: SessionKey | None, blocked_on: BlockedOn) -> None:
        self.value = value
        self.session = session
        self.blocked_on = blocked_on
        self.waiting = 0
        # The last turn of `admission_queue.QueueSearch` in which the group was tried. Tries because of a place at the front of the queue, and
        # first tries, do not count.
        self.turn = 0
        self.rejected_in = 0  # the number of the last search that rejected the group; 0: the group is untried


class WaitGroups:
    """Keeps all wait groups of one model."""

    def __init__(self) -> None:
        self._by_value: dict[Hashable, WaitGroup] = {}
        self.blockages: dict[BusyWorkers, BlockedOn] = {}
        self._unblocked = BlockedOn(UNKNOWN_WORKERS)  # for groups that are not blocked; never closed
        self._by_session: dict[SessionKey, set[WaitGroup]] = {}
        self.open = 0  # number of groups that are not blocked
        self.turn = 1  # number of the present turn of `QueueSearch`
        self.had_turn = 0  # number of groups that were tried in the present turn (`WaitGroup.turn`)
        self.searches = 1
        self.untried = 0  # number of untried groups (rule 3)

    def join(self, value: Hashable, session: SessionKey | None = None) -> WaitGroup:
        """Add a request to the group with this value, and return the group.

        Args:
            value: Requests with equal values are in one group.
            session: The session of the request, if only the worker to which the session is bound may serve the request. The session is also
                a part of `value`.
        """
        if (group := self._by_value.get(value)) is None:
            group = self._by_value[value] = WaitGroup(value, session, self._unblocked)
            self._unblocked.groups += 1
            self.open += 1
            self.untried += 1
            if session is not None:
                self._by_session.setdefault(session, set()).add(group)
        group.waiting += 1
        return group

    def remove(self, group: WaitGroup) -> None:
        """Remove a group that has no more requests."""
        del self._by_value[group.value]
        self.untried -= not group.rejected_in
        self._leave(group.blocked_on)
        if group.session is not None:
            self._by_session[group.session].remove(group)
            if not self._by_session[group.session]:
                del self._by_session[group.session]

    def mark_rejected(self, group: WaitGroup, busy: BusyWorkers) -> None:
        """Record that a request of this group was tried and has to wait for the workers `busy` (empty: they are not known)."""
        self.untried -= not group.rejected_in
        group.rejected_in = self.searches
        if group.blocked_on.busy != busy:
            self._move(group, self.blockages.setdefault(busy, BlockedOn(busy)) if busy else self._unblocked)
        if busy:
            self._close(group.blocked_on)

    def session_moved(self, session: SessionKey) -> bool:
        """Unblock the wait groups whose requests must go to this session's worker, as if they were untried. Return whether there are any."""
        groups = self._by_session.get(session, set())
        for group in groups:
            self._move(group, self._unblocked)
            self.untried += bool(group.rejected_in)
            group.rejected_in = 0
        return bool(groups)

    def still_blocked(self, group: WaitGroup, has_room: HasRoom) -> bool:
        """Return True if a group stays blocked.

        If some workers that the group waits for have changed, but none of those has room, and none has gone, the group is blocked again.
        """
        blocked_on = group.blocked_on
        if (
            not blocked_on.closed
            and blocked_on.changed
            and not blocked_on.lost
            and not any(map(has_room, blocked_on.changed))
        ):
            self._close(blocked_on)
        return blocked_on.closed

    def _close(self, blocked_on: BlockedOn) -> None:
        if not blocked_on.closed:
            blocked_on.closed = True
            blocked_on.changed.clear()
            blocked_on.lost = False
            self.open -= blocked_on.groups

    def _move(self, group: WaitGroup, blocked_on: BlockedOn) -> None:
        blocked_on.groups += 1
        self.open += not blocked_on.closed
        self._leave(group.blocked_on)
        group.blocked_on = blocked_on

    def _leave(self, blocked_on: BlockedOn) -> None:
        blocked_on.groups -= 1
        self.open -= not blocked_on.closed
        if not blocked_on.groups and blocked_on is not self._unblocked:
            del self.blockages[blocked_on.busy]

    def changed(self, worker_id: WorkerId, *, gone: bool = False) -> None:
        """Record that a worker may have room again, or that it takes no more requests (`gone`)."""
        for blocked_on in self.blockages.values():
            if worker_id in blocked_on.busy:
                blocked_on.changed.add(worker_id)
                blocked_on.lost = blocked_on.lost or gone
                if blocked_on.closed:
                    blocked_on.closed = False
                    self.open += blocked_on.groups

    def all_changed(self) -> None:
        """Unblock all groups, because other workers may be able to serve them now."""
        for group in self:
            group.blocked_on = self._unblocked
            group.rejected_in = 0
        self.blockages.clear()
        self.open = self.untried = self._unblocked.groups = len(self._by_value)

    def next_turn(self) -> None:
        self.turn += 1
        self.had_turn = 0

    def __iter__(self) -> Iterator[WaitGroup]:
        return iter(self._by_value.values())

    def check(self) -> None:
        """Assert that the counts of groups and blocked groups are consistent."""
        blockages = [self._unblocked, *self.blockages.values()]
        assert all(group.waiting > 0 for group in self)
        assert all(
            blocked_on.groups == sum(group.blocked_on is blocked_on for group in self) for blocked_on in blockages
        )
        assert all(blocked_on.groups for blocked_on in self.blockages.values())
        assert self.open == sum(not group.blocked_on.closed for group in self)
        assert not self._unblocked.closed
        assert self.untried == sum(not group.rejected_in for group in self)
        assert all(group.rejected_in or group.blocked_on is self._unblocked for group in self)
        kept = [group for group in self if group.session is not None]
        assert all(group in self._by_session[group.session] for group in kept if group.session is not None)
        assert len(kept) == sum(map(len, self._by_session.values()))
        assert all(blocked_on.closed == (not blocked_on.changed) for blocked_on in self.blockages.values())
