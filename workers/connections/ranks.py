"""Connections between the ranks of one engine: TCP from each rank to the first, with one JSON object per line.

`workers.rank_rendezvous` decides which ranks join and when a group ends. If the group ends although the leader has not
ordered it, `leading_group` and `joined_group` cancel the body of their contexts and raise an exception group with
`EngineDied`.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import ConfigurationRefused
from fleet.net.sockets import bind_tcp
from kvstore.net.addresses import host_port
from kvstore.net.unix_sockets import OUT_OF_FILES
from workers.ports import EngineDied
from workers.rank_rendezvous import (
    ENGINE_PORTS,
    Begin,
    FromLeader,
    FromRank,
    GroupEnded,
    GroupServing,
    Join,
    RankAlive,
    RankLeaving,
    RankRefused,
    RankRendezvous,
    engine_group,
)
from workers.settings import GroupSettings

log = logging.getLogger(__name__)

LINE_BYTES = 4096  # maximum length of a message in bytes; a longer one ends the connection
BEATS = 5  # number of heartbeats that each side sends within `silence_ms`; a side that is silent for that time counts as lost
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.1, 1.0  # minimum and maximum pause between two attempts to join
CONNECT_SECONDS = 5.0
# maximum number of connections that have not sent a message yet; one more closes the oldest of them
MAX_SILENT_CONNECTIONS = 64

Word = TypeVar("Word")

FROM_RANK: msgspec.json.Decoder[FromRank] = msgspec.json.Decoder(FromRank)
FROM_LEADER: msgspec.json.Decoder[FromLeader] = msgspec.json.Decoder(FromLeader)


class _Gone(Exception):
    """Raised when a connection cannot be used any more, or when the leader refuses a rank for now.

    The message is a predicate, such as "has ended"; the code that catches the exception adds the subject.
    """


class GroupLeader:
    """Leads a group of ranks in the process of its first rank; made by `leading_group`."""

    def __init__(self, group: GroupSettings, common: str, clock: Clock, reserved: ExitStack) -> None:
        """Prepare to lead a group; sockets that reserve ports for the engine are pushed to `reserved`."""
        self.group = group
        """The group's settings; once all ranks have joined, they contain the address and ports for the engine."""

        self._reserved = reserved
        self._rendezvous = RankRendezvous(group, common, clock.now())
        self._clock = clock
        self._links: dict[int, asyncio.StreamWriter] = {}  # connections of the ranks that have joined, by rank
        self._silent: dict[int, asyncio.Task[None]] = {}  # tasks of connections without a message yet, the oldest first
        self._changed = asyncio.Event()
        self._joined = asyncio.Event()
        self._on_leaving: Callable[[], None] | None = None
        self._asked = False

    def when_asked_to_end(self, call: Callable[[], None]) -> None:
        """Set the function that is called when a rank other than the leader has to end, so that the group can drain.

        If such a rank has asked to end already, the function is called at once.
        """
        self._on_leaving = call
        if self._asked:
            call()

    def serving(self) -> None:
        """Notify the other ranks that the whole engine runs. The engine uses its ports now, so end their reservation."""
        self._reserved.close()
        self._tell(GroupServing())

    def end(self) -> None:
        """Notify the other ranks that the leader has drained, so that they may end."""
        self._rendezvous.end()
        self._tell(GroupEnded())

    async def formed(self) -> None:
        """Wait until all ranks have joined, then tell all of them to start their parts of the engine."""
        while not self._rendezvous.complete:
            self._joined.clear()
            await self._joined.wait()
        # Rank 1 has reached this host by this address, so the engine's processes on the other hosts can reach it too.
        address = str(self._links[1].get_extra_info("sockname")[0])
        ports = self.group.engine_ports or _reserve_ports(self._reserved, address)
        begin = Begin(address=address, ports=ports)
        self._rendezvous.begin()
        self.group = engine_group(self.group, begin)
        self._tell(begin)
        log.info("worker group complete", extra={"nodes": self.group.nodes, "address": address})

    async def listen(self, listening: socket.socket) -> None:
        """Accept connections of ranks until cancelled."""
        async with asyncio.TaskGroup() as links:
            for number in itertools.count():
                connection = await _accepted(listening)
                if len(self._silent) == MAX_SILENT_CONNECTIONS:
                    # Close the oldest silent connection. It is probably not that of a rank, because a rank sends its
                    # first message at once.
                    self._silent.pop(next(iter(self._silent))).cancel()
                self._silent[number] = links.create_task(self._hear(number, connection))
                await asyncio.sleep(0)  # lets the new task and other tasks run

    async def watch(self) -> None:
        """Send heartbeats to the other ranks, and watch whether the group fails.

        Raises:
            EngineDied: A rank was lost, or not all ranks joined in time.
        """
        while True:
            self._rendezvous.check()
            if (fault := self._rendezvous.fault(self._clock.now())) is not None:
                raise EngineDied(fault)
            self._tell(RankAlive())
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_beat_seconds(self.group)):
                    await self._changed.wait()

    async def _hear(self, number: int, connection: socket.socket) -> None:
        """Handle a connection from its first message to its end."""
        rank, writer = 0, None
        try:
            try:
                reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)
                word = await _next(reader, FROM_RANK, self.group)
            finally:
                self._silent.pop(number, None)
            if isinstance(word, Join) and self._taken(word, writer):
                rank = word.rank
                while True:
                    self._heed(await _next(reader, FROM_RANK, self.group))
        except (_Gone, OSError) as gone:
            if rank and self._links.get(rank) is writer:
                del self._links[rank]
                self._rendezvous.gone(rank, str(gone))
                self._changed.set()
                log.info("engine rank disconnected", extra={"rank": rank, "cause": str(gone)})
        finally:
            if writer is not None:
                writer.close()

    def _taken(self, asked: Join, writer: asyncio.StreamWriter) -> bool:
        """Return True and keep the connection if a rank may join; otherwise send it the reason why it is refused, and return False."""
        if (refused := self._rendezvous.join(asked)) is not None:
            if not refused.again:
                log.warning("engine rank refused", extra={"cause": refused.why})
            _say(writer, refused)
            return False
        if (former := self._links.get(asked.rank)) is not None:
            former.close()
        self._links[asked.rank] = writer
        log.info("engine rank connected", extra={"rank": asked.rank})
        self._joined.set()
        return True

    def _heed(self, word: FromRank) -> None:
        if isinstance(word, RankLeaving) and not self._asked:
            self._asked = True
            log.info("engine rank asked to end, draining the group")
            if self._on_leaving is not None:
                self._on_leaving()

    def _tell(self, word: FromLeader) -> None:
        for link in self._links.values():
            _say(link, word)


