"""The words between the processes of one engine: a TCP connection from each rank to the first, with a JSON object a line.

Who is taken in, and when a group is at an end, is decided in `workers.rank_rendezvous`. Both ends raise `EngineDied` in the body of their context
when the group is at an end that nobody ordered.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
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
    told,
)
from workers.settings import GroupSettings

log = logging.getLogger(__name__)

LINE_BYTES = 4096  # of a word; none is longer
BEATS = 5  # words in the time that makes silence
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.1, 1.0  # between two tries to join
CONNECT_SECONDS = 5.0
STRANGERS = 64  # connections that have not said a word; for a further one the oldest is closed

Word = TypeVar("Word")

FROM_RANK: msgspec.json.Decoder[FromRank] = msgspec.json.Decoder(FromRank)
FROM_LEADER: msgspec.json.Decoder[FromLeader] = msgspec.json.Decoder(FromLeader)


class _Gone(Exception):
    """The other side is; the message says how, as in "rank 1 of its group ..."."""


class Lead:
    """The first rank's end, made by `leading`."""

    def __init__(self, group: GroupSettings, common: str, clock: Clock) -> None:
        self.group = group
        """What the engine is to be told of it."""

        self._roll = RankRendezvous(group, common, clock.now())
        self._clock = clock
        self._links: dict[int, asyncio.StreamWriter] = {}  # by rank
        self._strangers: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._joined = asyncio.Event()
        self._on_leaving: Callable[[], None] | None = None
        self._asked = False

    def when_asked_to_end(self, call: Callable[[], None]) -> None:
        """Call it once a rank is told to end, and the whole group is to drain."""
        self._on_leaving = call
        if self._asked:
            call()

    def serving(self) -> None:
        """Tell the ranks that the engine is there."""
        self._tell(GroupServing())

    def end(self) -> None:
        """Tell the ranks that all is done; from now on they may go."""
        self._roll.end()
        self._tell(GroupEnded())

    async def formed(self) -> None:
        """Wait for all ranks, and have everybody begin."""
        while not self._roll.complete:
            self._joined.clear()
            await self._joined.wait()
        address = str(self._links[1].get_extra_info("sockname")[0])  # as another host knows this one
        ports = self.group.engine_ports or _free_ports(address)
        begin = Begin(address=address, ports=ports)
        self._roll.begin()
        self.group = told(self.group, begin)
        self._tell(begin)
        log.info("the group is complete", extra={"nodes": self.group.nodes, "address": address})

    async def listen(self, listening: socket.socket) -> None:
        """Hear whoever connects, for ever."""
        async with asyncio.TaskGroup() as links:
            for number in itertools.count():
                connection = await _accepted(listening)
                if len(self._strangers) == STRANGERS:
                    self._strangers.pop(next(iter(self._strangers))).cancel()  # ranks speak at once
                self._strangers[number] = links.create_task(self._hear(number, connection))
                await asyncio.sleep(0)  # however many come, it begins, and others have their turn

    async def watch(self) -> None:
        """Say a few words in the time that makes silence, until the group is at an end.

        Raises:
            EngineDied: It is.
        """
        while True:
            self._roll.check()
            if (fault := self._roll.fault(self._clock.now())) is not None:
                raise EngineDied(fault)
            self._tell(RankAlive())
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_beat_seconds(self.group)):
                    await self._changed.wait()

    async def _hear(self, number: int, connection: socket.socket) -> None:
        """One that has connected, from its first word to its last."""
        rank, writer = 0, None
        try:
            try:
                reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)
                word = await _next(reader, FROM_RANK, self.group)
            finally:
                self._strangers.pop(number, None)
            if isinstance(word, Join) and self._taken(word, writer):
                rank = word.rank
                while True:
                    self._heed(await _next(reader, FROM_RANK, self.group))
        except (_Gone, OSError) as gone:
            if rank and self._links.get(rank) is writer:
                del self._links[rank]
                self._roll.gone(rank, str(gone))
                self._changed.set()
                log.info("a rank is gone", extra={"rank": rank, "cause": str(gone)})
        finally:
            if writer is not None:
                writer.close()

    def _taken(self, asked: Join, writer: asyncio.StreamWriter) -> bool:
        """Whether a rank is in; it is told if not."""
        if (refused := self._roll.join(asked)) is not None:
            if not refused.again:
                log.warning("a rank is refused", extra={"cause": refused.why})
            _say(writer, refused)
            return False
        if (former := self._links.get(asked.rank)) is not None:
            former.close()
        self._links[asked.rank] = writer
        log.info("a rank is there", extra={"rank": asked.rank})
        self._joined.set()
        return True

    def _heed(self, word: FromRank) -> None:
        if isinstance(word, RankLeaving) and not self._asked:
            self._asked = True
            log.info("a rank is told to end, so the group drains")
            if self._on_leaving is not None:
                self._on_leaving()

    def _tell(self, word: FromLeader) -> None:
        for link in self._links.values():
            _say(link, word)


