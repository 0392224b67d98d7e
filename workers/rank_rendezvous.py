"""Rank rendezvous: decides when the ranks of an engine on several hosts form a group, and when the group ends.

This module does no I/O; `workers.connections.ranks` sends and receives the messages.

Rules:

1. The first rank leads: it serves requests and registers. The other ranks run the rest of the engine, and neither
   routers nor clients connect to them.
2. A group forms once. No engine starts before all ranks have joined, because an engine does not report that it waits
   for a rank. While the group forms, a rank may join again after a restart, and its newest process takes part. A rank
   that joins later, for example after a crash, is refused, and it tries again until the leader is a new process too.
3. All ranks end together. If a rank ends or falls silent, the leader ends; if the leader ends or falls silent, the
   ranks end. Their supervisor starts all processes again, and they form a new group.
4. The leader announces an orderly end when it has drained. If a rank other than the leader is asked to end, it requests
   a drain from the leader, and waits.
5. All ranks have the same settings, except the fields that belong to one rank (`common_settings_digest`). With different
   settings the engine would compute wrong results, or hang.
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
"""Number of ports that an engine's ranks need on the leader's host: one for collective operations, one for schedulers."""


class Join(Struct, frozen=True, kw_only=True, tag="join"):
    """First message of a rank to the leader: the rank wants to join the group."""

    rank: int
    nodes: int
    alike: str


class RankAlive(Struct, frozen=True, tag="alive"):
    """Heartbeat, which the leader and the other ranks send several times within `GroupSettings.silence_ms`."""


class RankLeaving(Struct, frozen=True, tag="leaving"):
    """Message of a rank to the leader: the rank was asked to end, so the leader has to drain."""


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """Message of the leader: all ranks have joined, so each starts its part of the engine."""

    address: str  # IP address of the leader's host, by which rank 1 has reached it
    ports: tuple[int, ...]  # `ENGINE_PORTS` ports of the leader's host, at which the engine's processes find each other


class RankRefused(Struct, frozen=True, kw_only=True, tag="refused"):
    why: str
    again: bool  # True: the rank tries again, because a later try may succeed; False: the rank's process ends with an error


class GroupServing(Struct, frozen=True, tag="serving"):
    """Message of the leader: the engine runs with all its ranks."""


class GroupEnded(Struct, frozen=True, tag="over"):
    """Message of the leader: it has drained, so all ranks end."""


FromRank = Join | RankAlive | RankLeaving
FromLeader = Begin | RankRefused | RankAlive | GroupServing | GroupEnded


def common_settings_digest(settings: WorkerSettings) -> str:
    """Return a digest of the settings that all ranks of a group must share."""
    assert settings.group is not None
    common = structs.replace(
        settings,
        worker_id=WorkerId(""),
        listen="127.0.0.1:0",
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
    """Records at the leader which ranks have joined, and decides when the group ends.

    The assertions of `check` hold after every call.
    """

    def __init__(self, group: GroupSettings, common: str, now: Nanos) -> None:
        """Start with no rank joined; `common` is the result of `common_settings_digest`."""
        self._group = group
        self._common = common
        self._until = now + group.join_timeout_ms * MILLISECOND
        self._joined: set[int] = set()
        # Text that says how a rank was lost after the group had formed; None: no rank was lost.
        self._lost: str | None = None
        self._begun = False
        self._over = False

    @property
    def complete(self) -> bool:
        return len(self._joined) == self._group.nodes - 1

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(1, self._group.nodes) if rank not in self._joined)

    def join(self, asked: Join) -> RankRefused | None:
        """Let a rank join, also as the successor of its earlier process; return a refusal if the rank may not join."""
        if not 1 <= asked.rank < self._group.nodes or asked.nodes != self._group.nodes:
            why = f"group: rank {asked.rank} of {asked.nodes} does not belong to the {self._group.nodes - 1} ranks of this leader"
            return RankRefused(why=why, again=False)
        if asked.alike != self._common:
            why = f"group: rank {asked.rank} has other settings than its leader; give all ranks the same settings"
            return RankRefused(why=why, again=False)
        if self._begun:
            return RankRefused(why="the group has formed with another process of this rank", again=True)
        self._joined.add(asked.rank)
        return None

    def gone(self, rank: int, how: str) -> None:
        """Record that a rank is lost; `how` completes the error text "rank 1 of its group …", as in "has ended"."""
        self._joined.discard(rank)
        if self._begun and not self._over and self._lost is None:
            self._lost = f"rank {rank} of its group {how}"

    def begin(self) -> None:
        """Record that the engine starts; from now on the loss of a rank ends the group."""
        assert self.complete
        self._begun = True

    def end(self) -> None:
        """Record the orderly end; from now on, the loss of a rank is no fault."""
        self._over = True

    def fault(self, now: Nanos) -> str | None:
        """Return a text that explains why the group has failed or can no longer form; None if it has not failed."""
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
        assert all(1 <= rank < self._group.nodes for rank in self._joined)
        assert not self._begun or self._over or self._lost is not None or self.complete


def engine_group(group: GroupSettings, begin: Begin) -> GroupSettings:
    """Return the group's settings with the address and the ports at which the engine's ranks find each other."""
    port = group.leader.rpartition(":")[2]
    host = f"[{begin.address}]" if ":" in begin.address else begin.address
    return structs.replace(group, leader=f"{host}:{port}", engine_ports=begin.ports)
