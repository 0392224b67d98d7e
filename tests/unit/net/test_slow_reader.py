"""The limit of clients that read slowly."""

from fleet.net.slow_reader import SlowReader, WriteBufferCounter


def test_client_that_takes_nothing_is_overdue_after_the_period():
    reader = SlowReader(30, 1000)

    assert not reader.overdue(0, waiting=500, written=500)
    assert not reader.overdue(30, waiting=500, written=500)
    assert reader.overdue(31, waiting=500, written=500)


def test_client_that_drips_is_overdue_as_well():
    reader = SlowReader(30, 1000)

    said = [reader.overdue(second, waiting=500 - second, written=500) for second in range(32)]

    assert said.index(True) == 31


def test_client_that_takes_the_least_amount_goes_on():
    reader = SlowReader(30, 1000)

    assert not any(reader.overdue(second, waiting=100_000 - 40 * second, written=100_000) for second in range(2000))


def test_client_that_took_all_has_a_new_period():
    reader = SlowReader(30, 1000)
    reader.overdue(0, waiting=500, written=500)
    reader.overdue(29, waiting=0, written=500)

    assert not reader.overdue(40, waiting=500, written=500)
    assert not reader.overdue(70, waiting=500, written=500)
    assert reader.overdue(71, waiting=500, written=500)


def test_what_is_written_meanwhile_is_not_taken():
    reader = SlowReader(30, 1000)

    said = [reader.overdue(second, waiting=500, written=500 + second) for second in range(32)]

    assert said.index(True) == 31


def test_writer_and_reader_of_one_pace_go_on():
    reader = SlowReader(30, 1000)

    assert not any(reader.overdue(second, waiting=500, written=500 + 20 * second) for second in range(2000))


class Transport:
    """A write buffer of which the reader takes, until it is so empty that writing goes on."""

    def __init__(self) -> None:
        self.unread = 0

    def get_write_buffer_size(self) -> int:
        return self.unread


def seconds_of(reader: SlowReader, *, rate: int, high: int = 64_000, low: int = 16_000) -> int:
    """How long a client with that rate is served, at most 2,000 s, while its writer fills the buffer whenever it may."""
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


def test_reader_whose_buffer_is_filled_again_goes_on():
    assert seconds_of(SlowReader(30, 64_000), rate=40_000) == 2000
    assert seconds_of(SlowReader(30, 64_000), rate=2200) == 2000


def test_reader_below_the_rate_is_cut_though_its_buffer_is_filled():
    assert seconds_of(SlowReader(30, 64_000), rate=1800) < 100
