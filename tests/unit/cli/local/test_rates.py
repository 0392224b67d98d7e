"""Rates and percentiles of `fleet status --watch`."""

from fleet.cli.local.rates import RecentRates
from fleet.core.clock import SECOND, Nanos
from fleet.core.demand_reports import DemandReport, ModelDemand
from fleet.core.duration_counts import EDGES, bucket_of
from fleet.core.ids import Incarnation, ModelName


def counts(*durations: float) -> tuple[int, ...]:
    found = [0] * (len(EDGES) + 1)
    for each in durations:
        found[bucket_of(each)] += 1
    return tuple(found)


def report(second: float, incarnation: str = "a", **fields: object) -> DemandReport:
    return DemandReport(
        router="r",
        incarnation=Incarnation(incarnation),
        at=Nanos(round(second * SECOND)),
        models=(ModelDemand(model=ModelName("m"), **fields),),
    )


def test_first_report_alone_gives_no_rates():
    rates = RecentRates()
    rates.hear(report(0, arrivals=7))

    assert list(rates.lines()) == []


def test_rates_are_differences_over_the_time_between_reports():
    rates = RecentRates()
    rates.hear(report(0, arrivals=7, prompt_tokens=100, answer_tokens=10, refused=1, ttft=counts(9.0)))
    rates.hear(report(2, arrivals=11, prompt_tokens=400, answer_tokens=50, refused=2, queued=3, ttft=counts(9.0, 0.1)))

    (line,) = rates.lines()
    assert line.startswith(
        "m  last 2 s: 2.00 requests/s  150.0 prompt tokens/s  20.0 answer tokens/s  refused 1  queued 3"
    )
    assert "TTFT p50 86.6 ms  p99 99.7 ms  TPOT p50 -  p99 -" in line


def test_old_reports_leave_the_window():
    rates = RecentRates(window=Nanos(10 * SECOND))
    for second in range(31):
        rates.hear(report(second, arrivals=min(20, second)))

    (line,) = rates.lines()
    assert line.startswith("m  last 10 s: 0.00 requests/s")


def test_restarted_router_begins_anew():
    rates = RecentRates()
    rates.hear(report(0, arrivals=70))
    rates.hear(report(1, arrivals=80))
    rates.hear(report(2, "b", arrivals=1))
    assert list(rates.lines()) == []

    rates.hear(report(3, "b", arrivals=3))
    assert next(rates.lines()).startswith("m  last 1 s: 2.00 requests/s")
