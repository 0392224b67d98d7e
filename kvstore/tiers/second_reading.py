"""Second reading: finds out whether a bad value is damaged on the server, or was damaged on its way to this node.

Rules:

1. A block is removed only if its stored value is damaged, because other nodes use the same server. Two readings decide
   whether this is so. Each uses a new connection.
2. The readings have to agree on the length and on every byte that proves the damage. If the server answers another
   request than the one that was sent, the readings count as different. A reading that fails or is incomplete proves
   nothing.
3. The second reading fetches each range in two halves, the later half first. If a fault damages every answer at the
   same offset, the damaged bytes of the value are therefore not the same in the two readings.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Protocol

Read = Callable[[int, int], bytes]
"""A function that returns bytes of a value. Its arguments are the offset of the first byte, and the offset after the
last one."""


class Reading(Protocol):
    """Port that reads one value over a connection of its own."""

    @property
    def length(self) -> int: ...

    def read(self, start: int, stop: int) -> bytes:
        """Fetch all bytes from offset `start` up to offset `stop` (exclusive).

        Raises:
            OSError: The bytes did not arrive, or the server answered another request.
        """
        ...


class ReadingVerdict(Enum):
    """The finding about a value that was found damaged, after it was read again at most twice."""

    SOUND = auto()  # the value shows no damage when it is read again, so the damage happened in transit
    CORRUPT = auto()  # the stored value is damaged
    UNSURE = auto()  # the readings do not agree, so the damage may have happened in transit
    UNREAD = auto()  # the value was not read again, or a reading failed, so nothing is known
    GONE = auto()  # the value no longer exists

    @property
    def is_damage_in_transit(self) -> bool:
        return self in (ReadingVerdict.SOUND, ReadingVerdict.UNSURE)


Proof = Callable[[int, Read], bytes | None]
"""A function that returns the proof that a value is corrupt, or None if the value is sound. Its arguments are the
value's length and a function that fetches the value's bytes."""

Open = Callable[[], AbstractContextManager[Reading | None]]
"""A function that opens a connection for one reading; the context yields None if the server has no such value."""


class ReadingsDiffer(OSError):
    """The server has answered another request than the one that was sent."""


def judge(open_reading: Open, proof: Proof) -> ReadingVerdict:
    """Read a value, and if it is bad, read it once more; return the verdict. Each reading uses a new connection.

    The verdict is UNSURE if the readings differ, or if one raises `ReadingsDiffer` or `ValueError`. It is never UNREAD.

    Raises:
        OSError: A reading failed. Any other exception of `open_reading` or of a reading is passed on too, and also
            means that a reading failed.
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
