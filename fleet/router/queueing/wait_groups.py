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

    __slots__ = ("busy", "changed", "lost", "shut", "wishes")

    def __init__(self, busy: BusyWorkers) -> None:
        self.busy = busy
        self.shut = False
        self.changed: set[WorkerId] = set()  # since it was shut
        self.lost = False  # one of these: who waited for no other is to be refused
        self.wishes = 0  # that stand here


class WaitGroup:
    """Those who want the same."""

    __slots__ = ("gate", "session", "turn", "vain_in", "value", "waiting")

    def __init__(self, value: Hashable, session: SessionKey | None, gate: BlockedOn) -> None:
        self.value = value
        self.session = session
        self.gate = gate
        self.waiting = 0
        self.turn = 0  # of `WaitGroups.turn`, the latest that it had
        self.vain_in = 0  # the latest search in which it was tried in vain; 0: it is untried


class WaitGroups:
    """All of one model."""

    def __init__(self) -> None:
        self._by_value: dict[Hashable, WaitGroup] = {}
        self.gates: dict[BusyWorkers, BlockedOn] = {}
        self._nowhere = BlockedOn(UNKNOWN_WORKERS)  # never shut
        self._by_session: dict[SessionKey, set[WaitGroup]] = {}
        self.open = 0  # wishes before no gate that is shut
        self.turn = 1  # see `fleet.router.queueing.admission_queue.QueueSearch`
        self.had_turn = 0  # wishes that had theirs in this one
        self.searches = 1
        self.untried = 0  # wishes

    def wished(self, value: Hashable, session: SessionKey | None = None) -> WaitGroup:
        """One more waits, with the wish of this value.

        Args:
            value: Equal ones are the same wish.
            session: What has to stay where it is, which is a part of the value.
        """
        if (wish := self._by_value.get(value)) is None:
            wish = self._by_value[value] = WaitGroup(value, session, self._nowhere)
            self._nowhere.wishes += 1
            self.open += 1
            self.untried += 1
            if session is not None:
                self._by_session.setdefault(session, set()).add(wish)
        wish.waiting += 1
        return wish

    def over(self, wish: WaitGroup) -> None:
        """Nobody waits with it any more."""
        del self._by_value[wish.value]
        self.untried -= not wish.vain_in
        self._leave(wish.gate)
        if wish.session is not None:
            self._by_session[wish.session].remove(wish)
            if not self._by_session[wish.session]:
                del self._by_session[wish.session]

    def mark_rejected(self, wish: WaitGroup, busy: BusyWorkers) -> None:
        """One who waits with it was tried, and waits on for these."""
        self.untried -= not wish.vain_in
        wish.vain_in = self.searches
        if wish.gate.busy != busy:
            self._move(wish, self.gates.setdefault(busy, BlockedOn(busy)) if busy else self._nowhere)
        if busy:
            self._shut(wish.gate)

    def moved(self, session: SessionKey) -> bool:
        """A session's requests may go elsewhere than before; returns whether some of them wait."""
        wishes = self._by_session.get(session, set())
        for wish in wishes:
            self._move(wish, self._nowhere)
            self.untried += bool(wish.vain_in)
            wish.vain_in = 0
        return bool(wishes)

    def still_busy(self, wish: WaitGroup, has_room: HasRoom) -> bool:
        """Whether of those for whom it waits none has room, though something has changed at some; then its gate is shut again."""
        gate = wish.gate
        if not gate.shut and gate.changed and not gate.lost and not any(map(has_room, gate.changed)):
            self._shut(gate)
        return gate.shut

    def _shut(self, gate: BlockedOn) -> None:
        if not gate.shut:
            gate.shut = True
            gate.changed.clear()
            gate.lost = False
            self.open -= gate.wishes

    def _move(self, wish: WaitGroup, gate: BlockedOn) -> None:
        gate.wishes += 1
        self.open += not gate.shut
        self._leave(wish.gate)
        wish.gate = gate

    def _leave(self, gate: BlockedOn) -> None:
        gate.wishes -= 1
        self.open -= not gate.shut
        if not gate.wishes and gate is not self._nowhere:
            del self.gates[gate.busy]

    def changed(self, worker_id: WorkerId, *, gone: bool = False) -> None:
        """A worker may have room again, or takes no more requests."""
        for gate in self.gates.values():
            if worker_id in gate.busy:
                gate.changed.add(worker_id)
                gate.lost = gate.lost or gone
                if gate.shut:
                    gate.shut = False
                    self.open += gate.wishes

    def all_changed(self) -> None:
        """Whoever waited for the same may wait for others now."""
        for wish in self:
            wish.gate = self._nowhere
            wish.vain_in = 0
        self.gates.clear()
        self.open = self.untried = self._nowhere.wishes = len(self._by_value)

    def next_turn(self) -> None:
        self.turn += 1
        self.had_turn = 0

    def __iter__(self) -> Iterator[WaitGroup]:
        return iter(self._by_value.values())

    def check(self) -> None:
        """Assert that wishes and gates agree."""
        gates = [self._nowhere, *self.gates.values()]
        assert all(wish.waiting > 0 for wish in self)
        assert all(gate.wishes == sum(wish.gate is gate for wish in self) for gate in gates)
        assert all(gate.wishes for gate in self.gates.values())
        assert self.open == sum(not wish.gate.shut for wish in self)
        assert not self._nowhere.shut
        assert self.untried == sum(not wish.vain_in for wish in self)
        assert all(wish.vain_in or wish.gate is self._nowhere for wish in self)
        kept = [wish for wish in self if wish.session is not None]
        assert all(wish in self._by_session[wish.session] for wish in kept if wish.session is not None)
        assert len(kept) == sum(map(len, self._by_session.values()))
        assert all(gate.shut == (not gate.changed) for gate in self.gates.values())
