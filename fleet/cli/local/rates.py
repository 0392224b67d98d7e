"""Recent rates: computes rates and latencies of a running router from its demand reports of the last minute."""

from collections import deque
from collections.abc import Iterator

from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand
from fleet.core.duration_counts import Counts, interpolated

WINDOW = Nanos(60 * SECOND)


class RecentRates:
    """Keeps the demand reports of the last minute, and shows the difference between the newest and the oldest one."""

    def __init__(self, window: Nanos = WINDOW) -> None:
        self._window = window
        self._reports: deque[DemandReport] = deque()

    def hear(self, report: DemandReport) -> None:
        """Add the next report. Drop reports of an earlier run of the router.

        Of the reports that are older than the window, keep only the newest one.
        """
        if self._reports and self._reports[-1].incarnation != report.incarnation:
            self._reports.clear()
        self._reports.append(report)
        while len(self._reports) > 2 and report.at - self._reports[1].at >= self._window:
            self._reports.popleft()

    def lines(self) -> Iterator[str]:
        """Yield a line for each model.

        Before the second report there are no lines, because rates are computed from two reports.
        """
        if len(self._reports) < 2:
            return
        first, last = self._reports[0], self._reports[-1]
        elapsed = (last.at - first.at) / SECOND
        before = {each.model: each for each in first.models}
        for model in last.models:
            old = before.get(model.model, ModelDemand(model=model.model))
            yield (
                f"{model.model}  last {elapsed:.0f} s: {(model.arrivals - old.arrivals) / elapsed:.2f} requests/s"
                f"  {(model.prompt_tokens - old.prompt_tokens) / elapsed:.1f} prompt tokens/s"
                f"  {(model.answer_tokens - old.answer_tokens) / elapsed:.1f} answer tokens/s"
                f"  refused {model.refused - old.refused}  queued {model.queued}"
                f"  {_latency('TTFT', old.ttft, model.ttft)}  {_latency('TPOT', old.tpot, model.tpot)}"
            )


def _latency(name: str, before: Counts, now: Counts) -> str:
    """Return a text with the median and the 99th percentile of the durations that were counted between two reports.

    A dash stands for both if no duration was counted.
    """
    counts = tuple(new - old for new, old in zip(now, before or (0,) * len(now), strict=True))
    median, high = interpolated(counts, 0.5), interpolated(counts, 0.99)
    if median is None or high is None:
        return f"{name} p50 -  p99 -"
    return f"{name} p50 {median * 1000:.1f} ms  p99 {high * 1000:.1f} ms"
