"""Replay outcome: the figures of one rule, as `fleet plan replay --json` prints them."""

from msgspec import Struct


class ReplayOutcome(Struct, frozen=True, kw_only=True):
    """Figures of one rule."""

    rule: str
    attainment: float
    worst_attainment: float
    """Lowest attainment of any five minutes."""

    gpu_hours: float
    dollars: float
    direction_changes: int
    most_replicas: int
    """Most replicas that held GPUs at one instant, of all pools together."""

    predicted_error: float | None
    """Mean distance of the forecast rate of arrivals from the rate that came, over the mean rate; None if the rule forecasts none."""

    requests: int
    refused: int
    """Requests that were refused or given up."""

    plans: int
    """Decisions that changed a number."""

    cached_share: float
    """Share of the prompt tokens of answered requests that a cache had."""
