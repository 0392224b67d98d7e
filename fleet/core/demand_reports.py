"""Demand reports: the counts of each model's demand at one router process, which the call `WatchDemand` streams.

Rules:

1. Counters and histograms are cumulative since the start of the process. A restart makes a new incarnation, which begins at zero.
2. Gauges (`queued`, `oldest_seconds`, the load of workers) describe the instant of the report.
3. A request counts when it arrives. `abandoned` and `invalid` later count the requests among them that are no demand, because the
   client left before the answer began, or because no capacity could have served the request.
"""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.duration_counts import Counts
from fleet.core.ids import Incarnation, ModelName, WorkerId
from fleet.core.roles import Role

RECENT_REQUESTS = 64
"""Most requests in the sample of one report (`DemandReport.recent`)."""

RECENT_KEYS = 512
"""Most block keys of a request in the sample; longer prompts lose the keys of their last blocks."""


class ModelDemand(Struct, frozen=True, kw_only=True):
    """Demand of one model at one router process."""

    model: ModelName
    arrivals: int = 0
    waited: int = 0
    """Arrivals that entered the admission queue."""

    refused: int = 0
    """Arrivals that were refused for load: no worker, a full queue, or a deadline that passed before the answer began."""

    abandoned: int = 0
    invalid: int = 0
    """Arrivals that no capacity could have served, such as a prompt that is too long for every worker."""

    prompt_tokens: int = 0
    uncounted_tokens: int = 0
    """Prompt tokens of the abandoned and invalid arrivals."""

    prompt_squares: float = 0.0
    """Sum of the squares of the prompt lengths in tokens, over all arrivals."""

    cached_tokens: int = 0
    finished: int = 0
    answer_tokens: int = 0
    answer_squares: float = 0.0
    ttft: Counts = ()
    tpot: Counts = ()
    queue_wait: Counts = ()
    """Time from arrival until a worker was sent the request, for requests that got an answer."""

    queued: int = 0
    oldest_seconds: float = 0.0
    overflowed: int = 0
    """Refused requests that a hosted endpoint has answered."""

    overflow_dollars: float = 0.0
    """Cost of the answers of the hosted endpoint, in dollars."""


class WorkerLoad(Struct, frozen=True, kw_only=True):
    """Load of one worker, as a router knows it."""

    worker_id: WorkerId
    model: ModelName
    role: Role
    running: int
    waiting: int
    kv_used: float
    speed: float = 1.0
    start_seconds: float = 0.0


class SampledRequest(Struct, frozen=True, kw_only=True):
    """A request of the sample; `arrived` is an instant of the router's clock."""

    model: ModelName
    arrived: Nanos
    prompt_tokens: int
    answer_tokens: int
    block_tokens: int = 0
    block_keys: tuple[int, ...] = ()


class DemandReport(Struct, frozen=True, kw_only=True):
    """Demand that one router process has counted until `at`, an instant of its own clock."""

    router: str
    incarnation: Incarnation
    at: Nanos
    uptime: Nanos = Nanos(0)
    """Time since the process started."""

    models: tuple[ModelDemand, ...] = ()
    workers: tuple[WorkerLoad, ...] = ()
    recent: tuple[SampledRequest, ...] = ()
    """Some of the requests that ended since the last report of the same stream."""
