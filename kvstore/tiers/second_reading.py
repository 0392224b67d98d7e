"""Second reading: finds out whether a bad value is damaged where it is stored, or was damaged in transit.

Rules:

1. A block is removed only if its stored value is damaged, because other nodes use the same server. Two readings decide
   that. Each has a new connection.
2. The readings have to agree on the length and on every byte that proves the damage. If an answer is for another request
   than the one that was sent, the readings do not agree. A reading that fails or is incomplete proves nothing.
3. The second reading fetches each range in two halves, the later half first. A fault that damages every answer at the
   same offset therefore damages the value at different offsets in the two readings.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

Read = Callable[[int, int], bytes]
"""A function that returns the bytes of a value from one offset up to another, which is exclusive."""


class Reading(Protocol):
    """Port that reads one value, by a connection that is used for nothing else."""

    @property
    def length(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes:
        """Fetch all bytes from offset `start` up to `stop`.

        Raises:
            OSError: The bytes did not arrive, or the answer is for something else.
        """
        ...


class ReadingVerdict(Enum):
    """Outcome of the readings of one value."""

    SOUND = auto()  # the value is correct
    CORRUPT = auto()  # the stored value is damaged
    UNSURE = auto()  # the readings do not agree
    UNREAD = auto()  # a reading failed
    GONE = auto()  # the value no longer exists

    @property
    def is_damage_in_transit(self) -> bool:
        return self in (ReadingVerdict.SOUND, ReadingVerdict.UNSURE)


Proof = Callable[[int, Read], bytes | None]
"""A function that returns the proof that a value is corrupt, from its length and bytes; None if it is not corrupt."""

Open = Callable[[], AbstractContextManager[Reading | None]]
"""A function that opens a connection for one reading; the context yields None if there is no value."""


class ReadingsDiffer(OSError):
    """The server's answer is for another request than the one that was sent."""


def judge(open_reading: Open, proof: Proof) -> ReadingVerdict:
    """Read a value, and a second time if it is bad; return the verdict. Each reading has a new connection.

    The verdict is never UNREAD. It is UNSURE also if a reading raises `ReadingsDiffer` or `ValueError`.

    Raises:
        OSError: A reading failed. Other exceptions of `open_reading` and of the readings are passed on too, and mean the
            same.
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
