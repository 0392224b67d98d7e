"""What a worker is for, what it is asked to do, and the ways that blocks take."""

from enum import StrEnum


class Role(StrEnum):
    """What a worker takes: prefill work, decode work (and whole requests), or everything."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Phase(StrEnum):
    """One piece of work on one worker."""

    AGGREGATED = "aggregated"  # the whole request on one worker
    PREFILL = "prefill"  # the prompt and one token; the blocks are handed off
    DECODE = "decode"  # fetch the blocks, go on


class KvPath(StrEnum):
    """How blocks get from the prefill worker to the decode worker."""

    STORE = "store"  # through the KV store node
    DIRECT = "direct"  # engine memory to engine memory


class Placement(StrEnum):
    """What the client asks of the router."""

    AUTO = "auto"
    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
