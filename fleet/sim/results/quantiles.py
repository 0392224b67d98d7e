"""Quantiles: computes quantiles of many values; the needed memory does not grow with the number of values."""

from collections import defaultdict
from math import ceil, exp, log

RESOLUTION = 0.005
"""Maximum relative error of a quantile. The bins are logarithmic, as in DDSketch (VLDB 2019)."""

WIDTH = log((1 + RESOLUTION) / (1 - RESOLUTION))
"""Width of a bin on the logarithmic scale."""

ZERO = -(1 << 30)
"""Index of the bin for 0, which has no logarithm."""

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Quantiles:
    """A distribution of values that are not negative, counted in logarithmic bins."""

    def __init__(self) -> None:
        self._bins: defaultdict[int, int] = defaultdict(int)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._bins[ceil(log(value) / WIDTH) if value > 0 else ZERO] += count
        self.total += value * count

    def take(self, other: "Quantiles") -> None:
        """Add all values of another distribution."""
        for index, count in other._bins.items():  # noqa: SLF001 - of the same class
            self._bins[index] += count
        self.total += other.total

    @property
    def count(self) -> int:
        """Number of values that were added."""
        return sum(self._bins.values())

    def quantile(self, share: float) -> float:
        """Return the quantile for a share, such as the median for 0.5. Without values, return 0."""
        wanted = max(1, ceil(share * self.count))
        seen = 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= wanted:
                return self._value(index)
        return 0.0

    def curve(self) -> list[tuple[float, float]]:
        """Return the distribution function as pairs: a value, and the share of all values that are not larger."""
        points, seen, count = [], 0, self.count
        for index in sorted(self._bins):
            seen += self._bins[index]
            points.append((self._value(index), seen / count))
        return points

    def summary(self) -> dict[str, float]:
        """Return the mean and the quantiles in `QUANTILES` by name, rounded to three decimals."""
        mean = self.total / self.count if self._bins else 0.0
        return {"mean": round(mean, 3), **{name: round(self.quantile(share), 3) for name, share in QUANTILES.items()}}

    def _value(self, index: int) -> float:
        return 0.0 if index == ZERO else exp(WIDTH * (index - 0.5))
