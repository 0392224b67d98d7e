"""Reference caches: simple, slow implementations of eviction policies, written from the papers and not from Fleet's code."""

from collections.abc import Iterable

from kvstore.eviction.trace_replay import TraceRequest


def hit_tokens(requests: Iterable[TraceRequest], cache: "ReferenceCache", block_tokens: int) -> int:
    """Return the number of cached tokens that a replay finds by rules 1 to 4 of `kvstore.eviction.trace_replay`."""
    total = 0
    for request in requests:
        found = 0
        while found < len(request.chain) and cache.holds(request.chain[found]):
            found += 1
        total += min(found * block_tokens, request.prompt_tokens)
        own = set(request.chain)
        held = [block for block in request.chain if cache.holds(block)]
        new = [block for block in request.chain if block not in held][: cache.capacity - len(held)]
        for block in reversed(held):
            cache.touch(block)
        for _ in range(cache.size() + len(new) - cache.capacity):
            cache.evict(own)
        for block in reversed(new):
            cache.insert(block)
        for block in reversed(request.chain):
            if block in held or block in new:
                cache.order(block)
    return total


class ReferenceCache:
    """Base class of the caches.

    `touch` records the use of a block. After all blocks of a request are stored, `order` is called for each of them, so
    that new and old blocks of the request are in one common order.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity

    def order(self, block):
        pass


class ReferenceLru(ReferenceCache):
    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.used: dict[int, int] = {}
        self.ticks = 0

    def holds(self, block):
        return block in self.used

    def size(self):
        return len(self.used)

    def touch(self, block):
        self.ticks += 1
        self.used[block] = self.ticks

    insert = order = touch

    def evict(self, own):
        oldest = min((block for block in self.used if block not in own), key=self.used.__getitem__)
        del self.used[oldest]


class ReferenceSlru(ReferenceCache):
    """Segmented LRU: two lists, each sorted by the last use, the oldest use first."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.held: set[int] = set()  # the blocks of both lists
        self.probation: list[int] = []
        self.protected: list[int] = []

    def holds(self, block):
        return block in self.held

    def size(self):
        return len(self.held)

    def touch(self, block):
        (self.probation if block in self.probation else self.protected).remove(block)
        self.protected.append(block)
        while len(self.protected) > 0.8 * self.size():
            self.probation.append(self.protected.pop(0))

    def insert(self, block):
        self.held.add(block)
        self.probation.append(block)

    def order(self, block):
        row = self.probation if block in self.probation else self.protected
        row.remove(block)
        row.append(block)

    def evict(self, own):
        for row in (self.probation, self.protected):
            for block in row:
                if block not in own:
                    row.remove(block)
                    self.held.remove(block)
                    return
        raise AssertionError("nothing may go")


class ReferenceS3Fifo(ReferenceCache):
    """Algorithm 1 of the S3-FIFO paper; the newest block is at the head of a list."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.freq: dict[int, int] = {}

    def holds(self, block):
        return block in self.freq

    def size(self):
        return len(self.small) + len(self.main)

    def touch(self, block):
        self.freq[block] = min(self.freq[block] + 1, 3)

    def insert(self, block):
        if block in self.ghost:
            self.ghost.remove(block)
            self.main.insert(0, block)
        else:
            self.small.insert(0, block)
        self.freq[block] = 0

    def evict(self, own):
        before = self.size()
        while self.size() == before:
            if self.small and (len(self.small) >= 0.1 * self.capacity or not self.main):
                self.evict_small(own)
            else:
                self.evict_main(own)

    def evict_small(self, own):
        block = self.small.pop()
        if self.freq[block] > 1 or block in own:
            self.main.insert(0, block)
            self.freq[block] = 0
            return
        del self.freq[block]
        self.ghost.insert(0, block)
        del self.ghost[max(1, len(self.main)) :]

    def evict_main(self, own):
        block = self.main.pop()
        if self.freq[block] > 0 or block in own:
            self.main.insert(0, block)
            self.freq[block] = max(0, self.freq[block] - 1)
            return
        del self.freq[block]
