"""A listening port ends between the turns of its loop."""

import asyncio
import socket

import pytest

from kvstore.net.listeners import stop_listening
from tests.support.waiting import turns, until

pytestmark = pytest.mark.integration


class Greeter(asyncio.Protocol):
    """Say one word to each connection and close it."""

    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()


@pytest.mark.parametrize("count", range(2, 6))
async def test_accepted_connection_is_served_when_its_port_ends(count):
    """In the turn after `accept`, a server that just closes leaves the connection open and unanswered."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Greeter, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    with socket.create_connection(address) as caller:
        caller.setblocking(False)
        await turns(count)

        stop_listening(server)

        async with asyncio.timeout(60):
            assert await loop.sock_recv(caller, 100) == b"hello"
            assert await loop.sock_recv(caller, 100) == b""
        await until(lambda: not server.is_serving())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=60)
