"""Tests of the relay of the control socket of several router processes: no byte is lost, and no socket is left behind."""

import asyncio
import os
import stat
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleet.local.control_relay import open_control_relay
from tests.support.kvstore.builders import a_short_folder
from tests.support.waiting import turns

pytestmark = pytest.mark.integration

SAID = os.urandom(2_000_000)
ALL_SECONDS = 60


@pytest.fixture
def folder():
    with a_short_folder() as made:
        yield made


@asynccontextmanager
async def a_relay(folder, process):
    """Yield the path of a relay to one process whose connections `process` serves."""
    path, own = f"{folder}/control", f"{folder}/own"
    async with await asyncio.start_unix_server(process, own), open_control_relay(f"unix:{path}", [f"unix:{own}"]):
        yield path


async def says_all_and_ends(_, writer):
    writer.write(SAID)
    writer.close()


async def test_all_bytes_arrive_when_the_process_ends(folder):
    async with a_relay(folder, says_all_and_ends) as path, asyncio.timeout(ALL_SECONDS):
        reader, writer = await asyncio.open_unix_connection(path)
        heard = bytearray()
        while piece := await reader.read(4096):  # slower than the relay
            heard += piece
            await turns()
        writer.close()

    assert heard == SAID


async def test_all_bytes_arrive_when_the_client_ends(folder):
    heard = asyncio.get_running_loop().create_future()

    async def process(reader, writer):
        heard.set_result(await reader.read(-1))
        writer.close()

    async with a_relay(folder, process) as path, asyncio.timeout(ALL_SECONDS):
        _, writer = await asyncio.open_unix_connection(path)
        await says_all_and_ends(_, writer)

        assert await heard == SAID


async def test_socket_is_for_its_user_alone_and_goes_with_the_relay(folder):
    async with a_relay(folder, says_all_and_ends) as path:
        assert stat.S_IMODE(Path(path).stat().st_mode) & 0o077 == 0

    assert not Path(path).exists()
