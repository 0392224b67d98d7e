"""Demand: describes what clients of one model demanded between two instants: requests, tokens and latencies.

Rules:

1. A demand window is the difference between two values of cumulative counters, summed over all routers of the model. A
   request counts as demand when it arrives, unless its client left before the answer began, or no amount of capacity
   could have served it. Refused requests also count, as demand that was not served.
2. Durations are stored as histograms with fixed buckets. So the windows of several routers can be added, and also
   successive windows of one router.
3. A source that has not reported within its time limit (`stale_seconds`) is named in `stale`. A planner then keeps all
   numbers of replicas as they are, and reports the source.
"""

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.duration_counts import Counts
from fleet.planner.messages import PoolName


class WorkerDemand(Struct, frozen=True, kw_only=True):
    """Describes the load of one worker at the end of a demand window."""

    worker: str
    pool: PoolName
    running: int
    waiting: int
    kv_used: float
    """Used share of the worker's KV capacity, 0 to 1."""

    speed: float = 1.0
    """Speed that was learnt from measurements, relative to the worker's hardware profile; above 1 is faster."""

    start_seconds: float = 0.0
    """Time from the start of the worker to its registration, or 0 if it is unknown."""


class RecentRequest(Struct, frozen=True, kw_only=True):
    """Describes a recent request, which a rehearsal sends again in the simulator."""

    arrived: Nanos
    """Instant at which the request arrived, by the planner's clock."""

    prompt_tokens: int
    answer_tokens: int
    block_tokens: int = 0
    block_keys: tuple[int, ...] = ()
    """Block keys of the prompt, by which requests with the same prefix are recognised."""


class DemandWindow(Struct, frozen=True, kw_only=True):
    """Holds the demand of one model between two instants."""

    began: Nanos
    ended: Nanos
    arrivals: int = 0
    """Number of requests that arrived, without those whose clients left before an answer began, and without those that
    no amount of capacity could have served."""

    refused: int = 0
    """Number of requests that routers refused in this window because of too little capacity."""

    abandoned: int = 0
    """Number of requests whose clients left before an answer began. They are not part of `arrivals`."""

    prompt_tokens: int = 0
    """Number of prompt tokens of all arrivals."""

    cached_tokens: int = 0
    """Number of prompt tokens that workers did not compute, because their KV was in a cache. They are counted when the
    first token of the answer arrives."""

    prompt_squares: float = 0.0
    """Sum of the squares of the arrivals' prompt lengths, from which the variance of the lengths is computed, or 0 if
    it is unknown."""

    finished: int = 0
    """Number of answers that ended in the window, complete or not."""

    answer_tokens: int = 0
    """Number of tokens of the answers that ended in the window."""

    answer_squares: float = 0.0
    """Sum of the squares of the lengths of the answers that ended in the window, or 0 if it is unknown."""

    ttft: Counts = ()
    tpot: Counts = ()
    queue_wait: Counts = ()
    queued: int = 0
    """Number of requests that wait in routers at the end of the window."""

    oldest_seconds: float = 0.0
    """Age in seconds of the oldest request that waits in a router at the end of the window, or 0 if none waits."""

    overflowed: int = 0
    """Number of refused requests that a hosted endpoint has answered. They are part of `arrivals` and `refused`,
    because the pools should have served them."""

    overflow_dollars: float = 0.0
    """Dollars that the overflowed requests cost at the hosted endpoint."""

    workers: tuple[WorkerDemand, ...] = ()
    stale: tuple[str, ...] = ()
    """A text for each source that did not report in time, with the name of the source and the reason."""

    unserved: str = ""
    """A text that names the model, and the models that routers serve, if no router serves the model of this window. Empty
    if a router serves it."""

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / SECOND

    @property
    def rate(self) -> float:
        """Arrivals per second, or 0 if the window has no duration."""
        return self.arrivals / self.seconds if self.ended > self.began else 0.0

    @property
    def overflow_dollars_per_hour(self) -> float:
        """Cost of the overflowed requests in this window, in dollars per hour, or 0 if the window has no duration."""
        return 3600 * self.overflow_dollars / self.seconds if self.ended > self.began else 0.0
