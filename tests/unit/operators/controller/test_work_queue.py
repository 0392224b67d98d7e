"""Work queue: many requests for a key are one, a key is never in work twice at a time, and failing keys come rarely."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet.core.clock import SECOND, Nanos
from operators.controller.work_queue import LONGEST, SHORTEST, WorkQueue

MOST = 4


def test_key_requested_in_progress_runs_again_afterwards():
    queue = WorkQueue(MOST)
    queue.add("a", Nanos(0))
    assert queue.take(Nanos(0)) == "a"

    queue.add("a", Nanos(1))
    queue.add("a", Nanos(2))

    assert queue.take(Nanos(3)) is None
    queue.done("a")
    assert [queue.take(Nanos(3)), queue.take(Nanos(3))] == ["a", None]


def test_pause_doubles_to_a_limit_and_success_resets_it():
    queue, now, pauses = WorkQueue(MOST), Nanos(0), []
    queue.add("a", now)
    for _ in range(20):
        assert queue.take(now) == "a"
        queue.failed("a", now)
        pauses.append(queue.next() - now)
        now = queue.next()

    assert pauses[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert pauses[-1] == LONGEST
    queue.take(now)
    queue.done("a")
    queue.add("a", now)
    queue.take(now)
    queue.failed("a", now)
    assert queue.next() - now == SHORTEST


def test_new_specification_ends_a_pause_but_events_do_not():
    queue = WorkQueue(MOST)
    queue.add("a", Nanos(0))
    queue.take(Nanos(0))
    queue.failed("a", Nanos(0), Nanos(9 * SECOND))

    queue.add("a", Nanos(1))
    assert queue.take(Nanos(8 * SECOND)) is None

    queue.hasten("a", Nanos(8 * SECOND))
    assert queue.take(Nanos(8 * SECOND)) == "a"


def test_key_without_room_sets_overflown():
    queue = WorkQueue(2)
    for key in "abc":
        queue.add(key, Nanos(0))

    assert queue.overflown
    assert len(queue) == 2


class Model(RuleBasedStateMachine):
    """Comparison with a simple model, in random histories: when each key is due, and which keys are in progress."""

    def __init__(self):
        super().__init__()
        self.queue, self.now = WorkQueue(MOST), Nanos(0)
        self.due, self.hand = {}, {}

    keys = st.sampled_from("abcde")

    @rule(key=keys, after=st.integers(0, 5))
    def add(self, key, after):
        self.queue.add(key, self.now, Nanos(after))
        at = self.now + after
        if key in self.hand:
            self.hand[key] = at if self.hand[key] is None else min(self.hand[key], at)
        elif key in self.due or len(self.due) + len(self.hand) < MOST:
            self.due[key] = min(at, self.due.get(key, at))

    @rule()
    def take(self):
        key = self.queue.take(self.now)
        ready = [at for at in self.due.values() if at <= self.now]
        assert (key is not None) == bool(ready)
        if key is not None:
            assert self.due.pop(key) == min(ready)
            self.hand[key] = None

    @rule(key=keys)
    def done(self, key):
        if key in self.hand:
            self.queue.done(key)
            if (again := self.hand.pop(key)) is not None:
                self.due[key] = again

    @rule(by=st.integers(0, 4))
    def time_passes(self, by):
        self.now = Nanos(self.now + by)

    @invariant()
    def agrees(self):
        self.queue.check()
        assert len(self.queue) == len(self.due) + len(self.hand)
        assert self.queue.next() == min(self.due.values(), default=None)


TestQueue = Model.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40)
