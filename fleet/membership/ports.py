"""Ports of membership: the registry where workers register, and the directories in which they are published."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol, Self

from fleet.core.clock import Nanos
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.messages import Deregister, DirectoryReading, Register


class Directory(Protocol):
    """A directory of workers, as a router reads it."""

    def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        """Yield first a `DirectoryListing` of all records, then the changes.

        When the generator ends, call it again at once. Nothing is missed, because the new generator starts with a
        listing.

        Raises:
            DirectoryUnreachable: The directory cannot be read now. Try again after a pause.
        """
        ...


class DirectoryUnreachable(Exception):
    """The directory did not answer, or sent something invalid; the message gives the cause in one line."""


class Registry(Protocol):
    """The registry at which a worker registers, as the worker sees it."""

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        """Start or renew a membership; return the duration of its lease.

        Raises:
            RegistryUnreachable: No registry answered. Try again, and go on serving. `RegistrationRefused` is a
                subclass.
            NameHeld: Another live process has this worker's id. If this process never had the id, try again for a
                while.
            WorkerSuperseded: A newer process has this worker's id. Do not try again.
        """
        ...

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...


class RegistryUnreachable(Exception):
    """The registry did not answer in time."""


class RegistrationRefused(RegistryUnreachable):
    """The registry rejects this worker because of its credentials; the message says which setting to change."""


class NameHeld(Exception):
    """Another process holds this worker's id, and its lease has not ended; the message names the process."""


class WorkerSuperseded(Exception):
    """A newer process has this worker's id; the message says how that can happen."""


class StatelessDirectory:
    """Base class of directories without open connections: an async context manager that does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing; records that were not withdrawn stay until their leases end."""


class RegistrationListener(Protocol):
    """The peer routers of a registry, which it informs of registrations and deregistrations."""

    def registered(self, event: Register) -> None: ...

    def deregistered(self, event: Deregister) -> None: ...
