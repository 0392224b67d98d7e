"""Slow reader limit: it ends connections of clients that read too slowly."""

from fleet.net.connection_limits import SlowReader, WriteBufferCounter


def test_client_that_reads_nothing_is_overdue_after_period():
    reader = SlowReader(30, 1000)

    assert not reader.overdue(0, waiting=500, written=500)
    assert not reader.overdue(30, waiting=500, written=500)
    assert reader.overdue(31, waiting=500, written=500)


def test_client_that_reads_single_bytes_is_overdue():
    reader = SlowReader(30, 1000)

    said = [reader.overdue(second, waiting=500 - second, written=500) for second in range(32)]

    assert said.index(True) == 31


def test_client_at_the_minimum_rate_is_not_overdue():
    reader = SlowReader(30, 1000)

    assert not any(reader.overdue(second, waiting=100_000 - 40 * second, written=100_000) for second in range(2000))


def test_client_that_read_everything_gets_a_new_period():
    reader = SlowReader(30, 1000)
    reader.overdue(0, waiting=500, written=500)
    reader.overdue(29, waiting=0, written=500)

    assert not reader.overdue(40, waiting=500, written=500)
    assert not reader.overdue(70, waiting=500, written=500)
    assert reader.overdue(71, waiting=500, written=500)


def test_bytes_written_meanwhile_do_not_count_as_read():
    reader = SlowReader(30, 1000)

    said = [reader.overdue(second, waiting=500, written=500 + second) for second in range(32)]

    assert said.index(True) == 31


def test_reader_as_fast_as_the_writer_is_not_overdue():
    reader = SlowReader(30, 1000)

    assert not any(reader.overdue(second, waiting=500, written=500 + 20 * second) for second in range(2000))


class Transport:
    """Transport whose write buffer a test sets."""

    def __init__(self) -> None:
        self.unread = 0

    def get_write_buffer_size(self) -> int:
        return self.unread


def seconds_of(reader: SlowReader, *, rate: int, high: int = 64_000, low: int = 16_000) -> int:
    """Return the seconds (at most 2,000) until a client that reads `rate` bytes a second is overdue; the buffer is always refilled."""
    transport, buffer = Transport(), WriteBufferCounter()
    for second in range(2000):
        transport.unread -= min(rate, transport.unread)
        if transport.unread <= low:
            buffer.resumed(transport)
            transport.unread = high
            buffer.paused(transport)
        if reader.overdue(second, transport.unread, buffer.written):
            return second
    return 2000


def test_reader_of_a_refilled_buffer_is_not_overdue():
    assert seconds_of(SlowReader(30, 64_000), rate=40_000) == 2000
    assert seconds_of(SlowReader(30, 64_000), rate=2200) == 2000


def test_reader_below_the_rate_is_overdue_with_refilled_buffer():
    assert seconds_of(SlowReader(30, 64_000), rate=1800) < 100
