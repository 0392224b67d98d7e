"""HTTP clients for tests that write and read the bytes of a connection themselves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from tests.support.backends.openai_servers import RelaySetup
from tests.support.frontend.frontends import Frontends


class RawHttpClient:
    """Writes and reads the bytes of one HTTP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(60):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        status = int(lines[0].split()[1])
        return status, dict(line.split(": ", 1) for line in lines[1:] if line)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        async with asyncio.timeout(60):
            if headers.get("transfer-encoding") == "chunked":
                body = b"".join([chunk async for chunk in self.chunks()])
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
        return status, headers, body

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
        assert await self.reader.readexactly(2) == b"\r\n"

    async def rest(self) -> bytes:
        """Return all bytes until the server closes the connection."""
        async with asyncio.timeout(60):
            return await self.reader.read()


@asynccontextmanager
async def raw_http_client(frontends: Frontends | RelaySetup, **options: Any) -> AsyncIterator[RawHttpClient]:
    """Connect over TCP; `options` are passed to `asyncio.open_connection`, such as `limit`, the most bytes to buffer."""
    host, _, port = frontends.http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), **options)
    try:
        yield RawHttpClient(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def post(path: str, body: bytes | dict, *headers: str, version: str = "1.1") -> bytes:
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *headers]
    if not any(header.startswith("content-type") for header in headers):
        lines.append("content-type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + body


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


def error_of(body: bytes) -> dict:
    error = json.loads(body)["error"]
    assert set(error) - {"cause"} == {"message", "type", "param", "code"}
    return error


def sse_events(text: str) -> list[tuple[str, str]]:
    """Return the complete server-sent events of a stream as pairs of id and data; the id is empty if there is none."""
    events = []
    for event in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        events.append((fields.get("id", ""), fields["data"]))
    return events
