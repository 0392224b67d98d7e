"""Direct handoffs: decode workers fetch blocks directly from the engines that computed them.

Rules:

1. A prefill worker keeps the computed blocks of a prompt until one of these events: the decode worker has fetched them,
   the decode worker does not need them any more, or the transfer has failed. If no transfer begins within `LEASE`, the
   prefill worker releases the blocks.
2. If the KV memory of a decode worker is full, the attempt waits there until enough blocks are free. Then the worker fetches the
   prompt's blocks, if the prefill worker still keeps them.
3. If a transfer fails because the prefill worker died, the decode worker computes the prompt.
4. Leases go through the states of `fleet.batching.handoff_leases`, as in the simulated engine of real workers
   (`workers.engines.simulated.direct_transfer`).
"""

from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import Struct

from fleet.batching.attempts import Job
from fleet.batching.handoff_leases import LeaseState, LeaseStep, advance_lease
from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import RequestId, WorkerId
from fleet.core.work import Handoff
from fleet.sim.cluster.network import Network
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel
from fleet.sim.virtual_engine import VirtualEngine
from kvstore.block import blocks_for

LEASE = Nanos(30 * SECOND)
"""Time for which a prefill worker keeps blocks that no decode worker fetches. The value is the default of vLLM's NIXL connector."""


class HandoffParams(Struct, frozen=True):
    """Content of `Handoff.params`: the id under which the prefill engine keeps the blocks."""

    attempt_id: RequestId  # id of the prefill attempt


def handoff_params(attempt_id: RequestId) -> bytes:
    """Return the encoded content of `Handoff.params` for a prefill attempt."""
    return msgspec.json.encode(HandoffParams(attempt_id))


class TransferEndpoint(Struct, frozen=True, kw_only=True):
    """An engine that exchanges blocks with other engines, with its bytes of KV for each token and the latency of its transfers."""

    engine: VirtualEngine
    bytes_per_token: float
    latency: Nanos


class _KeptBlocks(Struct):
    """The lease under which an engine keeps the blocks of one ended prefill attempt."""

    ends: ScheduledEvent  # the event that ends the lease; it is cancelled when the transfer begins
    state: LeaseState = LeaseState.OFFERED


class _HandoffSource(Struct, frozen=True):
    """Source of the blocks of a decode attempt that has not begun to fetch them: the worker and attempt that computed them."""

    fetcher: WorkerId  # the decode worker
    keeper: WorkerId  # the prefill worker
    attempt_id: RequestId  # id of the prefill attempt


class Handoffs:
    """Manages the leases of all handed-off blocks in a cluster, and transfers the blocks to decode workers (rules 1 to 4)."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        block_tokens: int,
        released: Callable[[WorkerId], None] | None = None,
    ):
        """Create the object without engines.

        `released` is called with a worker's id whenever that worker releases the blocks of a prompt.
        """
        self._kernel = kernel
        self._network = network
        self._block_tokens = block_tokens
        self._released = released
        self._endpoints: dict[WorkerId, TransferEndpoint] = {}
        self._leases: dict[tuple[WorkerId, RequestId], _KeptBlocks] = {}
        self._sources: dict[RequestId, _HandoffSource] = {}  # the key is the id of the decode attempt

    def join(self, worker: WorkerId, endpoint: TransferEndpoint) -> None:
        """Add the engine of a worker. The caller makes sure that the worker's previous engine, if there was one, has been removed."""
        self._endpoints[worker] = endpoint

    def leave(self, worker: WorkerId) -> None:
        """Remove the engine of a worker with the leases on the blocks that it kept. Cancel its fetches that have not begun."""
        del self._endpoints[worker]
        for key in [key for key in self._leases if key[0] == worker]:
            cancel(self._leases.pop(key).ends)
        for attempt_id in [attempt_id for attempt_id, source in self._sources.items() if source.fetcher == worker]:
            self.cancel(attempt_id)

    def computed(self, worker: WorkerId, attempt_id: RequestId) -> None:
        """Begin the lease on the blocks of a prefill attempt that has ended. The engine of `worker` keeps these blocks."""
        release = partial(self._release, worker, attempt_id, LeaseStep.EXPIRE)
        self._leases[worker, attempt_id] = _KeptBlocks(self._kernel.after(LEASE, release))

    def take(self, worker: WorkerId, job: Job[int], handoff: Handoff) -> None:
        """Submit a decode attempt to a worker. The prompt's blocks are fetched from the prefill worker, if that worker still keeps them."""
        kept = msgspec.json.decode(handoff.params, type=HandoffParams).attempt_id
        engine = self._endpoints[worker].engine
        if not self._is_offered(handoff.prefill_worker, kept):
            engine.submit(job)
            return
        self._sources[job.attempt_id] = _HandoffSource(worker, handoff.prefill_worker, kept)
        if (blocks := engine.fetch(job)) is not None:
            self._move(job.attempt_id, blocks)

    def offered(self, job: Job[int]) -> int:
        """Return the number of prompt tokens whose KV a waiting decode attempt can still fetch from a prefill worker.

        Return 0 if the attempt fetches no blocks, or if the prefill worker has released them.
        """
        if (source := self._sources.get(job.attempt_id)) is None:
            return 0
        if self._is_offered(source.keeper, source.attempt_id):
            return job.fetched_tokens
        del self._sources[job.attempt_id]
        return 0

    def fetch(self, job: Job[int], here: int) -> None:
        """Fetch the blocks of a handoff except for the first `here` ones, which the decode engine has in its cache already."""
        self._move(job.attempt_id, blocks_for(job.fetched_tokens, self._block_tokens) - here)

    def cancel(self, attempt_id: RequestId) -> None:
        """Release the blocks that are kept for a cancelled decode attempt. A transfer that has begun goes on."""
        if (source := self._sources.pop(attempt_id, None)) is not None:
            self._release(source.keeper, source.attempt_id)

    def _move(self, attempt_id: RequestId, blocks: int) -> None:
        source = self._sources.pop(attempt_id)
        endpoint = self._endpoints[source.fetcher]
        if blocks <= 0:
            self._release(source.keeper, source.attempt_id)
            endpoint.engine.fetched(attempt_id)
            return
        kept = self._leases[source.keeper, source.attempt_id]
        kept.state = advance_lease(kept.state, LeaseStep.PULL)
        cancel(kept.ends)  # the lease must not end during the transfer

        def over(then: Callable[[RequestId], None]) -> None:
            self._release(source.keeper, source.attempt_id)
            then(attempt_id)

        self._network.send(
            source.keeper,
            source.fetcher,
            blocks * self._block_tokens * endpoint.bytes_per_token,
            endpoint.latency,
            partial(over, endpoint.engine.fetched),
            partial(over, endpoint.engine.not_fetched),
        )

    def _is_offered(self, worker: WorkerId, attempt_id: RequestId) -> bool:
        """Return True if a worker keeps the blocks of a prefill attempt, and no transfer of them has begun."""
        lease = self._leases.get((worker, attempt_id))
        return lease is not None and lease.state is LeaseState.OFFERED

    def _release(self, worker: WorkerId, attempt_id: RequestId, step: LeaseStep = LeaseStep.RETURN) -> None:
        if (lease := self._leases.pop((worker, attempt_id), None)) is not None:
            lease.state = advance_lease(lease.state, step)
            cancel(lease.ends)
        if (endpoint := self._endpoints.get(worker)) is not None:
            endpoint.engine.release(attempt_id)
            if self._released is not None:
                self._released(worker)
