"""Registry server: runs the membership machine, checks for ended leases regularly, and reports changes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Never

from fleet.core.clock import MILLISECOND, Clock
from fleet.core.ids import WorkerId
from fleet.core.repeats import LogDeduplicator
from fleet.membership.directory_diff import DirectoryDiff
from fleet.membership.machine import Membership
from fleet.membership.messages import (
    Deregister,
    MemberJoined,
    MemberLeft,
    MembershipChange,
    MembershipCommand,
    MembershipTicked,
    NameOccupied,
    ReachabilityEvent,
    Register,
    Registration,
    RegistrationRefusal,
    RegistrationSuperseded,
)
from fleet.membership.ports import Directory, DirectoryUnreachable
from fleet.membership.settings import MembershipSettings

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 2.0  # maximum pause between two attempts to read a directory, in seconds


class RegistryServer:
    """Keeps the registry of the workers of one cluster in memory, and reports its changes.

    There are no queues of changes. For each consumer of `membership`, the members that it knows are compared with the
    present members. So memory depends only on the number of members, even if a consumer is slow. If a worker leaves and
    returns between two comparisons, the consumer gets no change. If it returns with another incarnation or address, the
    consumer gets one departure and one arrival.
    """

    def __init__(self, settings: MembershipSettings, clock: Clock) -> None:
        self.machine = Membership(settings)
        self._clock = clock
        self._tick_seconds = settings.tick_ms / 1000
        self._changed = asyncio.Event()  # the next change sets this event, and replaces it by a new one
        # Limits the log messages about rejected workers, which register again twice a second.
        self._refusals = LogDeduplicator()
        self.directory_reachable: bool | None = None
        """True while the directory answers, False while it does not; None: no directory was read yet."""

        self.followed = asyncio.Event()
        """Set as soon as the directory was read for the first time."""

    @property
    def lease_ms(self) -> int:
        return self.machine.lease // MILLISECOND

    def register(self, event: Register) -> RegistrationRefusal | None:
        """Register a worker, or renew its registration. Return None if the registration was accepted, else the refusal."""
        commands = self.machine.handle(event, self._clock.now())
        self._announce(commands)
        return next((command for command in commands if isinstance(command, RegistrationRefusal)), None)

    def hear(self, event: ReachabilityEvent) -> None:
        """Record that this router's stream to a worker has opened or closed, or that the worker cannot be reached."""
        self._announce(self.machine.handle(event, self._clock.now()))

    def deregister(self, event: Deregister) -> None:
        self._announce(self.machine.handle(event, self._clock.now()))

    def hear_of(self, event: Registration) -> None:
        """Handle a worker's registration with another router, which that router has announced."""
        self._announce(self.machine.handle(event, self._clock.now()))

    def registrations(self) -> list[Registration]:
        """Return the workers that have registered here, with the remaining time of their leases."""
        return self.machine.registrations(self._clock.now())

    @property
    def members(self) -> Mapping[WorkerId, MemberJoined]:
        """The present members, by the ids of the workers."""
        return self.machine.members

    async def run(self) -> Never:
        """Check for ended leases at regular intervals, until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(self._tick_seconds)

    def tick(self) -> None:
        """Remove the members whose leases have ended."""
        self._announce(self.machine.handle(MembershipTicked(), self._clock.now()))

    async def follow(self, directory: Directory) -> Never:
        """Keep the workers of a directory among the members, until cancelled.

        While the directory is unreachable, its workers stay members until their leases end.
        """
        known = DirectoryDiff()
        pause = FIRST_BACKOFF_SECONDS
        while True:
            try:
                async with aclosing(directory.readings()) as readings:
                    async for sighting in readings:
                        for event in known.handle(sighting):
                            self._announce(self.machine.handle(event, self._clock.now()))
                        if not self.directory_reachable:
                            log.info("directory of workers reachable")
                        self.directory_reachable, pause = True, FIRST_BACKOFF_SECONDS
                        self.followed.set()
            except DirectoryUnreachable as error:
                if self.directory_reachable is not False:
                    log.warning(
                        "directory of workers unreachable, its workers stay until their leases end",
                        extra={"cause": str(error)},
                    )
                self.directory_reachable = False
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_BACKOFF_SECONDS)

    async def membership(self) -> AsyncIterator[MembershipChange]:
        """Yield the present members as arrivals, and then what has changed since the last comparison (see the class).

        Several consumers may iterate at the same time.
        """
        announced: dict[WorkerId, MemberJoined] = {}
        while True:
            changed = self._changed
            members = self.machine.members
            for worker_id, member in list(announced.items()):
                if members.get(worker_id) != member:
                    del announced[worker_id]
                    yield MemberLeft(worker_id=worker_id)
            for worker_id, member in members.items():
                if worker_id not in announced:
                    announced[worker_id] = member
                    yield member
            await changed.wait()

    def _announce(self, commands: list[MembershipCommand]) -> None:
        for command in commands:
            match command:
                case MemberJoined():
                    log.info("worker joined", extra={"worker": command.worker_id, "address": command.address})
                case MemberLeft():
                    log.info("worker left", extra={"worker": command.worker_id})
                case RegistrationSuperseded() if self._is_news(command, "replaced"):
                    log.warning("registration rejected, the worker was replaced", extra={"worker": command.worker_id})
                case NameOccupied() if self._is_news(command, command.holder):
                    log.warning(
                        "registration rejected, another process holds the name",
                        extra={"worker": command.worker_id, "holder": command.holder},
                    )
        if any(not isinstance(command, RegistrationRefusal) for command in commands):
            self._changed.set()
            self._changed = asyncio.Event()

    def _is_news(self, refusal: RegistrationRefusal, cause: str) -> bool:
        return self._refusals.is_new(refusal.worker_id, cause, self._clock.now())
