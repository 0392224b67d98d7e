"""What may go wrong in a simulated cluster, and what its operators do to it, each at an instant.

Nothing of this may cost a request: what was under way is done again elsewhere, and what nobody can do waits.
"""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.ids import StoreId, WorkerId
from fleet.core.roles import Role


class WorkerLost(Struct, frozen=True, kw_only=True):
    """A worker dies with its cache and its transfers, and another takes its place."""

    at: Nanos
    worker: WorkerId
    down: Nanos  # until its successor begins to start
    start: Nanos | None = None  # that it needs to start; None: what its pool needs


class NodeLost(Struct, frozen=True, kw_only=True):
    """All workers of a node die, and its store with them but for what is on its disks."""

    at: Nanos
    node: StoreId
    down: Nanos


class WorkerSlow(Struct, frozen=True, kw_only=True):
    """A worker takes so many times as long for each step: throttled, or with a bad neighbour."""

    at: Nanos
    worker: WorkerId
    factor: float
    lasting: Nanos


class NetworkCut(Struct, frozen=True, kw_only=True):
    """Nothing passes between a worker and the router.

    A short cut delays what they send. One that is longer than the router waits for a sign of life costs the worker its work: the
    router places it elsewhere, and the worker gives it up. It comes back with what its cache holds.
    """

    at: Nanos
    worker: WorkerId
    lasting: Nanos


class StoreLost(Struct, frozen=True, kw_only=True):
    """The store of a node dies, with its pool; what is on disks is there again when it returns."""

    at: Nanos
    node: StoreId
    down: Nanos


class RoleFlip(Struct, frozen=True, kw_only=True):
    """A worker drains, and goes on in another role with the cache that it has. It never returns to the old one by itself."""

    at: Nanos
    worker: WorkerId
    role: Role


Fault = WorkerLost | NodeLost | WorkerSlow | NetworkCut | StoreLost | RoleFlip
