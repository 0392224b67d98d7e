"""A tier whose blocks lie in servers elsewhere: all that Redis, object stores and peers have in common. Each of them is a `TierBackend`.

Rules:

1. A call that is cut short answers with what it got; one that got nothing has failed. Either is counted once, here.
2. Nothing is begun once the tier is closed, nor after the deadline of a call, which is a failure.
3. What a backend does not take (its namespace is not open here) it is not asked about: it is refused, or a miss.
4. What was asked for and is not there has gone, and is told so once.
5. What is found bad is read again before it is removed, since it may have been damaged on its way here, and others use the
   same server (`kvstore.tiers.second_reading`). A server whose answers are damaged often is fenced (`kvstore.tiers.fence`):
   until that opens again, calls fail without being made.
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
from kvstore.tiers.tier_gate import TierGate

REMOVE_WITHIN = Nanos(1 * SECOND)

EXAMINE_WITHIN = Nanos(5 * SECOND)
"""For reading again what a call found bad, where its deadline allows that much: nobody has its answers meanwhile."""

EXAMINED = 4
"""Blocks that are read again after a call. What was found bad besides is read again after the call that meets it next."""

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class BlockWrite(Struct, frozen=True):
    """A block to keep."""

    block: ByteArray
    crc32c: int  # with which it was published


class BlockRead(Struct, frozen=True):
    """A block to fetch."""

    key: BlockKey
    into: ByteArray


class BackendHealth(Struct, frozen=True):
    """The counts of a backend that judges blocks itself."""

    corrupt: int = 0
    damaged: int = 0
    fenced: int = 0  # servers that are left alone now


class TierBackend(Protocol):
    """What one kind of server does with blocks: no more than what is particular to it.

    Calls come from several threads, never without work, and keep to their deadline. Each may raise `TierFailed` at any time; what it
    has answered by then counts.
    """

    def takes(self, key: BlockKey, block_bytes: int | None = None) -> bool:
        """Whether a block can be kept and fetched at all; costs nothing.

        Args:
            key: Of the block.
            block_bytes: Its length, where it is known.
        """
        ...

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        """See `kvstore.ports.BackingTier`."""
        ...

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """See `kvstore.ports.BackingTier`; each key is there once."""
        ...

    def put(self, work: Mapping[BlockKey, BlockWrite], there: dict[BlockKey, bool], deadline: Nanos) -> None:
        """Keep blocks, and say of each whether it is there now."""
        ...

    def get(self, work: Mapping[int, BlockRead], answers: dict[int, FetchResult], deadline: Nanos) -> None:
        """Fetch blocks, and answer for each; the content of a buffer is void wherever the answer is not MOVED."""
        ...

    def examine(self, key: BlockKey, block_bytes: int, deadline: Nanos) -> ReadingVerdict:
        """Read a block again that was found bad, by connections that are opened for it."""
        ...

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:
        """Remove blocks that are bad where they lie."""
        ...

    def health(self) -> "BackendHealth":
        """Return what the backend has seen of its servers, as far as it judges blocks itself."""
        ...

    def close(self) -> None:
        """Once or more often. Nothing that is under way then keeps the process from ending."""
        ...


S = TypeVar("S", bound=TierBackend)


class RemoteTier(Generic[S]):
    """See `kvstore.ports.BackingTier`, and the module."""

    finds_in_memory = False

    def __init__(self, backend: S, statistics: TierStatistics, clock: Clock):
        """A tier with that backend.

        Args:
            backend: Closed with the tier.
            statistics: Of the tier; the backend counts bytes and refusals in it.
            clock: Of the deadlines.
        """
        self.backend = backend
        self._statistics = statistics
        self._clock = clock
        self._gate = TierGate(statistics, clock)
        self._guard = threading.Lock()
        self._fence = Fence()

    @property
    def name(self) -> str:
        return self._statistics.name

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        self._require_open()
        known = next((index for index, key in enumerate(keys) if not self.backend.takes(key)), len(keys))
        if not known or self._gate.is_late(deadline):
            return 0
        return self._counted(lambda: self.backend.find(keys[:known], deadline))

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        self._require_open()
        known = list(dict.fromkeys(key for key in keys if self.backend.takes(key)))
        if not known:
            return [False] * len(keys)
        if self._gate.is_late(deadline):
            raise TierFailed(f"the {self.name} tier was asked too late")
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
        if work and not self._gate.is_late(deadline):
            self._as_far_as_it_goes(lambda: self.backend.put(work, there, deadline), there)
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
        if work and not self._gate.is_late(deadline):
            self._as_far_as_it_goes(lambda: self.backend.get(work, answers, deadline), answers)
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
        self._note(sound=sum(answer.outcome is BlockOutcome.MOVED for answer in fetched), damaged=damaged)
        return fetched

    def discard(self, keys: Sequence[BlockKey]) -> None:
        if not keys or self._gate.is_closed:
            return
        self._statistics.mark_gone(keys)
        try:
            self._counted(lambda: self.backend.remove(keys, Nanos(self._clock.now() + REMOVE_WITHIN)))
        except TierFailed:
            return  # counted; what is bad is found bad again

    def gone(self) -> list[BlockKey]:
        return self._statistics.gone()

    def held(self) -> list[BlockKey]:
        """Nobody here knows."""
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
        self._gate.close()
        self.backend.close()

    def _require_open(self) -> None:
        """Begin nothing on a tier that is closed or fenced.

        Raises:
            TierFailed: It is.
        """
        self._gate.require_open()
        with self._guard:
            opens = self._fence.reopen(self._clock.now())
            is_fenced = self._fence.is_closed
        if opens:
            log.info("tier is tried again after damaged answers", extra={"tier": self.name})
        if is_fenced:
            self._statistics.count(failures=1)
            raise TierFailed(f"the {self.name} tier is fenced: its answers were damaged on their way")

    def _examine(self, corrupt: Mapping[BlockKey, int], deadline: Nanos) -> int:
        """Remove what is corrupt where it lies; returns how many blocks were damaged on their way instead."""
        until = min(deadline, Nanos(self._clock.now() + EXAMINE_WITHIN))
        lie_bad, damaged = [], 0
        for key in list(corrupt)[:EXAMINED]:
            try:
                verdict = self.backend.examine(key, corrupt[key], until)
            except TierFailed as error:  # too little time is left, or the server is away: no sign of damage
                verdict = ReadingVerdict.UNREAD
                log.warning(
                    "corrupt block could not be read again, and stays until a call that can",
                    extra={"tier": self.name, "block": key.name.hex(), "reason": str(error)},
                )
            if verdict is ReadingVerdict.CORRUPT:
                lie_bad.append(key)
            elif verdict.is_damage_on_the_way:
                damaged += 1
                log.warning(
                    "block was damaged on its way, and stays",
                    extra={"tier": self.name, "block": key.name.hex(), "second_reading": verdict.name.lower()},
                )
        self._statistics.count(damaged=damaged)
        self.discard(lie_bad)
        return damaged

    def _note(self, *, sound: int, damaged: int) -> None:
        """Tell the fence what was read."""
        with self._guard:
            closes = self._fence.record(sound=sound, damaged=damaged, now=self._clock.now())
        if closes:
            log.warning("tier is fenced, since its answers are damaged on their way", extra={"tier": self.name})

    def _as_far_as_it_goes(self, act: Callable[[], None], got: Sized) -> None:
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
