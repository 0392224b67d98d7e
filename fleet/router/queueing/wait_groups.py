"""Requests of one model that wait and want the same: they are looked at as one.

Rules:

1. Requests have the same wish when whoever can serve one of them can serve the other. So when one is tried in vain, all of them are.
2. Who was tried in vain waits for certain workers, of which none has room. Wishes that wait for the same ones stand before one *gate*. It
   is shut until something has changed at one of these workers (`changed`), and again for all who stand there as soon as one of them
   waits on for just these workers. When there is more that others could do (`all_changed`), nobody stands before any gate.
3. A wish that was not tried since it came up, or since anything may have changed for it, is *untried*. It is tried once, and then stands
   before a gate, if anybody can say before which: so all these tries together cost no more than those who came.
4. A gate is never forgotten: its workers have requests, or are gone before those end, and either is a change. A wish of which nobody can
   say whom it waits for stands before no gate, and is tried whenever anything changes.
"""

from collections.abc import Callable, Hashable, Iterator

from fleet.core.ids import WorkerId
from fleet.router.sessions import SessionKey

BusyWorkers = frozenset[WorkerId]
"""Workers, none of which has room. None at all: nobody can say which these are."""
UNKNOWN_WORKERS: BusyWorkers = frozenset()

HasRoom = Callable[[WorkerId], bool]
"""Whether a worker has room."""


class BlockedOn:
    """Before certain workers."""

    __slots__ = ("busy", "changed", "closed", "groups", "lost")

    def __init__(self, busy: BusyWorkers) -> None:
        self.busy = busy
        self.closed = False
        self.changed: set[WorkerId] = set()  # since it was shut
        self.lost = False  # one of these: who waited for no other is to be refused
        self.groups = 0  # that stand here


class WaitGroup:
    """Those who want the same."""

    __slots__ = ("blocked_on", "rejected_in", "session", "turn", "value", "waiting")

    def __init__(self, value: Hashable, session: SessionKey | None, blocked_on: BlockedOn) -> None:
        self.value = value
        self.session = session
        self.blocked_on = blocked_on
        self.waiting = 0
        self.turn = 0  # of `WaitGroups.turn`, the latest that it had
        self.rejected_in = 0  # the latest search in which it was tried in vain; 0: it is untried


class WaitGroups:
    """All of one model."""

    def __init__(self) -> None:
        self._by_value: dict[Hashable, WaitGroup] = {}
        self.blockages: dict[BusyWorkers, BlockedOn] = {}
        self._unblocked = BlockedOn(UNKNOWN_WORKERS)  # never shut
        self._by_session: dict[SessionKey, set[WaitGroup]] = {}
        self.open = 0  # wishes before no gate that is shut
        self.turn = 1  # see `fleet.router.queueing.admission_queue.QueueSearch`
        self.had_turn = 0  # wishes that had theirs in this one
        self.searches = 1
        self.untried = 0  # untried groups

    def join(self, value: Hashable, session: SessionKey | None = None) -> WaitGroup:
        """One more waits, with the wish of this value.

        Args:
            value: Equal ones are the same wish.
            session: What has to stay where it is, which is a part of the value.
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

    def over(self, group: WaitGroup) -> None:
        """Nobody waits with it any more."""
        del self._by_value[group.value]
        self.untried -= not group.rejected_in
        self._leave(group.blocked_on)
        if group.session is not None:
            self._by_session[group.session].remove(group)
            if not self._by_session[group.session]:
                del self._by_session[group.session]

    def mark_rejected(self, group: WaitGroup, busy: BusyWorkers) -> None:
        """One who waits with it was tried, and waits on for these."""
        self.untried -= not group.rejected_in
        group.rejected_in = self.searches
        if group.blocked_on.busy != busy:
            self._move(group, self.blockages.setdefault(busy, BlockedOn(busy)) if busy else self._unblocked)
        if busy:
            self._close(group.blocked_on)

    def moved(self, session: SessionKey) -> bool:
        """A session's requests may go elsewhere than before; returns whether some of them wait."""
        groups = self._by_session.get(session, set())
        for group in groups:
            self._move(group, self._unblocked)
            self.untried += bool(group.rejected_in)
            group.rejected_in = 0
        return bool(groups)

    def still_blocked(self, group: WaitGroup, has_room: HasRoom) -> bool:
        """Whether of those for whom it waits none has room, though something has changed at some; then its gate is shut again."""
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
        """A worker may have room again, or takes no more requests."""
        for blocked_on in self.blockages.values():
            if worker_id in blocked_on.busy:
                blocked_on.changed.add(worker_id)
                blocked_on.lost = blocked_on.lost or gone
                if blocked_on.closed:
                    blocked_on.closed = False
                    self.open += blocked_on.groups

    def all_changed(self) -> None:
        """Whoever waited for the same may wait for others now."""
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
        """Assert that wishes and gates agree."""
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
