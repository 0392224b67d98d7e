"""HTTP client by which the router checks external backends, over real sockets."""

import asyncio

import pytest

from fleet.backends.external.http_client import MAX_ANSWER_BYTES, BackendUnreachable, ServerAddress, http_request
from tests.support.servers.scripted import Script, a_scripted_server

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\n"
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"


async def asked(said: bytes, drip: bytes = b"") -> tuple[int, bytes]:
    with a_scripted_server(Script((said,), drip=drip)) as port:
        return await http_request(ServerAddress.of(f"http://127.0.0.1:{port}", ""), "GET", "/health", within_seconds=60)


async def test_an_answer_is_its_status_and_its_content():
    assert await asked(ANSWER) == (200, b"{}")


@pytest.mark.parametrize("drip", [0, len(ANSWER)])
async def test_interim_head_is_no_answer(drip):
    assert await asked((HINTS + ANSWER)[: len(HINTS + ANSWER) - drip], drip=ANSWER[len(ANSWER) - drip :]) == (
        200,
        b"{}",
    )


@pytest.mark.parametrize("said", [HINTS, UPGRADE, b"", b"hello"])
async def test_a_server_that_says_something_else_does_not_answer(said):
    with pytest.raises(BackendUnreachable):
        await asked(said)


async def test_server_that_never_ends_its_hints_is_left_in_time():
    left = asyncio.Event()

    async def hint(_, writer):
        try:
            while True:
                writer.write(HINTS * 100)
                await writer.drain()
        except ConnectionError:
            left.set()
        finally:
            writer.close()

    async with await asyncio.start_server(hint, "127.0.0.1", 0) as server:
        address = ServerAddress.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "")
        with pytest.raises(BackendUnreachable, match="no answer in time"):
            await http_request(address, "GET", "/health", within_seconds=0.3)
        async with asyncio.timeout(60):
            await left.wait()


@pytest.mark.parametrize("size", [MAX_ANSWER_BYTES - 1000, 4 * MAX_ANSWER_BYTES])
async def test_beginning_of_a_long_answer_is_read(size):
    status, content = await asked(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))

    assert (status, len(content) == size) == (200, size < MAX_ANSWER_BYTES)
