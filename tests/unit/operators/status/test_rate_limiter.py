from fleet.core.clock import SECOND, Nanos
from operators.status.rate_limiter import LONG, MOST_PER_SECOND, SHORT, StatusRateLimiter


def test_news_is_written_soon_and_progress_later():
    pace = StatusRateLimiter()
    assert pace.due("a", Nanos(5), urgent=False) == 5

    pace.wrote("a", Nanos(5))

    assert pace.due("a", Nanos(6), urgent=True) == 5 + SHORT
    assert pace.due("a", Nanos(6), urgent=False) == 5 + LONG
    assert pace.due("a", Nanos(60 * SECOND), urgent=False) == 60 * SECOND


def test_progress_of_many_is_limited_in_total():
    pace, many = StatusRateLimiter(), 200
    for key in range(many):
        pace.wrote(key, Nanos(0))

    for key in range(many):
        pace.due(key, Nanos(SECOND), urgent=False)
    due = {pace.due(key, Nanos(SECOND), urgent=False) for key in range(many)}

    assert due == {many // MOST_PER_SECOND * SECOND}
    assert pace.due(7, Nanos(SECOND), urgent=True) == SHORT, "what is new waits for nobody"
    for key in range(many - 10):
        pace.rests(key)
    assert pace.due(many - 1, Nanos(SECOND), urgent=False) == LONG


def test_brief_state_is_written_only_if_it_lasts():
    pace = StatusRateLimiter()
    pace.wrote("a", Nanos(0))
    began = Nanos(60 * SECOND)

    assert pace.due("a", began, urgent=True, brief=True) == began + LONG
    assert pace.due("a", Nanos(began + SECOND), urgent=True, brief=True) == began + LONG
    assert pace.due("a", Nanos(began + SECOND), urgent=True) == began + SECOND
    assert pace.due("a", Nanos(began + 2 * SECOND), urgent=True, brief=True) == began + 2 * SECOND + LONG
