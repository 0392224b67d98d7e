"""Confidence interval: computes the 95 % interval of the mean of a few runs by Student's t distribution (two-sided)."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from msgspec import Struct

QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Quantiles of the t distribution at 0.975, for 1 to 30 degrees of freedom (Student, Biometrika 1908)."""

NORMAL = 1.95996
"""Quantile of the normal distribution at 0.975, from which quantiles for more than 30 degrees of freedom are computed."""


class ConfidenceInterval(Struct, frozen=True, kw_only=True):
    """A mean, and the limits of its 95 % confidence interval. The limits are None if there is only one value."""

    mean: float
    low: float | None
    high: float | None


def confidence_interval(values: Sequence[float]) -> ConfidenceInterval:
    """Return the mean of one or more independent values, with its confidence interval."""
    mean = fmean(values)
    if len(values) < 2:
        return ConfidenceInterval(mean=mean, low=None, high=None)
    half = _quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return ConfidenceInterval(mean=mean, low=mean - half, high=mean + half)


def _quantile(degrees: int) -> float:
    if degrees <= len(QUANTILES):
        return QUANTILES[degrees - 1]
    # first term of the Cornish-Fisher expansion of the t quantile; for more than 30 degrees of freedom its error is at most 0.003
    return NORMAL + (NORMAL**3 + NORMAL) / (4 * degrees)
