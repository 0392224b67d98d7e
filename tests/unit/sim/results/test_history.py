"""History of a run by the arrival of its requests."""

from itertools import pairwise

from fleet.core.clock import MILLISECOND, SECOND
from fleet.sim.results.history import BINS, History
from fleet.sim.results.outcomes import EndedRequest, Slo


def ended(at, ttft_ms=100, **changes):
    arrival = round(at * SECOND)
    first = arrival + ttft_ms * MILLISECOND
    fields = {
        "request_id": "1",
        "arrival": arrival,
        "prompt_tokens": 1000,
        "output_tokens": 11,
        "cached_tokens": 400,
        "first_token": first,
        "end": first + 10 * 20 * MILLISECOND,
    }
    return EndedRequest(**(fields | changes))


def test_requests_count_in_window_of_arrival():
    history = History(Slo(ttft_ms=150, tpot_ms=50))
    history.add(ended(2.5, ttft_ms=1000))
    history.add(ended(0.5))

    first, nothing, last = history.windows()
    assert history.rate == 2 / 2.5

    assert (first.arrived, first.good, first.rate, first.middle) == (1, 1, 1.0, 0.5)
    assert (nothing.arrived, nothing.ttft_ms) == (0, (0.0, 0.0))
    assert (last.arrived, last.good, last.prompt_tokens, last.cached_tokens) == (1, 0, 1000, 400)


def test_rejected_request_counts_as_arrived_not_good():
    history = History(Slo())
    history.add(ended(0, first_token=None, refused="queue_full"))

    [window] = history.windows()

    assert (window.arrived, window.refused, window.good, window.prompt_tokens) == (1, 1, 0, 0)


def test_long_run_merges_windows_without_loss():
    history = History(Slo())
    for second in range(5000):
        history.add(ended(second))

    windows = history.windows()

    assert len(windows) <= BINS
    assert sum(window.arrived for window in windows) == sum(window.good for window in windows) == 5000
    assert {window.end - window.begin for window in windows} == {64.0}
    assert {window.arrived for window in windows[:-1]} == {64}
    assert all(earlier.end == later.begin for earlier, later in pairwise(windows))
