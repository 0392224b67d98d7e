"""KV memory of the simulated engine: attempts allocate, share, name and free blocks."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.batching.attempts import BatchedAttempt, Job
from fleet.batching.kv_blocks import KvBlocks
from fleet.core.ids import RequestId
from fleet.core.work import KvCleared, KvRemoved, KvStored
from workers.engines.simulated.memory import BlockMemory

BLOCKS, BLOCK_TOKENS = 8, 4
CHAINS = [[bytes([family, index]) * 8 for index in range(5)] for family in (1, 2)]
CHAINS.append([*CHAINS[0][:2], *CHAINS[1][2:]])  # it shares a prefix with the first


class Heard:
    """The names of cached blocks, as a receiver of the KV events knows them."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def hear(self, events) -> None:
        for event in events:
            match event:
                case KvStored(hashes=hashes):
                    self.names |= set(hashes)
                case KvRemoved(hashes=hashes):
                    self.names -= set(hashes)
                case KvCleared():
                    self.names = set()


def an_attempt(keys: list[bytes], prompt_tokens: int) -> BatchedAttempt[bytes]:
    return BatchedAttempt(Job(attempt_id=RequestId("a"), prompt_tokens=prompt_tokens, answer_tokens=9, keys=keys))


class Pool(RuleBasedStateMachine):
    """Random histories: the pool never loses a block, never gives one away twice, and has the right bytes for all named blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: KvBlocks[bytes] = KvBlocks(BLOCKS, BLOCK_TOKENS)
        self.memory = BlockMemory(self.blocks)
        self.attempts: list[BatchedAttempt[bytes]] = []
        self.leases: list[list[bytes]] = []
        self.heard = Heard()

    @rule(chain=st.sampled_from(CHAINS), tokens=st.integers(1, 20))
    def admit(self, chain, tokens):
        keys = chain[: tokens // BLOCK_TOKENS]
        attempt = an_attempt(keys, tokens)
        here, before = self.blocks.leading(keys), self.blocks.used
        if self.blocks.reserve(attempt, here):
            assert attempt.held == keys[:here]
            assert self.blocks.room(attempt) > tokens
            self.attempts.append(attempt)
        else:
            assert (self.blocks.used, attempt.held, attempt.own) == (before, [], 0)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def compute(self, data, tokens):
        attempt = data.draw(st.sampled_from(self.attempts))
        attempt.computed = min(attempt.computed + tokens, attempt.prompt_tokens)
        known = len(attempt.held)
        self.blocks.name(attempt, attempt.job.keys, attempt.computed)
        self.memory.publish(attempt.held[known:], {key: bytearray(key) for key in attempt.job.keys})
        full = attempt.job.keys[: attempt.computed // BLOCK_TOKENS]
        assert self.memory.find(full) == full, "every computed block is found, whoever named it"

    @precondition(lambda self: self.attempts and self.blocks.available)
    @rule(data=st.data())
    def grow(self, data):
        self.blocks.grow(data.draw(st.sampled_from(self.attempts)))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def end(self, data):
        self.blocks.free(self.attempts.pop(data.draw(st.integers(0, len(self.attempts) - 1))))

    @rule(chain=st.sampled_from(CHAINS))
    def lend(self, chain):
        names = chain[: self.blocks.leading(chain)]
        self.blocks.hold(names)
        self.leases.append(names)

    @precondition(lambda self: self.leases)
    @rule()
    def end_lease(self):
        self.blocks.release(self.leases.pop())

    @rule()
    def listen(self):
        self.heard.hear(self.memory.take_events())
        assert self.heard.names == set(self.blocks.names())
        assert not self.memory.changed()

    @invariant()
    def nothing_is_lost(self):
        self.blocks.check(sum(attempt.own for attempt in self.attempts))
        self.memory.check()
        named = {key for held in (*self.leases, *(attempt.held for attempt in self.attempts)) for key in held}
        assert self.blocks.used == len(named) + sum(attempt.own for attempt in self.attempts)

    def teardown(self):
        for attempt in self.attempts:
            self.blocks.free(attempt)
        for names in self.leases:
            self.blocks.release(names)
        assert (self.blocks.used, self.blocks.available) == (0, BLOCKS)
        self.listen()
        self.memory.check()


TestPool = Pool.TestCase
TestPool.settings = hypothesis_settings(deadline=None, stateful_step_count=50)


def compute_and_end(blocks: KvBlocks[bytes], memory: BlockMemory, keys: list[bytes]) -> None:
    attempt = an_attempt(keys, len(keys) * BLOCK_TOKENS)
    assert blocks.reserve(attempt, 0)
    blocks.name(attempt, keys, attempt.prompt_tokens)
    memory.publish(attempt.held, {key: bytearray(key) for key in keys})
    blocks.free(attempt)


def test_tail_of_idle_chain_is_evicted_before_its_head():
    blocks: KvBlocks[bytes] = KvBlocks(4, BLOCK_TOKENS)
    memory = BlockMemory(blocks)
    chain = CHAINS[0][:3]
    compute_and_end(blocks, memory, chain)

    assert blocks.reserve(an_attempt([], 7), 0)

    assert memory.find(chain) == chain[:2]


def test_bytes_of_evicted_blocks_are_dropped():
    blocks: KvBlocks[bytes] = KvBlocks(2, BLOCK_TOKENS)
    memory = BlockMemory(blocks)
    for number in range(100):
        compute_and_end(blocks, memory, [number.to_bytes(16, "big")])
        memory.changed()
        memory.check()


def test_unfetched_events_become_a_dump():
    blocks: KvBlocks[bytes] = KvBlocks(2, BLOCK_TOKENS)
    memory = BlockMemory(blocks)
    for number in range(100):
        compute_and_end(blocks, memory, [number.to_bytes(16, "big")])
        assert memory.changed()

    events = memory.take_events()

    assert events == (KvCleared(), KvStored((number.to_bytes(16, "big"),)))
    assert memory.take_events() == ()
