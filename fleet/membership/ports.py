"""What the registry's server needs of the world: directories in which workers are published."""

from collections.abc import AsyncGenerator
from typing import Protocol

from fleet.membership.messages import DirectoryReading


class Directory(Protocol):
    """Where workers publish themselves, as a router reads it."""

    def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        """A `Listed` of all there is, then what changes.

        Where it ends it is to be called again, at once: nothing is missed, since it begins with all there is.

        Raises:
            DirectoryUnreachable: To be tried again after a pause.
        """
        ...


class DirectoryUnreachable(Exception):
    """A directory did not answer, or not as it should; the message says how, in one line."""
