"""First-byte history: how long a server took until its first bytes, and how long for each KiB of prompt.

Times are counted in buckets of half an octave, so adding one is as fast as a counter. When `REMEMBERED` times are there, all counts
are halved, so recent ones count more. A time far above the others counts as `MAX_FACTOR` times the expected one: a server that wakes up
after a minute does not teach that a minute is usual, and one that has become slow for good teaches it within about ten requests.
"""

from math import isqrt

from fleet.core.clock import Nanos

REMEMBERED = 512
BEYOND = 0.05  # share of all times that are longer than the expected time
# margin while few times are known: with one time the expectation is nine times as long, with eight twice as long
CAUTION = 8.0
MAX_FACTOR = 4

_BUCKETS = 130  # two buckets for each bit of an instant, which is half an octave for a bucket


class FirstByteHistory:
    """Measures how long one server takes until its first bytes, for one kind of answer."""

    def __init__(self) -> None:
        self.count = 0
        self._times = [0] * _BUCKETS
        self._rates = [0] * _BUCKETS
        self._most_time = self._most_rate = 1 << 62  # measurements above these values count as these values
        self._time = self._rate = 0  # expected time of the first byte, and expected time for each KiB, in nanoseconds
        self._stale = False

    def add(self, waited: int, kib: int) -> None:
        """Add a measurement.

        Args:
            waited: Nanoseconds from sending the request to the first byte of its answer.
            kib: Size of its body.
        """
        if waited > self._most_time and waited > (most := self._most_rate * kib):
            waited = max(most, self._most_time)
        rate = waited // kib
        self._times[(waited * waited).bit_length()] += 1
        self._rates[(rate * rate).bit_length()] += 1
        self.count += 1
        self._stale = True

    def expected(self, kib: int, total: int) -> float:
        """Return after how many nanoseconds a first byte is expected at the latest.

        Args:
            kib: Size of the request's body.
            total: Sizes of all requests that may be computed together with it. A batch of them takes longer than each alone.
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
    """Return a high percentile of the times: the share `BEYOND` of them is longer. The result is the end of a bucket."""
    above, few = 0, BEYOND * sum(counts)
    for bucket in range(_BUCKETS - 1, -1, -1):
        above += counts[bucket]
        if above > few:
            return Nanos(isqrt(1 << bucket) + 1)
    return Nanos(1)
