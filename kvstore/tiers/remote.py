"""Remote tier: the common part of the tiers on other servers. A `TierBackend` reaches one kind of server, like Redis.

Rules:

1. If the backend fails during `get` or `put`, the call returns the answers that the backend has given before the
   failure. If there are none, the call raises `TierFailed`. If the backend fails during `find` or `holds`, the call
   always raises `TierFailed`. This module counts each failure once.
2. A call that begins after the tier is closed sends nothing to the server. Neither does a call that begins after its
   deadline; this counts as a failure of the tier.
3. A block that the backend cannot take (`TierBackend.takes`) is neither written nor looked up on the server. Such a block
   belongs, for example, to a namespace that is not open on this node. `put` counts it as refused, and for `find`, `holds`
   and `get` it is missing.
4. If `get` finds that a block is missing or bad on the server, the next call of `gone` reports the block, unless the
   block was written again between the two calls.
5. A block that is found bad is read again before it is removed (`kvstore.tiers.second_reading`): it may have been damaged
   in transit, and other nodes use the same server. A server whose answers are often damaged is fenced
   (`kvstore.tiers.fence`): until the fence opens, `find`, `holds`, `put` and `get` raise `TierFailed` at once.

A backend for another kind of server is registered at two places: its settings in `AnyTier` (`kvstore.service.settings`),
and how it is opened in `_open` (`kvstore.service.backing_tiers`). CONTRIBUTING.md lists all files ("Add a store tier").
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvstore.buffers import ByteArray
from kvstore.clock import SECOND, Clock, Nanos
from kvstore.errors import TierFailed
from kvstore.messages import GONE, BlockKey, BlockOutcome, FetchResult, TierStatus
from kvstore.tiers.fence import Fence
from kvstore.tiers.second_reading import ReadingVerdict
from kvstore.tiers.statistics import TierStatistics

REMOVE_WITHIN = Nanos(1 * SECOND)

EXAMINE_WITHIN = Nanos(5 * SECOND)
"""Time limit for the second readings at the end of a call of `get`. They also end at the call's deadline, because the
call waits for them."""

EXAMINED = 4
"""Maximum number of bad blocks that are read again at the end of a call of `get`. The others stay until a later call
finds them bad."""

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class BlockWrite(Struct, frozen=True):
    """A block that a backend has to write."""

    block: ByteArray
    crc32c: int  # CRC-32C with which the block was published


class BlockRead(Struct, frozen=True):
    """A block that a backend has to fetch, and the buffer for its bytes."""

    key: BlockKey
    into: ByteArray


class BackendHealth(Struct, frozen=True):
    """Counts of a backend that detects bad blocks itself; all are 0 for other backends."""

    corrupt: int = 0  # number of bad blocks that the backend has found since the tier was opened
    damaged: int = 0  # number of these blocks that were damaged only in transit
    fenced: int = 0  # number of servers that are fenced now (rule 5)


class TierBackend(Protocol):
    """Port of the remote tier: reads and writes blocks on one kind of server, such as Redis.

    The tier calls the methods from several threads. Methods that take keys or blocks get at least one. A method with a
    deadline ends by this deadline. It may raise `TierFailed` at any time. The tier then uses the answers that `put` or
    `get` has entered before.
    """

    def takes(self, key: BlockKey, block_bytes: int | None = None) -> bool:
        """Return whether a block can be stored and fetched at all; do no I/O.

        `block_bytes` is the length of the block. If it is None, the length is not checked.
        """
        ...

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        """Return how many leading blocks are stored."""
        ...

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """Return which of these distinct blocks are stored."""
        ...

    def put(self, work: Mapping[BlockKey, BlockWrite], there: dict[BlockKey, bool], deadline: Nanos) -> None:
        """Write blocks, and enter into `there` for each block whether the server has it now."""
        ...

    def get(self, work: Mapping[int, BlockRead], answers: dict[int, FetchResult], deadline: Nanos) -> None:
        """Fetch blocks, and enter the answer for each block into `answers`, under the number that it has in `work`.

        The content of a buffer is valid only if its answer is MOVED.
        """
        ...

    def examine(self, key: BlockKey, block_bytes: int, deadline: Nanos) -> ReadingVerdict:
        """Read a bad block again, over new connections; return the verdict (`kvstore.tiers.second_reading.judge`)."""
        ...

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:
        """Remove blocks that are stored with wrong bytes."""
        ...

    def health(self) -> "BackendHealth":
        """Return the counts of bad blocks that the backend itself has detected."""
        ...

    def close(self) -> None:
        """Close the backend; a second call does nothing. Calls in progress do not keep the process from ending."""
        ...


S = TypeVar("S", bound=TierBackend)


class RemoteTier(Generic[S]):
    """Backing tier on another server; uses a `TierBackend` by the rules of this module."""

    finds_in_memory = False

    def __init__(self, backend: S, statistics: TierStatistics, clock: Clock):
        """Make a tier that owns `backend`, which must count its bytes and refusals in the same `statistics`."""
        self.backend = backend
        self._statistics = statistics
        self._clock = clock
        self._closed = False
        self._guard = threading.Lock()
        self._fence = Fence()

    @property
    def name(self) -> str:
        return self._statistics.name

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        self._require_open()
        known = next((index for index, key in enumerate(keys) if not self.backend.takes(key)), len(keys))
        if not known or self._is_late(deadline):
            return 0
        return self._counted(lambda: self.backend.find(keys[:known], deadline))

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        self._require_open()
        known = list(dict.fromkeys(key for key in keys if self.backend.takes(key)))
        if not known:
            return [False] * len(keys)
        if self._is_late(deadline):
            raise TierFailed(f"the deadline passed before the {self.name} tier was asked")
        answers = self._counted(lambda: self.backend.holds(known, deadline))
        there = {key for key, is_there in zip(known, answers, strict=True) if is_there}
        return [key in there for key in keys]

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        self._require_open()
        there: dict[BlockKey, bool] = {}
        work = {
            key: BlockWrite(block, checksum)
            for key, block, checksum in zip(keys, blocks, checksums, strict=True)
            if self.backend.takes(key, block.nbytes)
        }
        self._statistics.count(refused=len(set(keys)) - len(work))
        if work and not self._is_late(deadline):
            self._allow_partial(lambda: self.backend.put(work, there, deadline), there)
        self._statistics.mark_present(key for key, is_there in there.items() if is_there)
        return [there.get(key, False) for key in keys]

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        self._require_open()
        answers: dict[int, FetchResult] = {}
        work = {
            index: BlockRead(key, buffer)
            for index, (key, buffer) in enumerate(zip(keys, into, strict=True))
            if self.backend.takes(key, buffer.nbytes)
        }
        if work and not self._is_late(deadline):
            self._allow_partial(lambda: self.backend.get(work, answers, deadline), answers)
        fetched = [answers.get(index, GONE) for index in range(len(keys))]
        self._statistics.count_fetched(fetched, into)
        self._statistics.mark_gone(
            keys[index] for index in sorted(answers) if answers[index].outcome is not BlockOutcome.MOVED
        )
        corrupt = {
            key: buffer.nbytes
            for key, answer, buffer in zip(keys, fetched, into, strict=True)
            if answer.outcome is BlockOutcome.CORRUPT
        }
        damaged = self._examine(corrupt, deadline) if corrupt else 0
        self._report_to_fence(sound=sum(answer.outcome is BlockOutcome.MOVED for answer in fetched), damaged=damaged)
        return fetched

    def discard(self, keys: Sequence[BlockKey]) -> None:
        if not keys or self._closed:
            return
        self._statistics.mark_gone(keys)
        try:
            self._counted(lambda: self.backend.remove(keys, Nanos(self._clock.now() + REMOVE_WITHIN)))
        except TierFailed:
            return  # the failure is counted; the blocks stay, and their next reads find them bad again

    def gone(self) -> list[BlockKey]:
        return self._statistics.gone()

    def held(self) -> list[BlockKey]:
        """Return an empty list, because this node does not know which blocks the server holds."""
        return []

    def status(self) -> TierStatus:
        status = self._statistics.status()
        health = self.backend.health()
        return replace(
            status,
            corrupt=status.corrupt + health.corrupt,
            damaged=status.damaged + health.damaged,
            fenced=self._fence.is_closed + health.fenced,
        )

    def close(self) -> None:
        self._closed = True
        self.backend.close()

    def _require_open(self) -> None:
        """Check that the tier is neither closed nor fenced.

        Raises:
            TierFailed: The tier is closed or fenced.
        """
        if self._closed:
            raise TierFailed(f"the {self.name} tier is closed")
        with self._guard:
            opens = self._fence.reopen(self._clock.now())
            is_fenced = self._fence.is_closed
        if opens:
            log.info("tier fence opened", extra={"tier": self.name})
        if is_fenced:
            self._statistics.count(failures=1)
            raise TierFailed(f"the {self.name} tier is fenced, because its answers were damaged in transit")

    def _is_late(self, deadline: Nanos) -> bool:
        """If the deadline has passed, count a failure and return True; otherwise return False."""
        is_late = self._clock.now() >= deadline
        self._statistics.count(failures=is_late)
        return is_late

    def _examine(self, corrupt: Mapping[BlockKey, int], deadline: Nanos) -> int:
        """Read the first `EXAMINED` bad blocks again, and return how many of them were damaged in transit.

        Blocks whose stored value is damaged are removed. `corrupt` has the length of each bad block.
        """
        until = min(deadline, Nanos(self._clock.now() + EXAMINE_WITHIN))
        stored_corrupt, damaged = [], 0
        for key in list(corrupt)[:EXAMINED]:
            try:
                verdict = self.backend.examine(key, corrupt[key], until)
            # Too little time was left, or the server did not answer. This does not show that the block is damaged.
            except TierFailed as error:
                verdict = ReadingVerdict.UNREAD
                log.warning(
                    "corrupt block kept, second reading failed",
                    extra={"tier": self.name, "block": key.name.hex(), "reason": str(error)},
                )
            if verdict is ReadingVerdict.CORRUPT:
                stored_corrupt.append(key)
            elif verdict.is_damage_in_transit:
                damaged += 1
                log.warning(
                    "block damaged in transit, kept",
                    extra={"tier": self.name, "block": key.name.hex(), "second_reading": verdict.name.lower()},
                )
        self._statistics.count(damaged=damaged)
        self.discard(stored_corrupt)
        return damaged

    def _report_to_fence(self, *, sound: int, damaged: int) -> None:
        """Tell the fence how many of the blocks that were read are sound, and how many were damaged in transit."""
        with self._guard:
            closes = self._fence.record(sound=sound, damaged=damaged, now=self._clock.now())
        if closes:
            log.warning("tier fenced, answers damaged in transit", extra={"tier": self.name})

    def _allow_partial(self, act: Callable[[], None], got: Sized) -> None:
        """Call `act`. If it fails after it has entered answers into `got`, ignore the failure (rule 1)."""
        try:
            self._counted(act)
        except TierFailed:
            if not got:
                raise

    def _counted(self, act: Callable[[], Answer]) -> Answer:
        try:
            return act()
        except TierFailed:
            self._statistics.count(failures=1)
            raise
