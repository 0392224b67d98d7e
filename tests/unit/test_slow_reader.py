"""The limit of clients that read slowly."""

from fleet.adapters.slow_reader import SlowReader


def test_client_that_takes_nothing_is_overdue_after_the_period():
    reader = SlowReader(30, 1000)

    assert not reader.overdue(0, waiting=500)
    assert not reader.overdue(30, waiting=500)
    assert reader.overdue(31, waiting=500)


def test_client_that_drips_is_overdue_as_well():
    reader = SlowReader(30, 1000)

    said = [reader.overdue(second, waiting=500 - second) for second in range(32)]

    assert said.index(True) == 31


def test_client_that_takes_the_least_amount_goes_on():
    reader = SlowReader(30, 1000)

    assert not any(reader.overdue(second, waiting=100_000 - 40 * second) for second in range(2000))


def test_client_that_took_all_has_a_new_period():
    reader = SlowReader(30, 1000)
    reader.overdue(0, waiting=500)
    reader.overdue(29, waiting=0)

    assert not reader.overdue(40, waiting=500)
    assert not reader.overdue(70, waiting=500)
    assert reader.overdue(71, waiting=500)


def test_what_is_written_meanwhile_is_not_taken():
    reader = SlowReader(30, 1000)

    said = [reader.overdue(second, waiting=500, written=500 + second) for second in range(32)]

    assert said.index(True) == 31


def test_writer_and_reader_of_one_pace_go_on():
    reader = SlowReader(30, 1000)

    assert not any(reader.overdue(second, waiting=500, written=500 + 20 * second) for second in range(2000))