@asynccontextmanager
async def leading_group(group: GroupSettings, common: str, clock: Clock) -> AsyncIterator[GroupLeader]:
    """Wait for all other ranks, then lead them while the context is open.

    Args:
        group: Settings of rank 0.
        common: The digest of the common settings (`workers.rank_rendezvous.common_settings_digest`).
        clock: The clock by which the time limits of the group are measured.

    Raises:
        ConfigurationRefused: The address to listen at cannot be used.
        EngineDied: A rank did not join in time, or was lost later; raised in an exception group.
    """
    listening, _ = bind_tcp(group.listen or group.leader, setting="group.listen" if group.listen else "group.leader")
    listening.setblocking(False)
    with listening, ExitStack() as reserved:
        lead = GroupLeader(group, common, clock, reserved)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(lead.listen(listening)), tasks.create_task(lead.watch())]
            try:
                await lead.formed()
                yield lead
            finally:
                for task in running:
                    task.cancel()


class GroupFollower:
    """Follows the leader of a group as one of the other ranks; made by `joined_group`."""

    def __init__(self, group: GroupSettings, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.group = group
        """The group's settings; once all ranks have joined, they contain the address and ports for the engine."""

        self.serving = False
        """True once the leader has reported that the engine runs with all its ranks."""

        self.over = asyncio.Event()
        """Set when the leader has drained, so that this rank may end."""

        self._reader = reader
        self._writer = writer
        self._on_serving: Callable[[], None] | None = None

    def when_serving(self, call: Callable[[], None]) -> None:
        """Set the function that is called once the whole engine runs; if the engine runs already, it is called at once."""
        self._on_serving = call
        if self.serving:
            call()

    def leave(self) -> None:
        """Notify the leader that this rank was asked to end, so that the leader drains and ends the group."""
        _say(self._writer, RankLeaving())

    async def hear(self) -> None:
        """Handle the leader's messages until the group's orderly end.

        Raises:
            EngineDied: The connection to the leader was lost without an order to end.
        """
        while not self.over.is_set():
            try:
                word = await _next(self._reader, FROM_LEADER, self.group)
            except _Gone as gone:
                raise EngineDied(f"the leader of its group {gone}") from gone
            if isinstance(word, GroupServing) and not self.serving:
                self.serving = True
                if self._on_serving is not None:
                    self._on_serving()
            elif isinstance(word, GroupEnded):
                self.over.set()

    async def beat(self) -> None:
        """Send heartbeats to the leader until cancelled."""
        while True:
            _say(self._writer, RankAlive())
            await asyncio.sleep(_beat_seconds(self.group))


@asynccontextmanager
async def joined_group(group: GroupSettings, common: str, clock: Clock) -> AsyncIterator[GroupFollower]:
    """Join the leader, wait until all ranks have joined, and follow it while the context is open.

    Args:
        group: Settings of a rank above 0.
        common: The digest of the common settings (`workers.rank_rendezvous.common_settings_digest`).
        clock: The clock by which the time limits of the group are measured.

    Raises:
        ConfigurationRefused: The leader refuses this rank for good, because its rank, its number of nodes or its settings do not fit.
        EngineDied: The group did not form in time. If the connection to the leader is lost later, the error is raised in an
            exception group.
    """
    reader, writer, begin = await _joined(group, common, clock)
    follow = GroupFollower(engine_group(group, begin), reader, writer)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(follow.hear()), tasks.create_task(follow.beat())]
            try:
                yield follow
            finally:
                for task in running:
                    task.cancel()
    finally:
        writer.close()


