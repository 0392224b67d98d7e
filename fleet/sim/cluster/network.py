"""Network of the simulated cluster: links, each of which divides its bandwidth among the transfers on it.

Messages between routers and workers do not use links, but channels with a fixed delay (`fleet.sim.cluster.channels`).

Rules:

1. A link is one direction of a network or disk connection, such as from a worker to the network. It has a bandwidth.
2. A transfer uses one or several links at once. Each link divides its bandwidth evenly among its transfers. The rate of
   a transfer is the smallest share that one of its links gives it. (With max-min fairness, a transfer could also use
   bandwidth of a link that the link's other transfers cannot use. This is not simulated.)
3. Each transfer first waits for its latency. During this time it uses no bandwidth.
4. If a link is closed, its transfers are lost.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NewType

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import WorkerId
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel

LinkName = NewType("LinkName", str)


def outbound_link(worker: WorkerId) -> LinkName:
    """Return the link by which a worker sends to other workers."""
    return LinkName(f"{worker} out")


def inbound_link(worker: WorkerId) -> LinkName:
    """Return the link by which a worker receives from other workers."""
    return LinkName(f"{worker} in")


class Transfer:
    """One movement of bytes over one or several links, with its present rate."""

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
        self.rate = 0.0  # bytes per second
        self.since = now
        self.event: ScheduledEvent | None = None


class Network:
    """Moves bytes over links, and computes when each transfer ends (rules 1 to 4)."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._bandwidth: dict[LinkName, float] = {}
        self._transfers: dict[LinkName, dict[Transfer, None]] = {}
        # bytes of all transfers from worker to worker so far, including lost ones and those under way
        self.moved_bytes = 0.0

    # Links.

    def open(self, link: LinkName, bandwidth: float) -> None:
        """Open a link with a bandwidth in bytes per second. Do nothing if the link is open already."""
        assert bandwidth > 0, bandwidth
        if link not in self._bandwidth:
            self._bandwidth[link] = bandwidth
            self._transfers[link] = {}

    def close(self, link: LinkName) -> None:
        """Close a link, if it is open; its transfers are lost."""
        if link not in self._bandwidth:
            return
        transfers = list(self._transfers[link])
        for transfer in transfers:
            self._drop(transfer)
        del self._bandwidth[link], self._transfers[link]
        for transfer in transfers:
            if transfer.lost is not None:
                transfer.lost()

    def join(self, worker: WorkerId, bandwidth: float) -> None:
        """Open the two links of a worker, each with the same bandwidth."""
        self.open(outbound_link(worker), bandwidth)
        self.open(inbound_link(worker), bandwidth)

    def leave(self, worker: WorkerId) -> None:
        """Close both links of a worker; their transfers are lost."""
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
        """Move bytes from one worker to another; the arguments are explained at `carry`."""
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
        """Begin to move bytes over several links at once.

        `done` is called when the last byte has arrived. If one of the links closes before that, `lost` is called instead.
        """
        assert num_bytes > 0, num_bytes
        transfer = Transfer(links, num_bytes, done, lost, self._kernel.instant)
        self._kernel.after(latency, partial(self._begin, transfer))

    def seconds(self, links: Sequence[LinkName], num_bytes: float, latency: Nanos) -> float | None:
        """Return the seconds that a new transfer would take if no other transfer began or ended. Return None if a link is closed."""
        if any(link not in self._bandwidth for link in links):
            return None
        rate = min(self._bandwidth[link] / (len(self._transfers[link]) + 1) for link in links)
        return latency / SECOND + num_bytes / rate

    def _begin(self, transfer: Transfer) -> None:
        if any(link not in self._bandwidth for link in transfer.links):
            if transfer.lost is not None:
                transfer.lost()
            return
        transfer.since = self._kernel.instant
        for link in transfer.links:
            self._transfers[link][transfer] = None
        self._share_out(transfer)

    def _end(self, transfer: Transfer) -> None:
        self._drop(transfer)
        transfer.done()

    def _drop(self, transfer: Transfer) -> None:
        if transfer.event is not None:
            cancel(transfer.event)
        for link in transfer.links:
            self._transfers[link].pop(transfer, None)
        self._share_out(transfer)

    def _share_out(self, changed: Transfer) -> None:
        """Compute again the rate and the end of each transfer that shares a link with `changed`, which has begun or ended."""
        now, bandwidth, transfers = self._kernel.instant, self._bandwidth, self._transfers
        affected: dict[Transfer, None] = {}
        for link in changed.links:
            affected.update(transfers[link])
        for transfer in affected:
            transfer.left -= transfer.rate * (now - transfer.since) / SECOND
            transfer.since = now
            transfer.rate = min([bandwidth[link] / len(transfers[link]) for link in transfer.links])
            if transfer.event is not None:
                cancel(transfer.event)
            delay = round(max(0.0, transfer.left) / transfer.rate * SECOND)
            transfer.event = self._kernel.after(delay, partial(self._end, transfer))
