"""What a connection does with the source of a relayed answer, transport by hand."""

from fleet.adapters.clock import SystemClock
from fleet.adapters.http_messages import HeldBodies, HttpSettings, KnownHeads
from fleet.adapters.http_protocol import Connection

REQUEST = b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}"


class Transport:
    """To the client, or from the server."""

    def __init__(self):
        self.reading = True
        self.written = b""

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def write(self, data):
        self.written += data

    def set_write_buffer_limits(self, high):
        assert high > 0

    def get_extra_info(self, _name):
        return None

    def is_closing(self):
        return False


class Work:
    def cancel(self):
        raise AssertionError("the client is still there")


def a_connection(transport):
    exchanges = []

    def serve(exchange):
        exchanges.append(exchange)
        return Work()

    connection = Connection(HttpSettings(), SystemClock(), serve, lambda _: b"", {}, KnownHeads(), HeldBodies())
    connection.connection_made(transport)
    return connection, exchanges


async def test_a_source_that_a_slow_client_holds_up_at_the_end_of_its_answer_is_read_again():
    client, source = Transport(), Transport()
    connection, exchanges = a_connection(client)
    connection.data_received(REQUEST)
    (exchange,) = exchanges
    exchange.relay(source).write(b"the whole answer")
    connection.pause_writing()  # as the transport does from within `write`
    assert not source.reading

    exchange.relayed(keep_alive=True)

    assert source.reading  # for its next request, which is another client's


async def test_a_source_is_held_up_while_the_client_does_not_read():
    client, source = Transport(), Transport()
    connection, exchanges = a_connection(client)
    connection.data_received(REQUEST)
    connection.pause_writing()
    exchanges[0].relay(source)
    assert not source.reading

    connection.resume_writing()

    assert source.reading
