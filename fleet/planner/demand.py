"""Demand of one model between two instants: requests, tokens, latencies and worker load.

Rules:

1. A window is a difference of cumulative counters, summed over all routers of the model. A request counts as demand when it arrives,
   unless its client left before the answer began; refused requests are demand that was not met.
2. Durations are counts in fixed buckets, so that windows of several routers can be added, and so can windows of one router.
3. A source that has not reported within its limit is named in `stale`; a planner then keeps all numbers and reports the source.
"""

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.duration_counts import Counts
from fleet.planner.messages import PoolName


class WorkerDemand(Struct, frozen=True, kw_only=True):
    """Load of one worker at the end of the window."""

    worker: str
    pool: PoolName
    running: int
    waiting: int
    kv_used: float
    """Share of its KV capacity, 0 to 1."""

    speed: float = 1.0
    """Learnt speed relative to its hardware profile; above 1 is faster."""

    start_seconds: float = 0.0
    """Time from its start to its registration; 0: unknown."""


class RecentRequest(Struct, frozen=True, kw_only=True):
    """A recent request, which a rehearsal repeats in the simulator."""

    arrived: Nanos
    """Instant of arrival on the planner's clock."""

    prompt_tokens: int
    answer_tokens: int
    block_tokens: int = 0
    block_keys: tuple[int, ...] = ()
    """Keys of the prompt's blocks, which show shared prefixes."""


class DemandWindow(Struct, frozen=True, kw_only=True):
    """Demand of one model between two instants."""

    began: Nanos
    ended: Nanos
    arrivals: int = 0
    """Requests that arrived, without those whose clients left before an answer began."""

    refused: int = 0
    """Arrivals that were refused for load."""

    abandoned: int = 0
    """Requests whose clients left before an answer began; these are not part of `arrivals`."""

    prompt_tokens: int = 0
    """Prompt tokens of the arrivals."""

    cached_tokens: int = 0
    """Prompt tokens that workers had in a cache."""

    prompt_squares: float = 0.0
    """Sum of the squares of the arrivals' prompt lengths, which shows how much lengths differ; 0: unknown."""

    finished: int = 0
    """Answers that ended in the window."""

    answer_tokens: int = 0
    """Tokens of the answers that ended in the window."""

    answer_squares: float = 0.0
    """Sum of the squares of the lengths of these answers; 0: unknown."""

    ttft: Counts = ()
    tpot: Counts = ()
    queue_wait: Counts = ()
    queued: int = 0
    """Requests that wait in routers at the end of the window."""

    oldest_seconds: float = 0.0
    """Age of the oldest request that waits."""

    overflowed: int = 0
    """Refused requests that a hosted endpoint has answered. They are part of `arrivals` and of `refused`, because the pools should serve them."""

    overflow_dollars: float = 0.0
    """Cost of the hosted endpoint."""

    workers: tuple[WorkerDemand, ...] = ()
    stale: tuple[str, ...] = ()
    """Sources that did not report in time, with the reason."""

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / SECOND

    @property
    def rate(self) -> float:
        """Arrivals per second."""
        return self.arrivals / self.seconds if self.ended > self.began else 0.0

    @property
    def overflow_dollars_per_hour(self) -> float:
        """Cost of the hosted endpoint in this window, converted to dollars per hour."""
        return 3600 * self.overflow_dollars / self.seconds if self.ended > self.began else 0.0
