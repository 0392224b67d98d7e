"""Running time: a clock that stands still while the machine does not run the router."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.backends.external.running_time import GRACE, RunningTime
from fleet.backends.external.silence import SUSPECT_FACTOR
from fleet.backends.external.workers import PROBE_SECONDS
from fleet.core.clock import MILLISECOND, SECOND
from fleet.router.settings.router import OpenAiWorkerSettings


@given(st.lists(st.integers(0, GRACE), min_size=2, max_size=30))
def test_regular_ticks_follow_system_time(gaps):
    own, now = RunningTime(), 5 * SECOND
    for gap in gaps:
        now += gap
        assert own.tick(now) == now


def test_suspension_is_left_out_permanently():
    own = RunningTime()
    own.tick(SECOND)
    own.tick(SECOND + 100 * MILLISECOND)
    woke = 61 * SECOND

    assert own.of(woke) == SECOND + 100 * MILLISECOND + GRACE, "before the tick that is due"
    assert own.tick(woke) == SECOND + 100 * MILLISECOND + GRACE
    assert own.tick(woke + 100 * MILLISECOND) == SECOND + 200 * MILLISECOND + GRACE


def test_sleep_counts_less_than_a_suspicious_silence():
    floor = OpenAiWorkerSettings(worker_id="w", url="http://127.0.0.1:1", model="m").silence_floor_seconds
    assert floor / SUSPECT_FACTOR * SECOND > GRACE + 2 * PROBE_SECONDS * SECOND


@given(st.lists(st.integers(0, 100 * SECOND), min_size=1, max_size=30))
def test_running_time_is_monotonic_and_never_faster(gaps):
    own, now = RunningTime(), 0
    latest = own.tick(0)
    for gap in gaps:
        now += gap
        assert latest <= own.of(now) <= latest + min(gap, GRACE)
        latest = own.tick(now)
