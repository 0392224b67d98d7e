"""Roles of workers, phases of attempts, and KV paths."""

from enum import StrEnum


class Role(StrEnum):
    """Kinds of attempts that a worker takes: prefill, decode (and aggregated), or all."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Phase(StrEnum):
    """The part of a request that one attempt runs."""

    AGGREGATED = "aggregated"  # the worker computes the prompt and generates the answer
    PREFILL = "prefill"  # the worker computes the prompt and one token; then the blocks are handed off
    DECODE = "decode"  # the worker fetches the blocks and generates the other tokens


class KvPath(StrEnum):
    """Path of blocks from the prefill worker to the decode worker."""

    STORE = "store"  # blocks are written to and read from the KV store node
    DIRECT = "direct"  # blocks move from engine memory to engine memory


class Placement(StrEnum):
    """The placement that a client demands."""

    AUTO = "auto"
    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
