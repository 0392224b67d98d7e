"""Replay outcome: the results of one scaling rule, as `fleet plan replay --json` prints them."""

from msgspec import Struct


class ReplayOutcome(Struct, frozen=True, kw_only=True):
    """Results of one scaling rule over the measured span of a replay."""

    rule: str
    attainment: float
    worst_attainment: float
    """Lowest attainment among the spans of five minutes in which at least `fleet.sim.planning.replay.LEAST_REQUESTS` requests
    arrived; `attainment` if there is no such span."""

    gpu_hours: float
    dollars: float
    direction_changes: int
    most_replicas: int
    """Maximum number of replicas that occupied GPUs at one instant, over all pools together."""

    predicted_error: float | None
    """Mean absolute difference between the forecast and the real rate of arrivals, divided by the mean real rate.

    None if the rule has made no forecast for an instant in the measured span, or if no request arrived near these instants.
    """

    requests: int
    refused: int
    """Number of requests that were rejected, including those whose deadline passed, or that ended without a token."""

    plans: int
    """Number of decisions that changed the wanted number of replicas of a pool, in the whole replay with its warm-up."""

    cached_share: float
    """Share of the prompt tokens of answered requests that came from a cache."""

    lowest_ttft_ms: float | None = None
    """Lowest TTFT of an answered request in milliseconds; None if no request was answered. If it is above the goal, no pool has reached
    the goal."""

    lowest_tpot_ms: float | None = None
    """Lowest mean time per further token of an answer of several tokens in milliseconds; None if there was no such answer."""
