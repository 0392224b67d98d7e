"""Faults: failures and actions of administrators in a simulated cluster, each at an instant.

No fault loses a request as long as another worker can serve it: the router repeats interrupted attempts there. If no worker
is left, or after `RouterSettings.max_attempts` failures, the router rejects the request, as in production.
"""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role


class WorkerLost(Struct, frozen=True, kw_only=True):
    """A worker dies and loses its cache and its transfers. Later a new worker starts under the same name."""

    at: Nanos
    worker: WorkerId
    down: Nanos  # time from the death until the new worker begins to start
    start: Nanos | None = None  # duration of the start; None: the duration in the pool's profile


class NodeLost(Struct, frozen=True, kw_only=True):
    """All workers of a node die, and its store dies and loses its pool. After `down`, the store returns, and new workers begin to start."""

    at: Nanos
    node: StoreId
    down: Nanos


class WorkerSlow(Struct, frozen=True, kw_only=True):
    """A worker takes `factor` times as long for each step during the time `lasting`, for example because its GPUs are throttled."""

    at: Nanos
    worker: WorkerId
    factor: float
    lasting: Nanos


class NetworkCut(Struct, frozen=True, kw_only=True):
    """The network between a worker and the router is cut: no message passes for a time.

    A short cut only delays the messages. If the cut is longer than the router's heartbeat timeout, the router gives the
    worker up and places its requests elsewhere. The worker then drops its attempts, and returns with its cache after the
    cut.
    """

    at: Nanos
    worker: WorkerId
    lasting: Nanos


class StoreLost(Struct, frozen=True, kw_only=True):
    """The store of a node dies and loses its pool. After `down`, the store returns with the blocks of its lower tiers, such as disks."""

    at: Nanos
    node: StoreId
    down: Nanos


class RoleFlip(Struct, frozen=True, kw_only=True):
    """A worker drains and continues in another role with its cache. It returns to the old role only by another `RoleFlip`."""

    at: Nanos
    worker: WorkerId
    role: Role


Fault = WorkerLost | NodeLost | WorkerSlow | NetworkCut | StoreLost | RoleFlip
