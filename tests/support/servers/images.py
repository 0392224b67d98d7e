"""Image server: a web server that serves images; some of its paths behave like a hostile or broken server."""

import asyncio
import gzip
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from PIL import Image

from tests.support.waiting import pace


def an_image(color: str = "red", size: tuple[int, int] = (7, 5)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


class ImageServer:
    """Serves images on loopback; `seen` has the requests, and `left` counts the clients that left before the answer ended."""

    def __init__(self, host: str, port: int, scheme: str) -> None:
        self.host = host
        self.port = port
        self.scheme = scheme
        self.seen: list[web.Request] = []
        self.silent = 0  # number of requests that wait for an answer, which never comes
        self.left = 0

    def url(self, path: str, host: str = "") -> str:
        return f"{self.scheme}://{host or self.host}:{self.port}{path}"

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        match request.path:
            case "/red.png":
                return web.Response(body=an_image("red"), content_type="image/png")
            case "/blue":  # a wrong type, because the router must ignore the type that a server states
                return web.Response(body=an_image("blue"), content_type="text/plain")
            case "/to":
                return web.Response(status=302, headers={"Location": request.query["url"]})
            case "/loop":
                return web.Response(status=302, headers={"Location": "/loop"})
            case "/nowhere":
                return web.Response(status=301)
            case "/page":
                return web.Response(text="<html></html>", content_type="image/png")
            case "/none":
                return web.Response(status=404, body=an_image())
            case "/gzip":
                bomb = gzip.compress(bytes(64 << 20))
                return web.Response(body=bomb, headers={"Content-Encoding": "gzip", "Content-Type": "image/png"})
            case "/stated":
                return web.Response(body=an_image() + bytes(int(request.query["bytes"])))
            case "/endless":
                return await self._stream(request, an_image(), bytes(65_536), pause_seconds=0)
            case "/trickle":
                return await self._stream(request, b"", b"\x89", pause_seconds=0.05)
            case "/cut":
                answer = web.StreamResponse(headers={"Content-Length": "1000"})
                await answer.prepare(request)
                await answer.write(an_image())
                assert request.transport is not None
                request.transport.abort()
                return answer
            case "/silent":
                return await self._say_nothing()
            case path:
                raise AssertionError(path)

    async def _stream(
        self, request: web.Request, first: bytes, then: bytes, *, pause_seconds: float
    ) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            await answer.write(first)
            while True:
                await answer.write(then)
                await pace(pause_seconds, "the server sends at this rate")
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise

    async def _say_nothing(self) -> web.StreamResponse:
        self.silent += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        raise AssertionError


@asynccontextmanager
async def an_image_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[ImageServer]:
    """Serve on a free port of 127.0.0.1 until the context ends."""
    server = ImageServer("127.0.0.1", 0, "https" if tls else "http")
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.serve)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, server.host, 0, ssl_context=tls).start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()
