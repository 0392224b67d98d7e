"""What the use of a block in a node's memory saves: for the eviction policy that goes by value. Pure.

Rules:

1. A use saves the difference between having the block from elsewhere and having it from memory. Elsewhere is the first
   tier below that is known to hold it, at the speed that was measured of that tier; where none does, or computing is
   faster, it is computed.
2. How long computing takes is told by the workers of a namespace: the patience of a look-up is the time that computing
   the chain's blocks would take, learnt from the engine's own steps. Blocks that the engine had itself are in the chain
   and not in the patience; so the most that the last `SAMPLES` look-ups told a block is believed.
3. Until a worker has told, a token takes `UNKNOWN_SECONDS_A_TOKEN`, and memory is read at `MEMORY_BYTES_A_SECOND`, which
   no node can see: clients on its host map it.
4. Answers are rounded to powers of two. The policy keeps a row for each, and nothing is known more exactly.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable

from kvstore.messages import BlockKey
from kvstore.namespace import KvNamespace

SAMPLES = 64
MAX_NAMESPACES = 256  # whose workers' paces are remembered; the one that told the longest ago goes first
UNKNOWN_SECONDS_A_TOKEN = 0.0005  # as workers believe before they have measured: `workers.engines.vllm.prefill_speed`
MEMORY_BYTES_A_SECOND = 5e9  # one core's copy with its checksum
LEAST = 2.0**-60  # seconds a byte; of what is not worth its place


class HitSavings:
    """Of all namespaces of a node."""

    def __init__(
        self,
        *,
        seconds_a_token: float = UNKNOWN_SECONDS_A_TOKEN,
        memory_bytes_a_second: float = MEMORY_BYTES_A_SECOND,
    ):
        """Nothing is told yet; `attach` comes before the first question.

        Args:
            seconds_a_token: That computing takes, until a namespace's workers have told it.
            memory_bytes_a_second: At which clients read from the node's memory.
        """
        self._seconds_a_token = seconds_a_token
        self._memory_seconds_a_byte = 1 / memory_bytes_a_second
        self._told: OrderedDict[bytes, deque[float]] = OrderedDict()  # seconds a block

    def attach(self, namespace: Callable[[bytes], KvNamespace], below: Callable[[BlockKey, int], float | None]) -> None:
        """What the node knows, which is made after its policy.

        Args:
            namespace: By digest, of those that are open.
            below: Seconds in which a block of that size comes from a tier below; None where none is known to have it.
        """
        self._namespace = namespace
        self._below = below

    def told(self, digest: bytes, blocks: int, seconds: float) -> None:
        """A worker says how long it would take to compute that many blocks, or some of them."""
        if blocks <= 0 or seconds <= 0:
            return
        self._told.setdefault(digest, deque(maxlen=SAMPLES)).append(seconds / blocks)
        self._told.move_to_end(digest)
        if len(self._told) > MAX_NAMESPACES:
            self._told.popitem(last=False)

    def computing(self, digest: bytes) -> float:
        """Seconds for one block."""
        if told := self._told.get(digest):
            return max(told)
        return self._namespace(digest).block_tokens * self._seconds_a_token

    def saving(self, key: BlockKey, size_bytes: int) -> float:
        """Seconds a byte, of the block and of all of its chain."""
        elsewhere = self.computing(key.digest)
        if (loading := self._below(key, size_bytes)) is not None:
            elsewhere = min(elsewhere, loading)
        a_byte = elsewhere / size_bytes - self._memory_seconds_a_byte
        return 2.0 ** round(math.log2(a_byte)) if a_byte > LEAST else LEAST
