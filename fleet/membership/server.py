"""The registry around the membership machine: time passes, and whoever wants to know hears of changes."""

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
LONGEST_BACKOFF_SECONDS = 2.0  # a directory that comes back is read again within this


class RegistryServer:
    """Membership of one cluster, in memory.

    Consumers do not queue: each compares what it has told with what is so, which needs memory for the members only,
    however slow the consumer. A departure and return between two looks is one change, or none.
    """

    def __init__(self, settings: MembershipSettings, clock: Clock) -> None:
        self._machine = Membership(settings)
        self._clock = clock
        self._tick_seconds = settings.tick_ms / 1000
        self._changed = asyncio.Event()  # replaced after each change
        self._refusals = LogDeduplicator()  # a refused worker asks twice a second
        self.directory_reachable: bool | None = None
        """Whether what is followed answers; None: nothing is followed, or it has not been asked yet."""

        self.followed = asyncio.Event()
        """Set once it is known what the directory has."""

    @property
    def lease_ms(self) -> int:
        return self._machine.lease // MILLISECOND

    def register(self, event: Register) -> RegistrationRefusal | None:
        """Take or renew a membership; returns why it is refused, None where it is not."""
        commands = self._machine.handle(event, self._clock.now())
        self._announce(commands)
        return next((command for command in commands if isinstance(command, RegistrationRefusal)), None)

    def hear(self, event: ReachabilityEvent) -> None:
        """Take in what this router's own streams say of a worker: whether it is there."""
        self._announce(self._machine.handle(event, self._clock.now()))

    def deregister(self, event: Deregister) -> None:
        self._announce(self._machine.handle(event, self._clock.now()))

    def hear_of(self, event: Registration) -> None:
        """Another router tells of a worker."""
        self._announce(self._machine.handle(event, self._clock.now()))

    def registrations(self) -> list[Registration]:
        """Who has registered here, and what is left of the leases."""
        return self._machine.registrations(self._clock.now())

    @property
    def members(self) -> Mapping[WorkerId, MemberJoined]:
        """Who is one now."""
        return self._machine.members

    async def run(self) -> Never:
        """End leases as time passes; until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(self._tick_seconds)

    def tick(self) -> None:
        """End the leases that are over."""
        self._announce(self._machine.handle(MembershipTicked(), self._clock.now()))

    async def follow(self, directory: Directory) -> Never:
        """Have as members, besides those who register here, whom a directory has; until cancelled.

        While it cannot be reached, what was known of it is so until its leases end.
        """
        known = DirectoryDiff()
        pause = FIRST_BACKOFF_SECONDS
        while True:
            try:
                async with aclosing(directory.readings()) as readings:
                    async for sighting in readings:
                        for event in known.handle(sighting):
                            self._announce(self._machine.handle(event, self._clock.now()))
                        if not self.directory_reachable:
                            log.info("reading the directory of workers")
                        self.directory_reachable, pause = True, FIRST_BACKOFF_SECONDS
                        self.followed.set()
            except DirectoryUnreachable as error:
                if self.directory_reachable is not False:
                    log.warning("directory of workers unreachable, known ones stay", extra={"cause": str(error)})
                self.directory_reachable = False
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_BACKOFF_SECONDS)

    async def membership(self) -> AsyncIterator[MembershipChange]:
        """The members there are, then changes; any number of consumers."""
        told: dict[WorkerId, MemberJoined] = {}
        while True:
            changed = self._changed
            members = self._machine.members
            for worker_id, member in list(told.items()):
                if members.get(worker_id) != member:
                    del told[worker_id]
                    yield MemberLeft(worker_id=worker_id)
            for worker_id, member in members.items():
                if worker_id not in told:
                    told[worker_id] = member
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
                    log.warning("a replaced worker registers", extra={"worker": command.worker_id})
                case NameOccupied() if self._is_news(command, command.holder):
                    log.warning(
                        "registration refused, another process holds the name",
                        extra={"worker": command.worker_id, "holder": command.holder},
                    )
        if any(not isinstance(command, RegistrationRefusal) for command in commands):
            self._changed.set()
            self._changed = asyncio.Event()

    def _is_news(self, refusal: RegistrationRefusal, cause: str) -> bool:
        return self._refusals.is_new(refusal.worker_id, cause, self._clock.now())
