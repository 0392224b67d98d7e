"""How long KV takes from one engine to another, and how transfers share a link.

Rules:

1. Every GPU sends what it holds through a link of its own, all at once; a transfer takes as long as the GPU that sends or
   receives most. Latent KV (MLA) is on every rank, so ranks share it out among them.
2. A link reaches `REACHED` of its data sheet with large contiguous transfers.
3. Transfers on one link share it evenly at any instant (`SharedLink`): two at once take twice as long while both last. Each
   has its latency first, during which it takes no share.
"""

from heapq import heappop, heappush

from msgspec import Struct

from fleet.clock import SECOND, Nanos
from fleet.hardware.gpus import Gpu, Link
from fleet.hardware.placement import Placement

REACHED = 0.8
"""Of a link's bandwidth; aiconfigurator 0.12 has large NCCL messages at 75 to 85 % of NVLink's, and 400 Gb/s NICs do better."""


def transfer_time(num_bytes: float, link: Link, sharers: int = 1) -> Nanos:
    """Time of one transfer while `sharers` of them, itself included, are on the link all the time."""
    assert num_bytes >= 0, num_bytes
    assert sharers >= 1, sharers
    if not num_bytes:
        return Nanos(0)
    return Nanos(int(link.latency_us * 1000 + num_bytes * sharers / (link.bandwidth * REACHED) * SECOND))


def link_between(gpu: Gpu, *, same_node: bool) -> Link:
    return gpu.in_node if same_node else gpu.between_nodes


def kv_bytes_per_link(source: Placement, target: Placement, tokens: int) -> float:
    """Bytes through the busiest link when the KV of so many tokens of one sequence moves between two replicas."""
    total = source.model.kv_bytes_per_token * tokens + source.model.kv_bytes_per_sequence
    return total / min(_lanes(source), _lanes(target))


def _lanes(placement: Placement) -> int:
    """GPUs that can send or receive one sequence's KV, each its own part."""
    return placement.parallelism.tp * placement.parallelism.pp


class Transfer(Struct, frozen=True, order=True):
    ends: float  # in the link's own time: bytes that each transfer has had since the beginning
    order: int
    key: int


class SharedLink:
    """A link that any number of transfers share evenly. Give it the instants in order; it keeps no clock.

    Its own time runs at one byte per byte that *each* transfer gets, so that a transfer's end is known in it when it
    begins, whoever comes after it.
    """

    def __init__(self, link: Link) -> None:
        self._pace = link.bandwidth * REACHED / SECOND  # bytes a nanosecond, alone
        self._latency = Nanos(int(link.latency_us * 1000))
        self._running: list[Transfer] = []
        self._begun = 0
        self._had = 0.0
        self._now = Nanos(0)

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, key: int, num_bytes: float, now: Nanos) -> None:
        """Take a transfer in. `key` is the caller's; the latency is taken as bytes that the link could have sent in it."""
        assert num_bytes >= 0, num_bytes
        self._advance(now)
        self._begun += 1
        ends = self._had + num_bytes + self._latency * self._pace / (len(self._running) + 1)
        heappush(self._running, Transfer(ends, self._begun, key))

    def next_end(self) -> Nanos | None:
        """When the first of them ends, if none comes in between; None when the link is idle."""
        if not self._running:
            return None
        left = max(0.0, self._running[0].ends - self._had)
        return Nanos(self._now + int(-(-left * len(self._running) // self._pace)))

    def ended(self, now: Nanos) -> list[int]:
        """Keys of the transfers that have ended by now, in the order of their ends; they are forgotten."""
        keys = []
        while (end := self.next_end()) is not None and end <= now:
            self._advance(end)
            self._had = max(self._had, self._running[0].ends)
            keys.append(heappop(self._running).key)
        self._advance(now)
        return keys

    def _advance(self, now: Nanos) -> None:
        assert now >= self._now, (now, self._now)
        if self._running:
            self._had += (now - self._now) * self._pace / len(self._running)
        self._now = now
