"""Links of the cluster, shared by what crosses them.

Rules:

1. A *lane* is one way through one link: what a worker sends, what it receives, what a disk reads. It carries so many bytes a
   second.
2. A transfer crosses some lanes at once, and gets the smallest of its shares on them; a share is what all transfers of that lane
   would get alike. (Max-min fairness would give some of them more, where others cannot use their share; that is seldom much.)
3. Each transfer has its latency first, during which it takes no share.
4. A lane that is closed loses what crosses it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NewType

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel

LinkName = NewType("LinkName", str)


def outbound_link(worker: WorkerId) -> LinkName:
    """What a worker sends to others."""
    return LinkName(f"{worker} out")


def inbound_link(worker: WorkerId) -> LinkName:
    """What a worker gets from others."""
    return LinkName(f"{worker} in")


class Transfer:
    """Bytes under way."""

    __slots__ = ("done", "event", "left", "links", "lost", "rate", "since")

    def __init__(
        self,
        links: Sequence[LinkName],
        num_bytes: float,
        done: Callable[[], None],
        lost: Callable[[], None] | None,
        now: Nanos,
    ):
        self.links, self.done, self.lost = links, done, lost
        self.left = num_bytes
        self.rate = 0.0  # bytes a second
        self.since = now
        self.event: ScheduledEvent | None = None


class Network:
    """All lanes, and all that crosses them."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._bandwidth: dict[LinkName, float] = {}
        self._crossing: dict[LinkName, dict[Transfer, None]] = {}
        self.moved_bytes = 0.0  # between workers

    # Lanes.

    def open(self, link: LinkName, bandwidth: float) -> None:
        """A lane that carries so many bytes a second; nothing happens if it is open."""
        assert bandwidth > 0, bandwidth
        if link not in self._bandwidth:
            self._bandwidth[link] = bandwidth
            self._crossing[link] = {}

    def close(self, link: LinkName) -> None:
        """What crosses it never arrives."""
        if link not in self._bandwidth:
            return
        crossing = list(self._crossing[link])
        for transfer in crossing:
            self._drop(transfer)
        del self._bandwidth[link], self._crossing[link]
        for transfer in crossing:
            if transfer.lost is not None:
                transfer.lost()

    def join(self, worker: WorkerId, bandwidth: float) -> None:
        """A worker that can send so many bytes a second, and receive as many."""
        self.open(outbound_link(worker), bandwidth)
        self.open(inbound_link(worker), bandwidth)

    def leave(self, worker: WorkerId) -> None:
        """A worker is gone; what it sent or received never arrives."""
        self.close(outbound_link(worker))
        self.close(inbound_link(worker))

    # Transfers.

    def send(
        self,
        sender: WorkerId,
        receiver: WorkerId,
        num_bytes: float,
        latency: Nanos,
        done: Callable[[], None],
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Move bytes from worker to worker: `carry` over what the one sends and the other gets."""
        self.moved_bytes += num_bytes
        self.carry((outbound_link(sender), inbound_link(receiver)), num_bytes, latency, done, lost)

    def carry(
        self,
        links: Sequence[LinkName],
        num_bytes: float,
        latency: Nanos,
        done: Callable[[], None],
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Move bytes; `done` is called when the last one has come, `lost` when one of the lanes closes before."""
        assert num_bytes > 0, num_bytes
        transfer = Transfer(links, num_bytes, done, lost, self._kernel.instant)
        self._kernel.after(latency, partial(self._begin, transfer))

    def seconds(self, links: Sequence[LinkName], num_bytes: float, latency: Nanos) -> float | None:
        """How long one more transfer would take, if nothing changed meanwhile; None: a lane is closed."""
        if any(link not in self._bandwidth for link in links):
            return None
        rate = min(self._bandwidth[link] / (len(self._crossing[link]) + 1) for link in links)
        return latency / SECOND + num_bytes / rate

    def _begin(self, transfer: Transfer) -> None:
        if any(link not in self._bandwidth for link in transfer.links):
            if transfer.lost is not None:
                transfer.lost()
            return
        transfer.since = self._kernel.instant
        for link in transfer.links:
            self._crossing[link][transfer] = None
        self._share_out(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._drop(transfer)
        transfer.done()

    def _drop(self, transfer: Transfer) -> None:
        if transfer.event is not None:
            cancel(transfer.event)
        for link in transfer.links:
            self._crossing[link].pop(transfer, None)
        self._share_out(transfer)

    def _share_out(self, changed: Transfer) -> None:
        """Give all transfers on the lanes of one that came or went their new shares."""
        now, bandwidth, crossing = self._kernel.instant, self._bandwidth, self._crossing
        affected: dict[Transfer, None] = {}
        for link in changed.links:
            affected.update(crossing[link])
        for transfer in affected:
            transfer.left -= transfer.rate * (now - transfer.since) / SECOND
            transfer.since = now
            transfer.rate = min([bandwidth[link] / len(crossing[link]) for link in transfer.links])
            if transfer.event is not None:
                cancel(transfer.event)
            delay = round(max(0.0, transfer.left) / transfer.rate * SECOND)
            transfer.event = self._kernel.after(delay, partial(self._end, transfer))
