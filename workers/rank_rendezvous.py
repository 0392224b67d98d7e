"""One engine over several nodes: who belongs to it, and when it is at an end. Pure; `workers.connections.ranks` carries the words.

Rules:

1. The first rank leads: it serves requests and registers. The others run the engine's further ranks, and nobody else sees them.
2. A group forms once. No engine starts before all ranks are there, since engines that wait for a rank do so without saying what they
   wait for. While it forms a rank may come again, and its newest process counts. Who comes later, after a crash say, is sent away,
   and tries again until the leader is another process too.
3. All or nothing: a rank that goes, or is silent, is the end of the leader, and a leader that goes, or is silent, that of the ranks.
   Whoever started the processes starts all of them again, and they form another group.
4. An orderly end is said by the leader, when it has drained. A rank that is told to end asks the leader for that, and waits for it.
5. Ranks are told alike, but for what is each one's own (`common_settings_digest`). Others would be an engine that is wrong, or hangs.
"""

import hashlib

import msgspec
from msgspec import Struct, structs

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.hub import HubSettings
from fleet.core.ids import WorkerId
from kvstore.security.credentials import Credentials
from workers.settings import GroupSettings, WorkerSettings

ENGINE_PORTS = 2
"""That an engine's ranks need at the first's host: one for their collective operations, one for its schedulers."""


class Join(Struct, frozen=True, kw_only=True, tag="join"):
    """A rank's first word."""

    rank: int
    nodes: int
    alike: str


class RankAlive(Struct, frozen=True, tag="alive"):
    """From both sides, a few times in the time that makes silence."""


class RankLeaving(Struct, frozen=True, tag="leaving"):
    """A rank was told to end; the leader is to drain."""


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """All are there: start your part of the engine."""

    address: str  # of the leader's host, an IP address
    ports: tuple[int, ...]  # `ENGINE_PORTS` of that host, for the engine's own use


class RankRefused(Struct, frozen=True, kw_only=True, tag="refused"):
    why: str
    again: bool  # whether it may be otherwise later


class GroupServing(Struct, frozen=True, tag="serving"):
    """The engine is there, as a whole."""


class GroupEnded(Struct, frozen=True, tag="over"):
    """The leader has drained; everybody ends."""


FromRank = Join | RankAlive | RankLeaving
FromLeader = Begin | RankRefused | RankAlive | GroupServing | GroupEnded


def common_settings_digest(settings: WorkerSettings) -> str:
    """Digest of what all ranks of a group have to be told alike."""
    assert settings.group is not None
    common = structs.replace(
        settings,
        worker_id=WorkerId(""),
        listen="",
        control_listen="",
        control_credentials=Credentials(),
        advertise="",
        discovery=None,
        embedded_store=None,
        hub=HubSettings(),
        group=structs.replace(settings.group, rank=0, leader="127.0.0.1:1", listen=""),
        simulated=structs.replace(settings.simulated, direct_listen=""),
    )
    return hashlib.sha256(msgspec.json.encode(common, order="sorted")).hexdigest()[:16]


class RankRendezvous:
    """The leader's list of who is there. `check` holds after every call."""

    def __init__(self, group: GroupSettings, common: str, now: Nanos) -> None:
        """Nobody is there yet. `common`: see `common_settings_digest`."""
        self._group = group
        self._common = common
        self._until = now + group.join_timeout_ms * MILLISECOND
        self._there: set[int] = set()
        self._lost: str | None = None  # what became of a rank that was there when the group had formed
        self._begun = False
        self._over = False

    @property
    def complete(self) -> bool:
        return len(self._there) == self._group.nodes - 1

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(1, self._group.nodes) if rank not in self._there)

    def join(self, asked: Join) -> RankRefused | None:
        """Take a rank in, in place of its former process if there is one; None: it is in."""
        if not 1 <= asked.rank < self._group.nodes or asked.nodes != self._group.nodes:
            why = f"group: rank {asked.rank} of {asked.nodes} is none of the {self._group.nodes - 1} that follow this leader"
            return RankRefused(why=why, again=False)
        if asked.alike != self._common:
            why = f"group: rank {asked.rank} is told other things than its leader; give all of them the same settings"
            return RankRefused(why=why, again=False)
        if self._begun:
            return RankRefused(why="the group has formed, with another process of that rank", again=True)
        self._there.add(asked.rank)
        return None

    def gone(self, rank: int, how: str) -> None:
        """One that was in is there no longer; `how` goes on from "rank 1 of its group"."""
        self._there.discard(rank)
        if self._begun and not self._over and self._lost is None:
            self._lost = f"rank {rank} of its group {how}"

    def begin(self) -> None:
        """The engine starts; from now on nobody may be missing."""
        assert self.complete
        self._begun = True

    def end(self) -> None:
        """In order: from now on everybody may go."""
        self._over = True

    def fault(self, now: Nanos) -> str | None:
        """Why this is no group any more, or will be none; None: all is well."""
        if self._over:
            return None
        if self._lost is not None or self._begun:
            return self._lost
        if self.complete or now < self._until:
            return None
        ranks = ", ".join(map(str, self.missing))
        seconds = self._group.join_timeout_ms / 1000
        return f"of its group of {self._group.nodes} nodes, rank {ranks} did not come within {seconds:g} s"

    def check(self) -> None:
        assert all(1 <= rank < self._group.nodes for rank in self._there)
        assert not self._begun or self._over or self._lost is not None or self.complete


def told(group: GroupSettings, begin: Begin) -> GroupSettings:
    """A group's settings when it has formed, for the engine: where its ranks meet is an IP address and ports."""
    port = group.leader.rpartition(":")[2]
    host = f"[{begin.address}]" if ":" in begin.address else begin.address
    return structs.replace(group, leader=f"{host}:{port}", engine_ports=begin.ports)
