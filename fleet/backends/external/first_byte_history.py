"""First-byte history: measures the time until the first byte of an answer, and this time divided by the KiB of the request.

Times are counted in a histogram whose buckets grow by the square root of 2, so adding a time only increments a counter.
When the histogram has `REMEMBERED` times, all counts are halved, so that recent times count more. A time far above the
others is counted as `MAX_FACTOR` times the expected time. So a single answer that took a minute does not raise the
expected time to a minute. But if a server stays slow, the expected time rises after about ten requests.
"""

from math import isqrt

from fleet.core.clock import Nanos

REMEMBERED = 512
BEYOND = 0.05  # share of the measured times that may be longer than the expected time
# The expected time is multiplied by 1 + CAUTION / (number of known times): by nine after one time, by two after eight.
CAUTION = 8.0
MAX_FACTOR = 4

_BUCKETS = 130  # two buckets for each bit of a time in nanoseconds; each bucket ends at √2 times the one before


class FirstByteHistory:
    """Measures how long one server takes until the first byte of an answer, either for streams or for answers in one piece."""

    def __init__(self) -> None:
        self.count = 0
        self._times = [0] * _BUCKETS
        self._rates = [0] * _BUCKETS
        # A measured time that is above both `_most_time` and `_most_rate` * KiB is counted as the larger of these two numbers.
        self._most_time = self._most_rate = 1 << 62
        self._time = self._rate = 0  # expected time of the first byte, and expected time for each KiB, in nanoseconds
        self._stale = False

    def add(self, waited: int, kib: int) -> None:
        """Add a measurement.

        Args:
            waited: Nanoseconds from sending the request to the first byte of its answer.
            kib: Size of the request's body in KiB.
        """
        if waited > self._most_time and waited > (most := self._most_rate * kib):
            waited = max(most, self._most_time)
        rate = waited // kib
        self._times[(waited * waited).bit_length()] += 1
        self._rates[(rate * rate).bit_length()] += 1
        self.count += 1
        self._stale = True

    def expected(self, kib: int, total: int) -> float:
        """Return the time, in nanoseconds, within which the first byte of an answer is expected.

        Args:
            kib: Size of the request's body in KiB.
            total: Sum of the sizes of all requests that the server may compute together, in KiB. A batch takes longer
                than one request alone.
        """
        assert self.count
        if self._stale:
            self._look()
        return (1 + CAUTION / self.count) * max(self._time, self._rate * max(kib, total / 4))

    def _look(self) -> None:
        self._stale = False
        if self.count >= REMEMBERED:
            self._times = [each // 2 for each in self._times]
            self._rates = [each // 2 for each in self._rates]
            self.count = sum(self._times)
        self._time, self._rate = _upper(self._times), _upper(self._rates)
        self._most_time, self._most_rate = MAX_FACTOR * self._time, MAX_FACTOR * self._rate


def _upper(counts: list[int]) -> Nanos:
    """Return the time that only the share `BEYOND` of the counted times exceeds, rounded up to the end of its bucket."""
    above, few = 0, BEYOND * sum(counts)
    for bucket in range(_BUCKETS - 1, -1, -1):
        above += counts[bucket]
        if above > few:
            return Nanos(isqrt(1 << bucket) + 1)
    return Nanos(1)
