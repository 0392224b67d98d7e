"""Ports of the registry: the directories in which workers are published."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol, Self

from fleet.membership.messages import Deregister, DirectoryReading, Register


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


class StatelessDirectory:
    """Context manager methods of a directory without open connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the records as they are."""


class RegistrationListener(Protocol):
    """The peers of a registry, which are told of registrations."""

    def registered(self, event: Register) -> None: ...

    def deregistered(self, event: Deregister) -> None: ...
