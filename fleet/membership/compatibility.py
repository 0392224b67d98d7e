"""Compatibility: remembers the peers with which this process has no version of the protocol in common.

`kvstore.protocol.versions` has the rules by which two processes agree on a version.
"""

from enum import StrEnum

from msgspec import Struct

from fleet.core.clock import SECOND, Clock, Nanos

REFUSED_FOR = Nanos(60 * SECOND)
"""Time after its latest refusal for which a peer counts as incompatible (`IncompatiblePeers.present`).

Refused peers try again every few seconds, so a peer that still runs counts as incompatible until it is accepted.
"""

LOG_AGAIN_AFTER = REFUSED_FOR
"""Minimum time between two log lines about the same peer and the same cause, because peers try again every few seconds."""

# Maximum number of refused peers that are remembered; a further peer replaces the one whose latest refusal is the oldest.
MOST_REFUSED = 1000


class Link(StrEnum):
    """The kinds of connections on which two processes agree on a protocol version."""

    WORKER = "worker"  # stream from a router to a worker
    REGISTRY = "registry"  # registration of a worker at a registry
    PEER = "peer"  # connection to another router
    STORE = "store"  # watch: the stream of block changes from a store node to a router


class IncompatiblePeer(Struct, frozen=True, kw_only=True):
    """A process that was refused by this process, or has refused it, because they have no protocol version in common."""

    link: Link
    name: str  # id or address of the peer
    cause: str  # text that names the version ranges of both processes, and says which process to upgrade


class _Refusals(Struct):
    """The refusals of one peer."""

    peer: IncompatiblePeer
    at: Nanos  # instant of the latest refusal
    logged: Nanos  # instant of the latest refusal that the caller had to log
    unlogged: int = 0  # number of refusals after `logged`, which the caller did not log


class IncompatiblePeers:
    """Remembers the peers that this process refused, or that refused it: the latest `MOST_REFUSED` of them.

    `present` returns only peers whose latest refusal is younger than `REFUSED_FOR`, and forgets all other peers.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[tuple[Link, str], _Refusals] = {}

    def refused(self, link: Link, name: str, cause: str) -> int:
        """Remember that the peer `name` was refused, and why.

        Returns:
            The number of refusals that the caller reports in one log line: this one, and all earlier refusals of this
            peer that were not logged. 0 if the caller logs nothing, because the latest line about this peer had the same
            cause and is younger than `LOG_AGAIN_AFTER`.
        """
        now, peer = self._clock.now(), IncompatiblePeer(link=link, name=name, cause=cause)
        before = self._refused.pop((link, name), None)
        if len(self._refused) >= MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        if before is not None and before.peer == peer and now - before.logged < LOG_AGAIN_AFTER:
            self._refused[link, name] = _Refusals(peer, now, before.logged, before.unlogged + 1)
            return 0
        self._refused[link, name] = _Refusals(peer, now, now)
        return 1 if before is None else 1 + before.unlogged

    def accepted(self, link: Link, name: str) -> None:
        """Forget that the peer `name` was refused, because a common version was found now."""
        self._refused.pop((link, name), None)

    def present(self) -> tuple[IncompatiblePeer, ...]:
        """Return the peers that were refused within `REFUSED_FOR`, in the order of their latest refusals."""
        now = self._clock.now()
        self._refused = {key: each for key, each in self._refused.items() if now - each.at < REFUSED_FOR}
        return tuple(each.peer for each in self._refused.values())
