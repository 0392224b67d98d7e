"""Second reading: whether a value that was found corrupt lies there like that, or was damaged on its way here.

Rules:

1. Other nodes use the same servers, so that a block is removed only when it is damaged where it lies. What tells is two
   readings of it, each by a connection of its own, that were opened for it.
2. They have to agree on every byte that proves the damage, and on the length. One that fails, or is cut short, agrees with
   nothing.
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


class Verdict(Enum):
    """What two readings came to."""

    SOUND = auto()  # the block is there, and as it was written
    CORRUPT = auto()  # its value is damaged where it lies
    UNSURE = auto()  # they do not agree, or could not be made
    GONE = auto()  # there is no value any more

    @property
    def is_damage_on_the_way(self) -> bool:
        return self in (Verdict.SOUND, Verdict.UNSURE)


Proof = Callable[[int, Read], bytes | None]
"""What proves that a value is corrupt, of its length and bytes; None where it is not."""

Open = Callable[[], AbstractContextManager[Reading | None]]
"""Opens a connection for one reading; None where there is no value."""


class Unlike(OSError):
    """A server's answer is not of what was asked for."""


def judge(open_reading: Open, proof: Proof) -> Verdict:
    """Return what two readings of a value come to.

    Args:
        open_reading: Opens a connection for each.
        proof: See `kvstore.tiers.records.Records.proof`.

    Raises:
        OSError: A reading failed, as do other errors of `open_reading` and the readings.
    """
    with open_reading() as reading:
        if reading is None:
            return Verdict.GONE
        first = proof(reading.length, reading.read)
        if first is None:
            return Verdict.SOUND
    with open_reading() as again:
        if again is None:
            return Verdict.GONE
        second = proof(again.length, _backwards(again.read))
    return Verdict.CORRUPT if first == second else Verdict.UNSURE


def _backwards(read: Read) -> Read:
    def halves(start: int, stop: int) -> bytes:
        middle = (start + stop) // 2
        if middle == start:
            return read(start, stop)
        later = read(middle, stop)
        return read(start, middle) + later

    return halves
