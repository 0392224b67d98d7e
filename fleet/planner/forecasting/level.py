"""Level: computes the mean of a noisy measure since the last detected change of this mean. Pure.

Rules:

1. Each sample has a weight (such as seconds) and an amount (such as arrivals in these seconds). The level is the sum of
   the amounts divided by the sum of the weights. Both sums cover the samples since the last change that rule 2 has
   detected, but at most the last `LONGEST` samples.
2. After each sample, the means of the last 1, 2, 3, 6, 12, 24 and 48 samples are compared, each with the mean of all
   earlier samples. If the two means differ by more than `threshold` standard errors, chance is an unlikely explanation.
   If they also differ by at least the share `least` of the earlier mean, the measure has changed, and the earlier
   samples are dropped. If several of the seven means differ that much, the one with the most standard errors counts.
   The caller gives a function that returns, for a mean, the variance of the amount in one unit of weight. For a fall,
   the variance at the earlier mean is used. For a rise, the standard deviation is the average of two: at the earlier
   mean, and at the new mean. For counts, whose variance grows with their mean, this average has the same effect as
   Anscombe's transformation (1948).
3. So the level of a constant load becomes more exact with time. It follows a sudden change at once, and a gradual
   change in several steps.
"""

from collections import deque
from collections.abc import Callable
from math import sqrt

LONGEST = 360
SCALES = (1, 2, 3, 6, 12, 24, 48)


class Level:
    """Computes the mean of a measure from its latest samples, and detects when this mean has changed (rules 1 and 2)."""

    def __init__(self, variance: Callable[[float], float], threshold: float, least: float = 0.0) -> None:
        """Create a level without samples.

        Args:
            variance: Returns the variance of the amount in one unit of weight, for a mean.
            threshold: Number of standard errors by which two means must differ to count as a change.
            least: Smallest difference that counts as a change, as a share of the earlier mean.
        """
        self._variance = variance
        self._threshold = threshold
        self._least = least
        self._samples: deque[tuple[float, float]] = deque()
        self.weight = 0.0
        """Sum of the weights of the samples since the last detected change of the mean, at most of the last `LONGEST` samples."""

        self._amount = 0.0
        self.changes = 0
        """Number of changes of the mean that were detected so far."""

    @property
    def mean(self) -> float:
        return self._amount / self.weight if self.weight else 0.0

    def add(self, weight: float, amount: float) -> bool:
        """Add a sample; return True if it shows a change of the mean (rule 2). A sample whose weight is not above 0 is ignored."""
        if weight <= 0.0:
            return False
        self._samples.append((weight, amount))
        kept = self._changed()
        while len(self._samples) > (LONGEST if kept is None else kept):
            self._samples.popleft()
        # computed again from all samples, so that rounding errors do not accumulate
        self.weight = sum(weight for weight, _ in self._samples)
        self._amount = sum(amount for _, amount in self._samples)
        if kept is None:
            return False
        self.changes += 1
        return True

    def _changed(self) -> int | None:
        """Return the number of samples since a change of the mean that is detected now, or None if no change is detected."""
        samples = self._samples
        all_weight, all_amount = self.weight + samples[-1][0], self._amount + samples[-1][1]
        weight = amount = 0.0
        most, found, summed = self._threshold, None, 0
        for scale in SCALES:
            if scale >= len(samples):
                break
            for index in range(summed + 1, scale + 1):
                weight, amount = weight + samples[-index][0], amount + samples[-index][1]
            summed, before = scale, all_weight - weight
            now_mean, was_mean = amount / weight, (all_amount - amount) / before
            variance = self._variance(was_mean)
            if now_mean > was_mean:
                variance = 0.25 * (sqrt(self._variance(now_mean)) + sqrt(variance)) ** 2
            if variance <= 0.0 or abs(now_mean - was_mean) < self._least * was_mean:
                continue
            distance = abs(now_mean - was_mean) / sqrt(variance * (1.0 / weight + 1.0 / before))
            if distance > most:
                most, found = distance, scale
        return found
