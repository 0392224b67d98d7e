"""A tier whose blocks lie in servers elsewhere: all that Redis, object stores and peers have in common. Each of them is a `Shelf`.

Rules:

1. A call that is cut short answers with what it got; one that got nothing has failed. Either is counted once, here.
2. Nothing is begun once the tier is closed, nor after the deadline of a call, which is a failure.
3. What a shelf does not take (its namespace is not open here) it is not asked about: it is refused, or a miss.
4. What was asked for and is not there has gone, and is told so once. What is found bad is removed at once.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Generic, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kvstore.buffers import ByteArray
from kvstore.clock import SECOND, Clock, Nanos
from kvstore.errors import TierFailed
from kvstore.messages import GONE, BlockKey, BlockOutcome, Fetched, TierStatus
from kvstore.tiers.gate import Gate
from kvstore.tiers.tally import Tally

REMOVE_WITHIN = Nanos(1 * SECOND)

Answer = TypeVar("Answer")


class Given(Struct, frozen=True):
    """A block to keep."""

    block: ByteArray
    crc32c: int  # with which it was published


class Wanted(Struct, frozen=True):
    """A block to fetch."""

    key: BlockKey
    into: ByteArray


class Shelf(Protocol):
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

    def put(self, work: Mapping[BlockKey, Given], there: dict[BlockKey, bool], deadline: Nanos) -> None:
        """Keep blocks, and say of each whether it is there now."""
        ...

    def get(self, work: Mapping[int, Wanted], answers: dict[int, Fetched], deadline: Nanos) -> None:
        """Fetch blocks, and answer for each; the content of a buffer is void wherever the answer is not MOVED."""
        ...

    def remove(self, keys: Sequence[BlockKey], deadline: Nanos) -> None:
        """Blocks that were found bad."""
        ...

    def close(self) -> None:
        """Once or more often. Nothing that is under way then keeps the process from ending."""
        ...


S = TypeVar("S", bound=Shelf)


class RemoteTier(Generic[S]):
    """See `kvstore.ports.BackingTier`, and the module."""

    finds_in_memory = False

    def __init__(self, shelf: S, tally: Tally, clock: Clock, *, found_bad: Callable[[], int] = lambda: 0):
        """A tier with that shelf.

        Args:
            shelf: Closed with the tier.
            tally: Of the tier; the shelf counts bytes and refusals in it.
            clock: Of the deadlines.
            found_bad: Blocks that others than `Records` found bad for the shelf, so far.
        """
        self.shelf = shelf
        self._tally = tally
        self._clock = clock
        self._gate = Gate(tally, clock)
        self._found_bad = found_bad

    @property
    def name(self) -> str:
        return self._tally.name

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        self._gate.require_open()
        known = next((index for index, key in enumerate(keys) if not self.shelf.takes(key)), len(keys))
        if not known or self._gate.is_late(deadline):
            return 0
        return self._counted(lambda: self.shelf.find(keys[:known], deadline))

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        self._gate.require_open()
        known = list(dict.fromkeys(key for key in keys if self.shelf.takes(key)))
        if not known:
            return [False] * len(keys)
        if self._gate.is_late(deadline):
            raise TierFailed(f"the {self.name} tier was asked too late")
        answers = self._counted(lambda: self.shelf.holds(known, deadline))
        there = {key for key, is_there in zip(known, answers, strict=True) if is_there}
        return [key in there for key in keys]

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        self._gate.require_open()
        there: dict[BlockKey, bool] = {}
        work = {
            key: Given(block, checksum)
            for key, block, checksum in zip(keys, blocks, checksums, strict=True)
            if self.shelf.takes(key, block.nbytes)
        }
        self._tally.count(refused=len(set(keys)) - len(work))
        if work and not self._gate.is_late(deadline):
            self._as_far_as_it_goes(lambda: self.shelf.put(work, there, deadline), there)
        self._tally.present(key for key, is_there in there.items() if is_there)
        return [there.get(key, False) for key in keys]

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[Fetched]:
        self._gate.require_open()
        answers: dict[int, Fetched] = {}
        work = {
            index: Wanted(key, buffer)
            for index, (key, buffer) in enumerate(zip(keys, into, strict=True))
            if self.shelf.takes(key, buffer.nbytes)
        }
        if work and not self._gate.is_late(deadline):
            self._as_far_as_it_goes(lambda: self.shelf.get(work, answers, deadline), answers)
        fetched = [answers.get(index, GONE) for index in range(len(keys))]
        self._tally.fetched(fetched, into)
        self._tally.missed(keys[index] for index in sorted(answers) if answers[index].outcome is not BlockOutcome.MOVED)
        self.discard([key for key, answer in zip(keys, fetched, strict=True) if answer.outcome is BlockOutcome.CORRUPT])
        return fetched

    def discard(self, keys: Sequence[BlockKey]) -> None:
        if not keys or self._gate.is_closed:
            return
        self._tally.missed(keys)
        try:
            self._counted(lambda: self.shelf.remove(keys, Nanos(self._clock.now() + REMOVE_WITHIN)))
        except TierFailed:
            return  # counted; what is bad is found bad again

    def gone(self) -> list[BlockKey]:
        return self._tally.gone()

    def held(self) -> list[BlockKey]:
        """Nobody here knows."""
        return []

    def status(self) -> TierStatus:
        status = self._tally.status()
        return replace(status, corrupt=status.corrupt + self._found_bad())

    def close(self) -> None:
        self._gate.close()
        self.shelf.close()

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
            self._tally.count(failures=1)
            raise
