"""Hit savings: the time that a hit in the pool saves, for the eviction policy by value.

Rules:

1. A hit saves the difference between getting the block from elsewhere and reading it from the pool. Elsewhere is the
   first backing tier that is known to have the block, at its measured speed. If no tier has it, or computing is faster,
   the block is computed.
2. The workers of a namespace report how long computing takes: the max wait of a look-up is the time to compute the
   blocks of its chain, learned from the engine's steps. Blocks that the engine had itself are in the chain but not in
   the max wait. Therefore the highest value per block of the last `SAMPLES` look-ups is used.
3. Until a worker has reported, a token takes `UNKNOWN_SECONDS_A_TOKEN`. The pool is read at `MEMORY_BYTES_A_SECOND`,
   which a node cannot measure, because clients on its host map the memory.
4. Results are rounded to powers of two. The policy keeps a row for each result, and no input is more exact.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable

from kvstore.messages import BlockKey
from kvstore.namespace import KvNamespace

SAMPLES = 64
MAX_NAMESPACES = 256  # namespaces whose reports are remembered; the one with the oldest report is forgotten first
UNKNOWN_SECONDS_A_TOKEN = 0.0005  # default of workers before they have measured: `workers.engines.vllm.store_planner`
MEMORY_BYTES_A_SECOND = 5e9  # a copy with its checksum by one core
LEAST = 2.0**-60  # seconds per byte, for blocks that save nothing


class HitSavings:
    """Savings of all namespaces of a node."""

    def __init__(
        self, *, seconds_a_token: float = UNKNOWN_SECONDS_A_TOKEN, memory_bytes_a_second: float = MEMORY_BYTES_A_SECOND
    ):
        """Start without reports; call `attach` before the first question."""
        self._seconds_a_token = seconds_a_token
        self._memory_seconds_a_byte = 1 / memory_bytes_a_second
        self._reports: OrderedDict[bytes, deque[float]] = OrderedDict()  # seconds per block

    def attach(self, namespace: Callable[[bytes], KvNamespace], below: Callable[[BlockKey, int], float | None]) -> None:
        """Connect the parts of the node, which are made after its policy.

        `below` returns the seconds in which a block of that size comes from a backing tier; None if no tier has it.
        """
        self._namespace = namespace
        self._below = below

    def report(self, digest: bytes, blocks: int, seconds: float) -> None:
        """Record a worker's report that computing these blocks, or some of them, takes so long."""
        if blocks <= 0 or seconds <= 0:
            return
        self._reports.setdefault(digest, deque(maxlen=SAMPLES)).append(seconds / blocks)
        self._reports.move_to_end(digest)
        if len(self._reports) > MAX_NAMESPACES:
            self._reports.popitem(last=False)

    def computing_seconds(self, digest: bytes) -> float:
        """Return the seconds to compute one block."""
        if report := self._reports.get(digest):
            return max(report)
        return self._namespace(digest).block_tokens * self._seconds_a_token

    def saving(self, key: BlockKey, size_bytes: int) -> float:
        """Return the seconds that a hit saves per byte, for the block and all of its chain."""
        elsewhere = self.computing_seconds(key.digest)
        if (loading := self._below(key, size_bytes)) is not None:
            elsewhere = min(elsewhere, loading)
        a_byte = elsewhere / size_bytes - self._memory_seconds_a_byte
        return 2.0 ** round(math.log2(a_byte)) if a_byte > LEAST else LEAST
