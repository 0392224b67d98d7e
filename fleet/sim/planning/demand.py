"""Demand collector: makes the demand windows that a planner would get from a simulated router, with delays and gaps.

Rules:

1. The collector observes the router's events and commands. A record is the demand within a span of `RECORD` nanoseconds of virtual time.
   It is closed at the end of this span, as a real router reports its demand. A window for the planner is the sum of one or several records.
2. A record is delivered `delay` after it was closed. In a gap of the metrics no record is delivered, and windows name the
   router as stale. The records of the gap are delivered after it, so no demand is lost.
3. A request counts as abandoned if its client cancelled it, or its deadline passed, before its answer began. (A real router counts a
   passed deadline as refused. In simulations the deadline stands for a client that leaves.) Windows do not count an abandoned request
   as an arrival, and do not count its prompt tokens. If a request is abandoned in a later record than that of its arrival, a later
   arrival is left out instead, as for a real router (`fleet.planner.aggregate`). A request that ends early after its answer began
   counts as finished.
"""

from collections import deque
from collections.abc import Callable, Sequence

from fleet.core.clock import SECOND, Nanos
from fleet.core.duration_counts import EDGES, added, bucket_of
from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.core.requests import TOKEN_BYTES
from fleet.planner.aggregate import subtract_owed
from fleet.planner.demand import DemandWindow, WorkerDemand
from fleet.planner.messages import PoolName
from fleet.router.messages import (
    Arrived,
    Command,
    Complete,
    Dispatch,
    Emit,
    Reject,
    RequestCancelled,
    RouterEvent,
    StartedOver,
)
from fleet.router.state.live_requests import request_of
from fleet.sim.cluster.elastic_pools import ElasticPools
from fleet.sim.cluster.simulated_cluster import SimulatedCluster
from fleet.sim.kernel import Kernel

RECORD = Nanos(SECOND)
GONE = frozenset((Reason.DEADLINE_PASSED, Reason.CANCELLED))


class _LiveRequest:
    """A request that has not ended, with the instants and counts from which its latencies are computed."""

    __slots__ = ("arrived", "dispatched", "first_token", "prompt_tokens", "tokens")

    def __init__(self, arrived: Nanos, prompt_tokens: int) -> None:
        self.arrived, self.prompt_tokens = arrived, prompt_tokens
        self.dispatched = False
        self.first_token: Nanos | None = None
        self.tokens = 0


class _Counters:
    """Counts of the record of the present second (rule 1), which is not closed yet."""

    def __init__(self) -> None:
        self.arrivals = self.refused = self.abandoned = 0
        self.uncounted_tokens = 0  # prompt tokens of the abandoned requests
        self.prompt_tokens = self.cached_tokens = self.finished = self.answer_tokens = 0
        self.prompt_squares = self.answer_squares = 0.0
        self.ttft, self.tpot, self.queue_wait = ([0] * (len(EDGES) + 1) for _ in range(3))


