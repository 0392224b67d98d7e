"""The simulated engine's pool against a model of two dictionaries."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.core.work import KvCleared, KvRemoved, KvStored
from workers.engines.simulated.memory import BlockMemory

BLOCKS = 6
NAMES = [bytes([number]) * 16 for number in range(9)]


class Heard:
    """The cache as a consumer of the events believes it to be."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def hear(self, events) -> None:
        for event in events:
            match event:
                case KvStored(hashes=hashes):
                    assert not self.names & set(hashes), "stored twice"
                    self.names |= set(hashes)
                case KvRemoved(hashes=hashes):
                    assert self.names >= set(hashes), "removed without having been stored"
                    self.names -= set(hashes)
                case KvCleared():
                    self.names = set()


class Pool(RuleBasedStateMachine):
    """Sequences come and go, share blocks and publish them; the pool never loses a block and never gives one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = BlockMemory(BLOCKS, 8)
        self.held: list[list[int]] = []
        self.content: dict[bytes, bytes] = {}
        self.heard = Heard()
        self.written = 0

    @precondition(lambda self: self.memory.available)
    @rule(count=st.integers(1, 3))
    def allocate(self, count):
        blocks = [self.memory.allocate() for _ in range(min(count, self.memory.available))]
        assert not set(blocks) & {block for held in self.held for block in held}, "given twice"
        for block in blocks:
            self.written += 1
            self.memory.view(block)[:] = self.written.to_bytes(8, "little")
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def publish(self, data, name):
        block = data.draw(st.sampled_from(sorted({block for held in self.held for block in held})))
        if block in self.memory.names:
            return
        known = bool(self.memory.find([name]))
        self.memory.publish(block, name)
        if not known:
            self.content[name] = bytes(self.memory.view(block))

    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    def share(self, names):
        found = self.memory.find(names)
        assert [bytes(self.memory.view(block)) for block in found] == [
            self.content[name] for name in names[: len(found)]
        ]
        before = self.memory.available
        idle = self.memory.idle_among(found)
        self.memory.hold(found)
        assert self.memory.available == before - idle
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.memory.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def listen(self):
        self.heard.hear(self.memory.take_events())
        assert self.heard.names == {name for name in NAMES if self.memory.find([name])}
        assert not self.memory.changed

    @invariant()
    def nothing_is_lost(self):
        self.memory.check()
        assert self.memory.held == len({block for held in self.held for block in held})

    def teardown(self):
        for held in self.held:
            self.memory.release(held)
        assert (self.memory.held, self.memory.available) == (0, BLOCKS)
        self.listen()


TestPool = Pool.TestCase
TestPool.settings = hypothesis_settings(deadline=None, stateful_step_count=50)


def test_idle_block_released_first_is_evicted_tail_before_head():
    memory = BlockMemory(3, 8)
    chain = [memory.allocate() for _ in range(3)]
    for block, name in zip(chain, NAMES, strict=False):
        memory.publish(block, name)
    memory.release(chain)

    memory.allocate()

    assert memory.find(NAMES[:3]) == chain[:2]


def test_unfetched_events_become_a_dump():
    memory = BlockMemory(2, 8)
    for number in range(100):
        block = memory.allocate()
        memory.publish(block, number.to_bytes(16, "big"))
        memory.release([block])

    events = memory.take_events()

    assert events == (KvCleared(), KvStored(tuple(number.to_bytes(16, "big") for number in (98, 99))))
    assert memory.take_events() == ()
