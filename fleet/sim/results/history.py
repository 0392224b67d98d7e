"""History: collects the results of a run by the arrival times of its requests, for the plots of a report.

Requests are counted in bins, each of which covers an equal span of arrival times (the width). When a run gets longer
than all bins together, the width is doubled. So memory does not grow with the length of the run.
"""

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.sim.results.outcomes import EndedRequest, Slo
from fleet.sim.results.quantiles import Quantiles

BINS = 120
"""Maximum number of bins, because a plot cannot show more. For a longer run, the bins get wider."""

FIRST_WIDTH = Nanos(SECOND)


class ArrivalWindow(Struct, frozen=True, kw_only=True):
    """Counts and latencies of the requests that arrived in one span of time. Tokens are counted only for answered requests."""

    begin: float  # seconds since the beginning of the simulation
    end: float
    arrived: int
    good: int  # requests that kept the SLO
    refused: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: tuple[float, float]  # median and 90th percentile of TTFT

    @property
    def middle(self) -> float:
        return (self.begin + self.end) / 2

    @property
    def rate(self) -> float:
        """Arrivals per second in this span."""
        return self.arrived / (self.end - self.begin)


class _Bin:
    __slots__ = ("arrived", "cached_tokens", "good", "prompt_tokens", "refused", "ttft")

    def __init__(self) -> None:
        self.arrived = self.good = self.refused = self.prompt_tokens = self.cached_tokens = 0
        self.ttft = Quantiles()

    def take(self, other: "_Bin") -> None:
        self.arrived += other.arrived
        self.good += other.good
        self.refused += other.refused
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.ttft.take(other.ttft)


class ArrivalRate:
    """Computes the mean rate of arrivals from ended requests: from the beginning of the simulation to the last arrival."""

    def __init__(self) -> None:
        self._requests = 0
        self._last = 0

    def add(self, ended: EndedRequest) -> None:
        self._requests += 1
        self._last = max(self._last, ended.arrival)

    @property
    def rate(self) -> float:
        """Arrivals per second; 0 if no request arrived after the beginning."""
        return self._requests * SECOND / self._last if self._last else 0.0


class History:
    """Collects ended requests in bins by the time of their arrival. The caller passes `add` to `fleet.sim.run.simulate`."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._width = FIRST_WIDTH
        self._bins: list[_Bin] = []
        self._arrivals = ArrivalRate()

    def add(self, ended: EndedRequest) -> None:
        self._arrivals.add(ended)
        if (index := ended.arrival // self._width) >= BINS:
            index = self._widened(ended.arrival)
        while len(self._bins) <= index:
            self._bins.append(_Bin())
        bin_ = self._bins[index]
        bin_.arrived += 1
        if ended.refused or ended.first_token is None:
            bin_.refused += 1
            return
        bin_.good += self._slo.kept_by(ended)
        bin_.prompt_tokens += ended.prompt_tokens
        bin_.cached_tokens += ended.cached_tokens
        bin_.ttft.add(ended.ttft_ms)

    @property
    def rate(self) -> float:
        """Mean arrivals per second (`ArrivalRate`); 0 if no request arrived after the beginning."""
        return self._arrivals.rate

    def windows(self) -> list[ArrivalWindow]:
        """Return the windows of all bins from the start of the run, in order; a window may have no requests."""
        width = self._width / SECOND
        return [
            ArrivalWindow(
                begin=index * width,
                end=(index + 1) * width,
                arrived=bin_.arrived,
                good=bin_.good,
                refused=bin_.refused,
                prompt_tokens=bin_.prompt_tokens,
                cached_tokens=bin_.cached_tokens,
                ttft_ms=(bin_.ttft.quantile(0.5), bin_.ttft.quantile(0.9)),
            )
            for index, bin_ in enumerate(self._bins)
        ]

    def _widened(self, arrival: Nanos) -> int:
        """Double the width of the bins until `BINS` bins cover the instant of an arrival. Return the index of the bin with this instant."""
        while arrival // self._width >= BINS:
            self._width = Nanos(self._width * 2)
            for index in range(0, len(self._bins), 2):
                for other in self._bins[index + 1 : index + 2]:
                    self._bins[index].take(other)
            self._bins = self._bins[::2]
        return arrival // self._width
