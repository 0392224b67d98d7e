"""Ports of membership: the registry where workers register, and the directories in which they are published."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol, Self

from fleet.core.clock import Nanos
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.messages import Deregister, DirectoryReading, Register


class Directory(Protocol):
    """Port by which a router reads a directory in which workers publish themselves."""

    def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        """Yield first a `DirectoryListing` of all records, then the changes.

        When the generator ends, call `readings` again at once. Nothing is missed, because the new generator starts with a
        listing.

        Raises:
            DirectoryUnreachable: The directory cannot be read now. Try again after a pause.
        """
        ...


class DirectoryUnreachable(Exception):
    """Error: the directory did not answer, or sent something invalid. The message gives the cause in one line."""


class Registry(Protocol):
    """Port by which a worker registers at a registry or in a directory."""

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        """Register a worker, or renew its registration; return the duration of its lease.

        Raises:
            RegistryUnreachable: No registry has accepted the worker. Try again, and go on serving. `RegistrationRefused`
                is a subclass.
            NameHeld: Another live process has this worker's id. If this process never had the id, it should try again
                for a while, because the other process may be about to end.
            WorkerSuperseded: A newer process has this worker's id. Do not try again.
        """
        ...

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...


class RegistryUnreachable(Exception):
    """Error: the registry could not be reached, or answered with an error."""


class RegistrationRefused(RegistryUnreachable):
    """Error: the registry rejects this worker. The message states what to change."""


class RegistrationIncompatible(RegistrationRefused):
    """Error: the registry and this worker speak no common version of the protocol. The message states what to upgrade."""


class NameHeld(Exception):
    """Error: another process holds this worker's id: its lease has not ended, or the router has a stream to it.

    The message names that process.
    """


class WorkerSuperseded(Exception):
    """Error: a newer process has registered under this worker's id. The message says that every worker needs an id of its own."""


class StatelessDirectory:
    """Base class of directories without open connections: an async context manager that does nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing; records that were not withdrawn stay until their leases end."""


class RegistrationListener(Protocol):
    """Port by which a registry informs the peer routers of registrations and deregistrations."""

    def registered(self, event: Register) -> None: ...

    def deregistered(self, event: Deregister) -> None: ...
