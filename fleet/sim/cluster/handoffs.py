"""Hand-offs between engines, direct: blocks stay where they were computed until they have come where they are needed.

Rules:

1. A prefill worker keeps the blocks of a prompt that it has computed until the decode worker has fetched them, does not need
   them, or cannot get them; or until `LEASE` is over, where nobody came to fetch.
2. A decode worker that has no room waits for it, and fetches then what is still kept.
3. What does not arrive, since an end of the transfer died, is computed by the decode worker.
"""

from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.work import Handoff
from fleet.sim.cluster.network import Network
from fleet.sim.engine.attempts import Job
from fleet.sim.engine.virtual_engine import VirtualEngine
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel
from kvstore.block import blocks_for

LEASE = Nanos(30 * SECOND)
"""As vLLM's NIXL connector holds blocks that were handed off, and `workers.engines.vllm.store_planner`."""


class HandoffParams(Struct, frozen=True):
    """What one engine tells the other."""

    attempt_id: RequestId  # of the prefill


def params(attempt_id: RequestId) -> bytes:
    """Of a `Handoff`, for prefill work of this name."""
    return msgspec.json.encode(HandoffParams(attempt_id))


class TransferEndpoint(Struct, frozen=True, kw_only=True):
    """One engine that blocks leave or come to."""

    engine: VirtualEngine
    bytes_per_token: float
    latency: Nanos


class _HandoffSource(Struct, frozen=True):
    """Where the blocks of decode work are kept."""

    fetcher: WorkerId
    keeper: WorkerId
    attempt_id: RequestId  # of the prefill


class Handoffs:
    """All of one cluster."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        block_tokens: int,
        released: Callable[[WorkerId], None] | None = None,
    ):
        """Nobody is there.

        Args:
            kernel: Its time.
            network: Its links.
            block_tokens: Of all engines.
            released: Told of a worker that keeps one prompt less.
        """
        self._kernel = kernel
        self._network = network
        self._block_tokens = block_tokens
        self._released = released
        self._ends: dict[WorkerId, TransferEndpoint] = {}
        self._leases: dict[tuple[WorkerId, RequestId], ScheduledEvent] = {}
        self._sources: dict[RequestId, _HandoffSource] = {}  # of decode work that has not begun to fetch

    def join(self, worker: WorkerId, end: TransferEndpoint) -> None:
        """An engine comes, under a name that nobody has."""
        self._ends[worker] = end

    def leave(self, worker: WorkerId) -> None:
        """It is gone, with what it kept."""
        del self._ends[worker]
        for key in [key for key in self._leases if key[0] == worker]:
            cancel(self._leases.pop(key))
        for attempt_id in [attempt_id for attempt_id, source in self._sources.items() if source.fetcher == worker]:
            self.cancel(attempt_id)

    def computed(self, worker: WorkerId, attempt_id: RequestId) -> None:
        """Prefill work has ended, and its engine keeps the blocks."""
        release = partial(self._release, worker, attempt_id)
        self._leases[worker, attempt_id] = self._kernel.after(LEASE, release)

    def take(self, worker: WorkerId, job: Job, handoff: Handoff) -> None:
        """Decode work comes to a worker: its blocks are fetched, if they are still there."""
        kept = msgspec.json.decode(handoff.params, type=HandoffParams).attempt_id
        engine = self._ends[worker].engine
        if (handoff.prefill_worker, kept) not in self._leases:
            engine.submit(job)
            return
        self._sources[job.attempt_id] = _HandoffSource(worker, handoff.prefill_worker, kept)
        if (blocks := engine.fetch(job)) is not None:
            self._move(job.attempt_id, blocks)

    def offered(self, job: Job) -> int:
        """Tokens of a prompt that can still be fetched, now that there is room."""
        if (source := self._sources.get(job.attempt_id)) is None:
            return 0
        if (source.keeper, source.attempt_id) in self._leases:
            return job.fetched_tokens
        del self._sources[job.attempt_id]
        return 0

    def fetch(self, job: Job, here: int) -> None:
        """Fetch them, but for those of so many blocks that are here."""
        self._move(job.attempt_id, blocks_for(job.fetched_tokens, self._block_tokens) - here)

    def cancel(self, attempt_id: RequestId) -> None:
        """Decode work has been given up; what has begun to come, comes."""
        if (source := self._sources.pop(attempt_id, None)) is not None:
            self._release(source.keeper, source.attempt_id)

    def _move(self, attempt_id: RequestId, blocks: int) -> None:
        source = self._sources.pop(attempt_id)
        end = self._ends[source.fetcher]
        if blocks <= 0:
            self._release(source.keeper, source.attempt_id)
            end.engine.fetched(attempt_id)
            return
        cancel(self._leases.pop((source.keeper, source.attempt_id)))

        def over(tell: Callable[[RequestId], None]) -> None:
            self._release(source.keeper, source.attempt_id)
            tell(attempt_id)

        self._network.send(
            source.keeper,
            source.fetcher,
            blocks * self._block_tokens * end.bytes_per_token,
            end.latency,
            partial(over, end.engine.fetched),
            partial(over, end.engine.not_fetched),
        )

    def _release(self, worker: WorkerId, attempt_id: RequestId) -> None:
        if (lease := self._leases.pop((worker, attempt_id), None)) is not None:
            cancel(lease)
        if (end := self._ends.get(worker)) is not None:
            end.engine.release(attempt_id)
            if self._released is not None:
                self._released(worker)