class DemandCollector:
    """Collects records of a simulated router's demand, and makes demand windows from them.

    The world calls the object with the router's events and commands, as a `fleet.router.observer.Observer`.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        delay: Nanos,
        gaps: Sequence[tuple[Nanos, Nanos]] = (),
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to collect records. Records list no workers before `watch` is called with the cluster and its pools.

        Args:
            kernel: Kernel in whose virtual time records are closed and delivered.
            delay: Time from the end of a record to its delivery.
            gaps: Begin and end of each span in which no record is delivered.
            over: Returns True when the simulation is over. The present record is then the last one.
        """
        self._kernel, self._delay, self._gaps, self._over = kernel, delay, tuple(gaps), over
        self._cluster: SimulatedCluster | None = None
        self._pools: ElasticPools | None = None
        self._live: dict[RequestId, _LiveRequest] = {}
        self._waiting: dict[RequestId, Nanos] = {}
        self._counters = _Counters()
        self._began = kernel.instant
        self._records: deque[DemandWindow] = deque()
        self._owed_requests = self._owed_tokens = 0
        self._delivered = kernel.instant
        self._last = DemandWindow(began=kernel.instant, ended=kernel.instant)
        kernel.after(RECORD, self._close)

    def watch(self, cluster: SimulatedCluster, pools: ElasticPools) -> None:
        self._cluster, self._pools = cluster, pools

    # Events.

    def __call__(self, now: Nanos, event: RouterEvent, commands: Sequence[Command] | None, /) -> None:
        match event:
            case Arrived():
                self._arrived(event, now)
            case RequestCancelled():
                self._abandoned(event.request_id)
            case _:
                pass
        for command in commands or ():
            match command:
                case Emit():
                    self._emitted(command, now)
                case Dispatch():
                    self._dispatched(request_of(command.start.request_id), now)
                case Complete():
                    self._completed(command, now)
                case Reject():
                    self._rejected(command)
                case StartedOver():
                    self._live[command.request_id].tokens = 0
                case _:
                    pass

    def _arrived(self, event: Arrived, now: Nanos) -> None:
        prompt_tokens = len(event.tokens) // TOKEN_BYTES
        self._live[event.request_id] = _LiveRequest(now, prompt_tokens)
        self._waiting[event.request_id] = now
        self._counters.arrivals += 1
        self._counters.prompt_tokens += prompt_tokens
        self._counters.prompt_squares += prompt_tokens**2

    def _dispatched(self, request_id: RequestId, now: Nanos) -> None:
        request = self._live.get(request_id)
        if request is None or request.dispatched:
            return
        request.dispatched = True
        self._counters.queue_wait[bucket_of((now - self._waiting.pop(request_id)) / SECOND)] += 1

    def _emitted(self, emit: Emit, now: Nanos) -> None:
        request = self._live[emit.request_id]
        request.tokens += len(emit.progress.token_ids)
        if request.first_token is None:
            request.first_token = now
            self._counters.cached_tokens += emit.cached_tokens
            self._counters.ttft[bucket_of((now - request.arrived) / SECOND)] += 1

    def _completed(self, complete: Complete, now: Nanos) -> None:
        request = self._live.pop(complete.request_id)
        self._waiting.pop(complete.request_id, None)
        counters = self._counters
        self._finished(request)
        if request.first_token is not None and request.tokens > 1:
            counters.tpot[bucket_of((now - request.first_token) / SECOND / (request.tokens - 1))] += 1

    def _rejected(self, reject: Reject) -> None:
        if reject.reason in GONE:
            self._abandoned(reject.request_id)
        else:
            request = self._live.pop(reject.request_id, None)
            self._waiting.pop(reject.request_id, None)
            if request is not None and request.first_token is not None:
                self._finished(request)
            else:
                self._counters.refused += 1

    def _abandoned(self, request_id: RequestId) -> None:
        request = self._live.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if request is None:
            return
        if request.first_token is None:
            self._counters.abandoned += 1
            self._counters.uncounted_tokens += request.prompt_tokens
        else:
            self._finished(request)

    def _finished(self, request: _LiveRequest) -> None:
        self._counters.finished += 1
        self._counters.answer_tokens += request.tokens
        self._counters.answer_squares += request.tokens**2

    # Records and windows.

    def _close(self) -> None:
        now, counters = self._kernel.instant, self._counters
        arrivals, self._owed_requests = subtract_owed(counters.arrivals, counters.abandoned + self._owed_requests)
        tokens, self._owed_tokens = subtract_owed(counters.prompt_tokens, counters.uncounted_tokens + self._owed_tokens)
        self._records.append(
            DemandWindow(
                began=self._began,
                ended=now,
                arrivals=arrivals,
                refused=counters.refused,
                abandoned=counters.abandoned,
                prompt_tokens=tokens,
                cached_tokens=counters.cached_tokens,
                prompt_squares=counters.prompt_squares * tokens / max(1, counters.prompt_tokens),
                finished=counters.finished,
                answer_tokens=counters.answer_tokens,
                answer_squares=counters.answer_squares,
                ttft=tuple(counters.ttft),
                tpot=tuple(counters.tpot),
                queue_wait=tuple(counters.queue_wait),
                queued=len(self._waiting),
                oldest_seconds=self._oldest(now),
                workers=self._workers(),
            )
        )
        self._began, self._counters = now, _Counters()
        if not self._over():
            self._kernel.after(RECORD, self._close)

    def _oldest(self, now: Nanos) -> float:
        first = next(iter(self._waiting.values()), now)
        return (now - first) / SECOND

    def _workers(self) -> tuple[WorkerDemand, ...]:
        if self._cluster is None or self._pools is None:
            return ()
        found = []
        for worker in self._cluster:
            if (pool := self._pools.pool_of(worker.id)) is not None:
                engine = worker.engine
                found.append(
                    WorkerDemand(
                        worker=worker.id,
                        pool=PoolName(pool),
                        running=engine.held - engine.waiting,
                        waiting=engine.waiting,
                        kv_used=engine.kv_blocks_used / worker.profile.limits.kv_blocks,
                        start_seconds=worker.profile.start_time / SECOND,
                    )
                )
        return tuple(found)

    def window(self) -> DemandWindow:
        """Return a window that is the sum of the records that were delivered since the last call.

        If no record was delivered, the window counts no requests, and repeats the queue and the workers of the last window. In a gap of the
        metrics, the window also names the router as stale.
        """
        now = self._kernel.instant
        in_gap = next((gap for gap in self._gaps if gap[0] <= now < gap[1]), None)
        records = []
        while in_gap is None and self._records and self._records[0].ended + self._delay <= now:
            records.append(self._records.popleft())
        if not records:
            stale = () if in_gap is None else (f"router: no report since {self._delivered / SECOND:.0f} s",)
            return DemandWindow(
                began=self._delivered,
                ended=self._delivered,
                queued=self._last.queued,
                oldest_seconds=self._last.oldest_seconds,
                workers=self._last.workers,
                stale=stale,
            )
        self._last = summed(records)
        self._delivered = self._last.ended
        return self._last


def summed(records: Sequence[DemandWindow]) -> DemandWindow:
    """Merge consecutive demand windows into one: counts are added, and the queue and the workers are those of the last window."""
    last = records[-1]
    ttft = tpot = queue_wait = records[0].ttft[:0]
    for each in records:
        ttft, tpot = added(ttft, each.ttft), added(tpot, each.tpot)
        queue_wait = added(queue_wait, each.queue_wait)
    return DemandWindow(
        began=records[0].began,
        ended=last.ended,
        arrivals=sum(each.arrivals for each in records),
        refused=sum(each.refused for each in records),
        abandoned=sum(each.abandoned for each in records),
        prompt_tokens=sum(each.prompt_tokens for each in records),
        cached_tokens=sum(each.cached_tokens for each in records),
        prompt_squares=sum(each.prompt_squares for each in records),
        finished=sum(each.finished for each in records),
        answer_tokens=sum(each.answer_tokens for each in records),
        answer_squares=sum(each.answer_squares for each in records),
        ttft=ttft,
        tpot=tpot,
        queue_wait=queue_wait,
        queued=last.queued,
        oldest_seconds=last.oldest_seconds,
        workers=last.workers,
    )
