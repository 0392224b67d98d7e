"""Roles: define the roles of workers, the phases of attempts, the KV paths, and the placements that clients can demand."""

from enum import StrEnum


class Role(StrEnum):
    """Roles of workers. PREFILL takes only prefill attempts, DECODE takes decode and aggregated attempts, and BOTH takes all."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Phase(StrEnum):
    """Phases of a request; each attempt runs one of them."""

    AGGREGATED = "aggregated"  # the worker computes the prompt and generates the answer
    PREFILL = "prefill"  # the worker computes the prompt and one token; then the blocks are handed off
    DECODE = "decode"  # the worker fetches the blocks and generates the other tokens


class KvPath(StrEnum):
    """Paths by which blocks get from the prefill worker to the decode worker."""

    STORE = "store"  # blocks are written to and read from the KV store node
    DIRECT = "direct"  # blocks move from engine memory to engine memory


class Placement(StrEnum):
    """Placements that a client can demand: on one worker, on a pair of workers, or as the router decides."""

    AUTO = "auto"
    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
