"""Fault points: the situations that the fault simulation must reach, and a counter for each of them.

If a promise holds in 10,000 seeds, this proves little unless the dangerous situations occurred in these seeds. So each
fault point counts how often its situation really occurred. Counting the drawn faults would not be
enough, because a fault may have no effect.
"""

from collections import Counter
from enum import StrEnum

LEAST_REACHED = 100
"""How often a campaign of at least `LEAST_SEEDS` seeds has to reach each fault point."""

LEAST_SEEDS = 10_000


class FaultPoint(StrEnum):
    # Workers
    KILLED_WHILE_PREFILLING = "worker killed while it computes a prompt"
    KILLED_WHILE_DECODING = "worker killed while it generates"
    KILLED_WHILE_LENDING = "prefill worker killed while it lends blocks"
    KILLED_WHILE_PULLING = "decode worker killed while it pulls blocks"
    KILLED_WHILE_WRITING = "worker killed between reservation and publication"
    KILLED_WHILE_READING = "worker killed while it reads under a lease of the store"
    FROZEN_BRIEFLY = "worker frozen for less than the heartbeat timeout"
    FROZEN_TOO_LONG = "worker frozen for longer than the heartbeat timeout"
    ENGINE_STUCK = "engine hangs until the watchdog ends the worker"
    ENGINE_FAILED = "engine fails an attempt"
    DRAINED = "worker drained with all its work done"
    DRAIN_GAVE_UP = "worker gave up attempts at its drain's deadline"
    REFUSED_WHILE_DRAINING = "worker refused an attempt because it drains"
    # Streams
    STREAM_CUT = "messages held back by a network cut"
    STREAM_SILENT = "router ended a stream because of silence"
    STREAM_RESET = "connection between router and worker reset"
    STREAM_MALFORMED = "router ended a stream because of a malformed message"
    STREAM_GAP = "router ended a stream because KV events were missing"
    OLDER_STREAM_CUT = "worker cut an older stream of the same router"
    LATE_MESSAGE = "router ignored a message of an attempt that it had given up"
    UNDELIVERED = "attempt could not be sent"
    # Requests
    RETRIED = "attempt of a request repeated elsewhere"
    RESUMED = "answer that had begun continued on another worker"
    STATE_REBUILT = "answer with a seed or penalties continued on another worker"
    STARTED_OVER = "answer of a client without stream started over"
    WORKER_LOST = "request rejected because its worker was lost"
    QUEUED = "request waited in the router"
    DEADLINE_PASSED = "deadline passed before the answer was complete"
    CANCELLED_IN_QUEUE = "client left while its request waited"
    CANCELLED_IN_PREFILL = "client left while its prompt was computed"
    CANCELLED_HANDED_OVER = "client left between prefill and decode"
    CANCELLED_IN_DECODE = "client left while its answer was generated"
    # Membership
    REGISTRY_AWAY = "registration got no answer"
    NAME_OCCUPIED = "registration refused because another incarnation holds the name"
    LEASE_ENDED = "lease of a member ended"
    LEASE_ENDED_IN_STREAM = "lease of a member ended while its stream went on"
    SUPERSEDED = "registration of a replaced incarnation refused"
    ROUTER_KILLED = "router killed with requests in flight"
    ROUTER_FROZEN = "router frozen with requests in flight"
    # Handoffs
    HANDED_OVER_DIRECT = "blocks pulled from the prefill worker"
    HANDED_OVER_BY_STORE = "blocks of a handoff read from the store"
    PULL_FAILED = "pull of a handoff failed"
    PULL_TOO_LATE = "pull of a handoff whose lease had ended"
    LEASE_EXPIRED = "handoff lease ended without being returned"
    BLOCK_DAMAGED = "damaged block of a direct transfer noticed by its checksum"
    # Store
    STORE_KILLED = "store killed while it served calls"
    STORE_SILENT = "call to the store timed out"
    STORE_LEASE_EXPIRED = "lease or reservation of the store ended by its deadline"
    SLOT_REUSED = "reader found that its slot belongs to another block"
    WRITE_TOO_LATE = "writer's reservation had ended before its publication"
    POOL_FULL = "write refused because the pool is full"
    EVICTED = "block evicted from the pool"
    DISK_FAILED = "disk operation failed"
    DISK_FULL = "disk took no block"
    DISK_LATE = "disk answered after its deadline"
    DISK_CORRUPT = "corrupt record on disk noticed by its checksum"
    PROMOTED = "block promoted from disk"


class FaultPoints:
    """Counts how often each fault point is reached."""

    def __init__(self) -> None:
        self.counts: Counter[FaultPoint] = Counter()

    def reach(self, point: FaultPoint, times: int = 1) -> None:
        if times:
            self.counts[point] += times
