"""Hit savings: estimate the time that a hit in the pool saves, for the eviction policy `hazard`.

Rules:

1. A hit saves the time that the block would cost without the pool, less the time to read it from the pool. Without the
   pool, the block would be loaded from the first backing tier that is known to have it, at the tier's measured speed.
   If no tier has it, if this speed is not known, or if computing is faster, the block would be computed.
2. The workers of a namespace report the time to compute blocks: the max wait of a look-up is the time to compute the
   blocks of its chain, learned from the engine's steps. If the engine has some of these blocks in its own cache, the
   max wait does not include their time, so the time per block is too low. Therefore the highest time per block of the
   last `SAMPLES` look-ups is used.
3. Until a worker has reported, a fixed time to compute one token is assumed (`seconds_a_token`). A fixed speed of
   reading the pool is assumed too (`memory_bytes_a_second`): a node cannot measure it, because clients on its host read
   the memory directly.
4. Results are rounded to powers of two, because the policy keeps one row of blocks for each distinct result. More exact
   results would be of no use, because the inputs are not exact.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable

from kvstore.messages import BlockKey
from kvstore.namespace import KvNamespace

SAMPLES = 64
# Maximum number of namespaces whose reports are remembered; the one whose last report is the oldest is forgotten first.
MAX_NAMESPACES = 256
# seconds to compute a token that workers assume until they have measured this time (`workers.engines.vllm.store_planner`)
UNKNOWN_SECONDS_A_TOKEN = 0.0005
# Assumed speed of reading the pool (rule 3): one core copies this many bytes per second and computes their checksum.
MEMORY_BYTES_A_SECOND = 5e9
LEAST = 2.0**-60  # smallest result of `saving`, in seconds per byte; also the result for blocks whose hits save nothing


class HitSavings:
    """Estimates the time that a hit saves, for all namespaces of a node."""

    def __init__(
        self, *, seconds_a_token: float = UNKNOWN_SECONDS_A_TOKEN, memory_bytes_a_second: float = MEMORY_BYTES_A_SECOND
    ):
        """Start without reports, and with the assumptions of rule 3.

        The caller has to call `attach` before the other methods.
        """
        self._seconds_a_token = seconds_a_token
        self._memory_seconds_a_byte = 1 / memory_bytes_a_second
        # seconds per block in the last `SAMPLES` reports of the workers, by namespace digest
        self._reports: OrderedDict[bytes, deque[float]] = OrderedDict()

    def attach(self, namespace: Callable[[bytes], KvNamespace], below: Callable[[BlockKey, int], float | None]) -> None:
        """Set two functions that belong to other parts of the node.

        They cannot be arguments of `__init__`, because the eviction policy needs this object before those parts are
        made.

        `namespace` returns the namespace of a digest. `below` returns the seconds to load a block of a given size in
        bytes from a backing tier; None if no tier has the block, or if the tier's speed is not known.
        """
        self._namespace = namespace
        self._below = below

    def report(self, digest: bytes, blocks: int, seconds: float) -> None:
        """Record a worker's report of the time to compute a chain of `blocks` blocks.

        `seconds` is the time for the blocks of the chain that are not in the engine's own cache (rule 2). If either
        number is 0, the report is ignored.
        """
        if blocks <= 0 or seconds <= 0:
            return
        self._reports.setdefault(digest, deque(maxlen=SAMPLES)).append(seconds / blocks)
        self._reports.move_to_end(digest)
        if len(self._reports) > MAX_NAMESPACES:
            self._reports.popitem(last=False)

    def computing_seconds(self, digest: bytes) -> float:
        """Return the seconds to compute one block of a namespace."""
        if report := self._reports.get(digest):
            return max(report)
        return self._namespace(digest).block_tokens * self._seconds_a_token

    def saving(self, key: BlockKey, size_bytes: int) -> float:
        """Return the seconds per byte that a hit of this block saves.

        The eviction policy uses the result for all blocks of the chain to which the block belongs.
        """
        elsewhere = self.computing_seconds(key.digest)
        if (loading := self._below(key, size_bytes)) is not None:
            elsewhere = min(elsewhere, loading)
        a_byte = elsewhere / size_bytes - self._memory_seconds_a_byte
        return 2.0 ** round(math.log2(a_byte)) if a_byte > LEAST else LEAST
