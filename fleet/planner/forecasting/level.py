"""Level: the mean of a noisy measure since its last change. A change is believed only if chance hardly explains it.

Rules:

1. Each sample has a weight (seconds, or requests) and a sum over that weight (arrivals, or tokens). The level is the sum of the sums
   over the sum of the weights, of all samples since the last change, but no longer than `LONGEST` samples.
2. After each sample, the last 1, 2, 3, 6, 12, ... samples are compared with those before them. If their means differ by more than `threshold`
   standard errors, the samples before are forgotten. The variance of one unit of weight is given by the caller, for the larger of both means.
3. So the level of a constant load becomes steadier with time, a step shows at once, and a ramp shows as several steps.
"""

from collections import deque
from collections.abc import Callable
from math import sqrt

LONGEST = 360
SCALES = (1, 2, 3, 6, 12, 24, 48)


class Level:
    """Mean since the last change."""

    def __init__(self, variance: Callable[[float], float], threshold: float) -> None:
        """Create a level without samples.

        Args:
            variance: Variance of the sum over one unit of weight, where the argument is the mean.
            threshold: Standard errors by which two means differ if the measure has changed.
        """
        self._variance = variance
        self._threshold = threshold
        self._samples: deque[tuple[float, float]] = deque(maxlen=LONGEST)
        self.changes = 0
        """Number of changes that were seen."""

    @property
    def weight(self) -> float:
        """Weight of the samples since the last change."""
        return sum(weight for weight, _ in self._samples)

    @property
    def mean(self) -> float:
        weight = self.weight
        return sum(amount for _, amount in self._samples) / weight if weight else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        weight = self.weight
        return sqrt(self._variance(self.mean) / weight) if weight else 0.0

    def add(self, weight: float, amount: float) -> bool:
        """Add a sample; return True if the measure has changed."""
        if weight <= 0.0:
            return False
        self._samples.append((weight, amount))
        kept = self._changed()
        if kept is None:
            return False
        while len(self._samples) > kept:
            self._samples.popleft()
        self.changes += 1
        return True

    def _changed(self) -> int | None:
        """Return the number of last samples that differ most from those before, or None."""
        all_weight, all_amount = self.weight, sum(amount for _, amount in self._samples)
        weight = amount = 0.0
        most, found = self._threshold, None
        for count, (one_weight, one_amount) in enumerate(reversed(self._samples), start=1):
            if count == len(self._samples):
                break
            weight, amount = weight + one_weight, amount + one_amount
            if count not in SCALES:
                continue
            before = all_weight - weight
            now_mean, was_mean = amount / weight, (all_amount - amount) / before
            variance = self._variance(max(now_mean, was_mean))
            if variance <= 0.0:
                continue
            distance = abs(now_mean - was_mean) / sqrt(variance * (1.0 / weight + 1.0 / before))
            if distance > most:
                most, found = distance, count
        return found
