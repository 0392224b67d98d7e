"""Second reading: whether a value that was found corrupt lies there like that, or was damaged on its way here.

Rules:

1. Other nodes use the same servers, so that a block is removed only when it is damaged where it lies. What tells is two
   readings of it, each by a connection of its own, that were opened for it.
2. They have to agree on every byte that proves the damage, and on the length. An answer that is not of what was asked for
   agrees with nothing. A reading that fails or is cut short is no sign of damage, and proves nothing.
3. The second one asks for other pieces, the later ones first. So what damages each answer at the same place does not
   damage the value at the same place twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

Read = Callable[[int, int], bytes]
"""The bytes of a value from one place to before another."""


class Reading(Protocol):
    """A value, by a connection of its own."""

    @property
    def length(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes:
        """Fetch the bytes from one place to before another, all of them.

        Raises:
            OSError: They do not come, or are not those that were asked for.
        """
        ...


class ReadingVerdict(Enum):
    """The outcome of two readings."""

    SOUND = auto()  # the block is there, and as it was written
    CORRUPT = auto()  # its value is damaged where it lies
    UNSURE = auto()  # they do not agree
    UNREAD = auto()  # one of them could not be made
    GONE = auto()  # there is no value any more

    @property
    def is_damage_on_the_way(self) -> bool:
        return self in (ReadingVerdict.SOUND, ReadingVerdict.UNSURE)


Proof = Callable[[int, Read], bytes | None]
"""Returns the proof that a value is corrupt, from its length and bytes; None where it is not."""

Open = Callable[[], AbstractContextManager[Reading | None]]
"""Opens a connection for one reading; None where there is no value."""


class ReadingsDiffer(OSError):
    """A server's answer is not of what was asked for."""


def judge(open_reading: Open, proof: Proof) -> ReadingVerdict:
    """Read a value twice, and return the verdict.

    Args:
        open_reading: Opens a connection for each.
        proof: See `kvstore.tiers.remote_records.RecordFramer.proof`.

    Raises:
        OSError: A reading could not be made; other errors of `open_reading` and the readings say the same.
    """
    with open_reading() as reading:
        if reading is None:
            return ReadingVerdict.GONE
        try:
            first = proof(reading.length, reading.read)
        except (ReadingsDiffer, ValueError):
            return ReadingVerdict.UNSURE
        if first is None:
            return ReadingVerdict.SOUND
    with open_reading() as again:
        if again is None:
            return ReadingVerdict.GONE
        try:
            second = proof(again.length, _backwards(again.read))
        except (ReadingsDiffer, ValueError):
            return ReadingVerdict.UNSURE
    return ReadingVerdict.CORRUPT if first == second else ReadingVerdict.UNSURE


def _backwards(read: Read) -> Read:
    def halves(start: int, stop: int) -> bytes:
        middle = (start + stop) // 2
        if middle == start:
            return read(start, stop)
        later = read(middle, stop)
        return read(start, middle) + later

    return halves
