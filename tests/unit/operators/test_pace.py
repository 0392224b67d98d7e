from fleet.clock import SECOND, Nanos
from operators.pace import LONG, SHORT, Pace


def test_what_is_new_is_written_soon_and_what_counts_along_later():
    pace = Pace()
    assert pace.due("a", Nanos(5), urgent=False) == 5

    pace.wrote("a", Nanos(5))

    assert pace.due("a", Nanos(6), urgent=True) == 5 + SHORT
    assert pace.due("a", Nanos(6), urgent=False) == 5 + LONG
    assert pace.due("a", Nanos(60 * SECOND), urgent=False) == 60 * SECOND
