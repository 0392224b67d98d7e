"""Ports of the registry: the directories in which workers are published."""

from collections.abc import AsyncGenerator
from typing import Protocol

from fleet.membership.messages import DirectoryReading


class Directory(Protocol):
    """A directory of workers, as a router reads it."""

    def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        """Yield a `DirectoryListing` of everything, then the changes.

        When the generator ends, call it again at once. Nothing is missed, because it starts with a listing.

        Raises:
            DirectoryUnreachable: Try again after a pause.
        """
        ...


class DirectoryUnreachable(Exception):
    """The directory did not answer, or sent something invalid; the message says how, in one line."""