async def _joined(
    group: GroupSettings, common: str, clock: Clock
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Begin]:
    """Try to join again and again until the leader reports that all ranks have joined.

    Raises:
        ConfigurationRefused: The leader refuses this rank for good.
        EngineDied: The time `join_timeout_ms` is over.
    """
    until = Nanos(clock.now() + group.join_timeout_ms * MILLISECOND)
    pause, why = LEAST_PAUSE_SECONDS, "the leader does not answer"
    while (left := (until - clock.now()) / SECOND) > 0:
        try:
            return await _tried(group, common, left)
        except TimeoutError:
            cause = why  # an attempt that timed out gives no new cause, so the earlier one is reported
        except (_Gone, OSError) as error:  # the leader refuses, does not listen yet, or cannot be found
            cause = f"the leader {error}" if isinstance(error, _Gone) else str(error)
        if cause != why:
            log.info("worker group not formed yet", extra={"leader": group.leader, "cause": cause})
            why = cause
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_SECONDS)
    raise EngineDied(f"its group did not form within {group.join_timeout_ms / 1000:g} s: {why} ({group.leader})")


async def _tried(
    group: GroupSettings, common: str, left: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Begin]:
    """Connect to the leader within `CONNECT_SECONDS`, join, and then wait at most `left` seconds until all ranks have joined."""
    async with asyncio.timeout(min(left, CONNECT_SECONDS)):
        reader, writer = await asyncio.open_connection(*host_port(group.leader), limit=LINE_BYTES)
    begin: Begin | None = None
    try:
        async with asyncio.timeout(left):
            begin = await _begun(group, common, reader, writer)
    finally:
        if begin is None:
            writer.close()
    return reader, writer, begin


async def _begun(
    group: GroupSettings, common: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Begin:
    """Join the group, and wait until the leader reports that all ranks have joined.

    Raises:
        _Gone: The connection was lost, or the leader refuses this rank for now; the caller should try again.
        ConfigurationRefused: The leader refuses this rank for good.
    """
    _say(writer, Join(rank=group.rank, nodes=group.nodes, alike=common))
    while True:
        word = await _next(reader, FROM_LEADER, group)
        if isinstance(word, Begin):
            return word
        if isinstance(word, RankRefused) and not word.again:
            raise ConfigurationRefused(word.why)
        if isinstance(word, RankRefused):
            raise _Gone(f"refuses this rank: {word.why}")
        _say(writer, RankAlive())


async def _accepted(listening: socket.socket) -> socket.socket:
    while True:
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
        except OSError as error:
            if error.errno not in OUT_OF_FILES:
                raise
            await asyncio.sleep(MOST_PAUSE_SECONDS)
        else:
            return connection


def _beat_seconds(group: GroupSettings) -> float:
    return group.silence_ms / 1000 / BEATS


async def _next(reader: asyncio.StreamReader, words: msgspec.json.Decoder[Word], group: GroupSettings) -> Word:
    """Return the next message of the other side.

    Raises:
        _Gone: The other side was silent for `silence_ms`, has closed the connection, or sent an invalid message.
    """
    try:
        async with asyncio.timeout(group.silence_ms / 1000):
            line = await reader.readline()
    except TimeoutError as error:
        raise _Gone(f"has said nothing for {group.silence_ms / 1000:g} s") from error
    except (OSError, ValueError) as error:  # ValueError: the line is too long
        raise _Gone("has ended") from error
    if not line.endswith(b"\n"):
        raise _Gone("has ended")
    try:
        return words.decode(line)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise _Gone("sent an unknown message; it may have another version") from error


def _say(writer: asyncio.StreamWriter, word: FromRank | FromLeader) -> None:
    """Queue a message on the connection, without waiting until it is sent.

    Messages are few and short, so those for a peer that does not read take little memory until its silence ends the connection.
    """
    if not writer.is_closing():
        writer.write(msgspec.json.encode(word) + b"\n")


def _reserve_ports(reserved: ExitStack, address: str) -> tuple[int, ...]:
    """Bind sockets to free ports of this host's address, and return the ports; `reserved` closes the sockets.

    These sockets never listen. While they are bound, the system lets another socket bind the same port only if that
    socket has the option SO_REUSEADDR too (Linux's socket(7)). The sockets of engines have this option.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = [reserved.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(ENGINE_PORTS)]
    for each in held:
        each.bind((address, 0))
        # Set after binding. Otherwise the socket could share its port with the reservation of another process.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return tuple(int(each.getsockname()[1]) for each in held)
