from collections.abc import AsyncIterator

import pytest

from tests.support.backends.openai_servers import OpenAiServer


@pytest.fixture
async def servers() -> AsyncIterator[list[OpenAiServer]]:
    servers = [OpenAiServer(), OpenAiServer()]
    for server in servers:
        await server.start()
    yield servers
    for server in servers:
        await server.stop()


@pytest.fixture
async def server(servers) -> OpenAiServer:
    return servers[0]
