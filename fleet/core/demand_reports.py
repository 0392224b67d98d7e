"""Demand reports: define the counts of demand at one router process, which the gRPC call `WatchDemand` streams.

Rules:

1. Counters and histograms are cumulative since the start of the process. A restart makes a new incarnation, whose
   counts begin at zero.
2. Gauges (`queued`, `oldest_seconds`, the load of workers) describe the instant of the report.
3. A request is counted in `arrivals` when it arrives. It is later counted again, in `abandoned` if its client left
   before the answer began, or in `invalid` if no amount of capacity could have served it. Readers subtract both counts
   to get the demand.
"""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.duration_counts import Counts
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role

RECENT_REQUESTS = 64
"""The maximum number of requests in the sample of one report (`DemandReport.recent`). If more were sampled, the report has
the latest ones."""

RECENT_KEYS = 512
"""The maximum number of block keys of one sampled request (`SampledRequest.block_keys`). If a prompt has more blocks, the
keys of its last blocks are left out."""


class ModelDemand(Struct, frozen=True, kw_only=True):
    """Holds the counts of one model's demand at one router process since the start of the process, and two gauges (rule 2)."""

    model: ModelName
    arrivals: int = 0
    waited: int = 0
    """Number of arrivals that entered the admission queue."""

    refused: int = 0
    """Number of arrivals that were rejected because of too little capacity: no worker was available, the queue was full,
    the predicted wait was too long, or the deadline passed before the answer began."""

    abandoned: int = 0
    invalid: int = 0
    """Number of arrivals that no amount of capacity could have served, such as a prompt that is too long for every
    worker."""

    prompt_tokens: int = 0
    uncounted_tokens: int = 0
    """Number of prompt tokens of the abandoned and invalid arrivals."""

    prompt_squares: float = 0.0
    """Sum of the squares of the prompt lengths in tokens, over all arrivals, from which readers compute the variance."""

    cached_tokens: int = 0
    finished: int = 0
    answer_tokens: int = 0
    answer_squares: float = 0.0
    ttft: Counts = ()
    tpot: Counts = ()
    queue_wait: Counts = ()
    """Histogram of the time from the arrival of a request until it was sent to a worker, for requests whose answer has
    begun."""

    queued: int = 0
    oldest_seconds: float = 0.0
    overflowed: int = 0
    """Number of rejected requests that a hosted endpoint has answered."""

    overflow_dollars: float = 0.0
    """Cost of all requests of the model that its hosted endpoint got, in dollars, even of those without a complete answer."""


class WorkerLoad(Struct, frozen=True, kw_only=True):
    """Describes the load of one worker, as a router knows it."""

    worker_id: WorkerId
    model: ModelName
    role: Role
    running: int
    waiting: int
    kv_used: float
    speed: float = 1.0
    start_seconds: float = 0.0


class SampledRequest(Struct, frozen=True, kw_only=True):
    """Describes one request of `DemandReport.recent`, whose answer has ended. `DemandReport` states the clock of `arrived`."""

    model: ModelName
    arrived: Nanos
    prompt_tokens: int
    answer_tokens: int
    block_tokens: int = 0
    block_keys: tuple[int, ...] = ()


class DemandReport(Struct, frozen=True, kw_only=True):
    """Holds the demand that one router process has counted until the instant `at`.

    Instants are those of the clock of the process that holds this object. Messages carry ages instead, from which the
    process that receives them computes instants of its own clock.
    """

    router: str
    incarnation: Incarnation
    at: Nanos
    uptime: Nanos = Nanos(0)
    """Time since the start of the router process."""

    models: tuple[ModelDemand, ...] = ()
    workers: tuple[WorkerLoad, ...] = ()
    recent: tuple[SampledRequest, ...] = ()
    """A sample of the requests whose answers ended after the previous report of the same stream (`WatchDemand`)."""
