"""How long a client's HTTP connection is used: the answer says when it was the last, so that no request is sent into its end."""

from http import HTTPStatus

from fleet.core.clock import SECOND
from fleet.net.connection_table import ConnectionTable
from fleet.net.http.connection import HttpConnection
from fleet.net.http.messages import HeadCache, HeldBodyBytes
from fleet.net.limit_log import SlowClientLog
from fleet.net.settings import HttpSettings
from tests.support.kvstore.builders import ManualClock
from tests.unit.net.http.test_connection import REQUEST, Transport, Work


def a_connection(clock, lasts_seconds):
    client, exchanges = Transport(), []

    def serve(exchange):
        exchanges.append(exchange)
        return Work()

    connection = HttpConnection(
        HttpSettings(),
        clock,
        serve,
        lambda _: b"",
        {},
        ConnectionTable(1, 1.0),
        HeadCache(),
        HeldBodyBytes(),
        SlowClientLog(HttpSettings()),
        lasts_seconds=lasts_seconds,
    )
    connection.connection_made(client)
    return connection, client, exchanges


def answered(connection, client, exchanges) -> bool:
    """One request; whether its answer said that another may follow."""
    client.written = b""
    connection.data_received(REQUEST)
    exchange = exchanges.pop()
    exchange.respond(HTTPStatus.OK, b"{}")
    exchange.over()
    return b"connection: close" not in client.written.lower()


async def test_the_first_answer_after_its_time_is_the_last_one():
    clock = ManualClock()
    connection, client, exchanges = a_connection(clock, 4)

    assert answered(connection, client, exchanges)
    clock.move(4 * SECOND - 1)
    assert answered(connection, client, exchanges)
    assert not client.closed
    clock.move(1)
    assert not answered(connection, client, exchanges)
    assert client.closed


async def test_without_a_time_it_lasts_as_long_as_the_client_likes():
    clock = ManualClock()
    connection, client, exchanges = a_connection(clock, 0)
    clock.move(3600 * SECOND)

    assert answered(connection, client, exchanges)