@asynccontextmanager
async def leading(group: GroupSettings, common: str, clock: Clock) -> AsyncIterator[Lead]:
    """Wait for all other ranks; then lead them while the context is open.

    Args:
        group: Of rank 0.
        common: What ranks have to have alike (`workers.rank_rendezvous.common_settings_digest`).
        clock: For deadlines.

    Raises:
        ConfigurationRefused: Nobody can listen where it says.
        EngineDied: Not all came in time, or later one is gone.
    """
    listening, _ = bind_tcp(group.listen or group.leader)
    listening.setblocking(False)
    lead = Lead(group, common, clock)
    with listening:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(lead.listen(listening)), tasks.create_task(lead.watch())]
            try:
                await lead.formed()
                yield lead
            finally:
                for task in running:
                    task.cancel()


class Follow:
    """Another rank's end, made by `following`."""

    def __init__(self, group: GroupSettings, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.group = group
        """What the engine is to be told of it."""

        self.serving = False
        """Whether the engine is there, as a whole."""

        self.over = asyncio.Event()
        """The leader has drained: time to go."""

        self._reader = reader
        self._writer = writer
        self._on_serving: Callable[[], None] | None = None

    def when_serving(self, call: Callable[[], None]) -> None:
        """Call it once the engine is there."""
        self._on_serving = call
        if self.serving:
            call()

    def leave(self) -> None:
        """Ask the leader to drain and end the group."""
        _say(self._writer, RankLeaving())

    async def hear(self) -> None:
        """Heed the leader until all is over.

        Raises:
            EngineDied: It is gone without having said so.
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
        """Say a few words in the time that makes silence, for ever."""
        while True:
            _say(self._writer, RankAlive())
            await asyncio.sleep(_beat_seconds(self.group))


@asynccontextmanager
async def following(group: GroupSettings, common: str, clock: Clock) -> AsyncIterator[Follow]:
    """Join the leader, wait until all are there, and follow it while the context is open.

    Args:
        group: Of a rank above 0.
        common: What ranks have to have alike (`workers.rank_rendezvous.common_settings_digest`).
        clock: For deadlines.

    Raises:
        ConfigurationRefused: The leader is of another group.
        EngineDied: The group did not form in time, or the leader is gone.
    """
    reader, writer, begin = await _joined(group, common, clock)
    follow = Follow(told(group, begin), reader, writer)
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
    """Try as often as it takes, until the leader says that all are there."""
    until = Nanos(clock.now() + group.join_timeout_ms * MILLISECOND)
    pause, why = LEAST_PAUSE_SECONDS, "the leader does not answer"
    while (left := (until - clock.now()) / SECOND) > 0:
        try:
            return await _tried(group, common, left)
        except TimeoutError:
            cause = why  # nothing new
        except (_Gone, OSError) as error:  # its name is not known yet, nobody listens yet, it begins anew, ...
            cause = f"the leader {error}" if isinstance(error, _Gone) else str(error)
        if cause != why:
            log.info("the group has not formed yet", extra={"leader": group.leader, "cause": cause})
            why = cause
        await asyncio.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_SECONDS)
    raise EngineDied(f"its group did not form within {group.join_timeout_ms / 1000:g} s: {why} ({group.leader})")


async def _tried(
    group: GroupSettings, common: str, left: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Begin]:
    """Connect, join, and wait for the others, for `left` seconds."""
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
    """Be taken in, and wait for the others.

    Raises:
        _Gone: Try again.
        ConfigurationRefused: Do not.
    """
    _say(writer, Join(rank=group.rank, nodes=group.nodes, alike=common))
    while True:
        word = await _next(reader, FROM_LEADER, group)
        if isinstance(word, Begin):
            return word
        if isinstance(word, RankRefused) and not word.again:
            raise ConfigurationRefused(word.why)
        if isinstance(word, RankRefused):
            raise _Gone(f"sends it away: {word.why}")
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
    """The next word.

    Raises:
        _Gone: There is none, for as long as makes silence, or it is no word.
    """
    try:
        async with asyncio.timeout(group.silence_ms / 1000):
            line = await reader.readline()
    except TimeoutError as error:
        raise _Gone(f"has said nothing for {group.silence_ms / 1000:g} s") from error
    except (OSError, ValueError) as error:  # ValueError: a line without end
        raise _Gone("has ended") from error
    if not line.endswith(b"\n"):
        raise _Gone("has ended")
    try:
        return words.decode(line)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        raise _Gone("says what nobody understands; it is of another version") from error


def _say(writer: asyncio.StreamWriter, word: FromRank | FromLeader) -> None:
    """Never waits: words are few and short, and who does not read them is taken to be gone."""
    if not writer.is_closing():
        writer.write(msgspec.json.encode(word) + b"\n")


def _free_ports(address: str) -> tuple[int, ...]:
    """That were free a moment ago, at an address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    probes = [socket.socket(family, socket.SOCK_STREAM) for _ in range(ENGINE_PORTS)]
    try:
        for probe in probes:
            probe.bind((address, 0))
        return tuple(int(probe.getsockname()[1]) for probe in probes)
    finally:
        for probe in probes:
            probe.close()
