"""Links of workers, shared fairly by what crosses them.

Each worker can send and receive so many bytes a second, each way apart. A transfer gets the smaller of its shares at its two
ends, a share being what all transfers of that end would get alike. (Max-min fairness would give some of them more, where others
cannot use their share; prefill workers and decode workers are seldom that uneven.)
"""

from collections.abc import Callable
from functools import partial

from fleet.clock import SECOND, Nanos
from fleet.ids import WorkerId
from fleet.sim.kernel import Event, Kernel


class _Transfer:
    __slots__ = ("done", "event", "left", "rate", "receiver", "sender", "since")

    def __init__(self, sender: WorkerId, receiver: WorkerId, num_bytes: float, done: Callable[[], None], now: Nanos):
        self.sender, self.receiver, self.done = sender, receiver, done
        self.left = num_bytes
        self.rate = 0.0  # bytes a second
        self.since = now
        self.event: Event | None = None


class Network:
    """All transfers between workers."""

    def __init__(self, kernel: Kernel):
        self._kernel = kernel
        self._bandwidth: dict[WorkerId, float] = {}
        self._sending: dict[WorkerId, dict[_Transfer, None]] = {}
        self._receiving: dict[WorkerId, dict[_Transfer, None]] = {}
        self.moved_bytes = 0.0

    def join(self, worker: WorkerId, bandwidth: float) -> None:
        """A worker that can send so many bytes a second, and receive as many."""
        assert bandwidth > 0, bandwidth
        self._bandwidth[worker] = bandwidth
        self._sending[worker], self._receiving[worker] = {}, {}

    def leave(self, worker: WorkerId) -> None:
        """A worker is gone; what it sent or received never arrives."""
        for transfer in [*self._sending[worker], *self._receiving[worker]]:
            self._drop(transfer)
        del self._bandwidth[worker], self._sending[worker], self._receiving[worker]

    def send(
        self, sender: WorkerId, receiver: WorkerId, num_bytes: float, latency: Nanos, done: Callable[[], None]
    ) -> None:
        """Move bytes; `done` is called when the last one has come, if both ends last."""
        assert num_bytes > 0, num_bytes
        self.moved_bytes += num_bytes
        transfer = _Transfer(sender, receiver, num_bytes, done, self._kernel.now())
        self._kernel.after(latency, lambda: self._begin(transfer))

    def _begin(self, transfer: _Transfer) -> None:
        if transfer.sender not in self._bandwidth or transfer.receiver not in self._bandwidth:
            return
        transfer.since = self._kernel.now()
        self._sending[transfer.sender][transfer] = None
        self._receiving[transfer.receiver][transfer] = None
        self._share_out(transfer)

    def _end(self, transfer: _Transfer) -> None:
        self._drop(transfer)
        transfer.done()

    def _drop(self, transfer: _Transfer) -> None:
        if transfer.event is not None:
            transfer.event.cancel()
        self._sending[transfer.sender].pop(transfer, None)
        self._receiving[transfer.receiver].pop(transfer, None)
        self._share_out(transfer)

    def _share_out(self, changed: _Transfer) -> None:
        """Give all transfers of two ends their new shares."""
        now = self._kernel.now()
        sending, receiving = self._sending[changed.sender], self._receiving[changed.receiver]
        for transfer in {**sending, **receiving}:
            transfer.left -= transfer.rate * (now - transfer.since) / SECOND
            transfer.since = now
            transfer.rate = min(
                self._bandwidth[transfer.sender] / len(self._sending[transfer.sender]),
                self._bandwidth[transfer.receiver] / len(self._receiving[transfer.receiver]),
            )
            if transfer.event is not None:
                transfer.event.cancel()
            delay = Nanos(round(max(0.0, transfer.left) / transfer.rate * SECOND))
            transfer.event = self._kernel.after(delay, partial(self._end, transfer))
