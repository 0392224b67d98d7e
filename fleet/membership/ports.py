"""Ports of membership: the registry of workers, and the directories in which workers are published."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Protocol, Self

from fleet.core.clock import Nanos
from fleet.core.ids import Incarnation, WorkerId
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


class Registry(Protocol):
    """The registry at which a worker registers."""

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        """Take or renew a membership; return how long it lasts.

        Raises:
            RegistryUnreachable: Try again; serving goes on meanwhile. `RegistrationRefused` is a subclass.
            NameHeld: Another live process has this worker's id. Try again for a while if this process never had the
                id.
            WorkerSuperseded: Do not try again.
        """
        ...

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...


class RegistryUnreachable(Exception):
    """The registry did not answer in time."""


class RegistrationRefused(RegistryUnreachable):
    """The registry refuses this worker because of its proof; the message says which setting to change."""


class NameHeld(Exception):
    """Another process holds this worker's id, and its lease has not ended; the message names the process."""


class WorkerSuperseded(Exception):
    """A newer process has this worker's id; the message says what the reason may be."""


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
