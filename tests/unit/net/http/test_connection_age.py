"""Lifetime of HTTP connections: the last answer says so, so that no request is sent into the close."""

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
    """Send and answer one request; return whether another one may follow."""
    client.written = b""
    connection.data_received(REQUEST)
    exchange = exchanges.pop()
    exchange.respond(HTTPStatus.OK, b"{}")
    exchange.finish()
    return b"connection: close" not in client.written.lower()


async def test_first_answer_after_the_lifetime_closes():
    clock = ManualClock()
    connection, client, exchanges = a_connection(clock, 4)

    assert answered(connection, client, exchanges)
    clock.move(4 * SECOND - 1)
    assert answered(connection, client, exchanges)
    assert not client.closed
    clock.move(1)
    assert not answered(connection, client, exchanges)
    assert client.closed


async def test_connection_without_lifetime_stays_open():
    clock = ManualClock()
    connection, client, exchanges = a_connection(clock, 0)
    clock.move(3600 * SECOND)

    assert answered(connection, client, exchanges)
