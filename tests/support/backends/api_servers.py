"""External server for tests of the relay: it answers requests on all paths, and takes uploads and WebSockets."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from msgspec import Struct

from tests.support.servers.processes import a_free_port


class SeenRequest(Struct):
    """Holds a request as the server received it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[web.Request, SeenRequest], Awaitable[web.StreamResponse]]


async def echo(_: web.Request, seen: SeenRequest) -> web.StreamResponse:
    """Answer with the body of the request, or with its target if it has no body."""
    return web.Response(body=seen.body or seen.target.encode(), content_type="application/x-echo")


class ApiServer:
    """Answers health checks and `/v1/models`, echoes WebSocket messages, and calls `play` for all other requests."""

    def __init__(self) -> None:
        self.play: Answer = echo
        self.models: list[dict[str, object]] = []
        self.seen: list[SeenRequest] = []
        self.sockets = 0  # WebSockets that are open
        self.may_join: Callable[[], bool] = lambda: True
        self.talk: Callable[[web.Request], Awaitable[web.StreamResponse]] = self._echo_messages
        self.port = a_free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ApiServer"]:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=200 if self.may_join() else 503)
        if request.method == "GET" and request.path == "/v1/models":
            return web.json_response({"object": "list", "data": self.models})
        headers = {name.lower(): value for name, value in request.headers.items()}
        if "upgrade" in headers:
            self.seen.append(SeenRequest(request.method, request.raw_path, headers, b""))
            return await self.talk(request)
        body = b"" if request.path.endswith("/unread") else await request.read()
        seen = SeenRequest(request.method, request.raw_path, headers, body)
        self.seen.append(seen)
        return await self.play(request, seen)

    async def _echo_messages(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=("realtime",))
        await socket.prepare(request)
        self.sockets += 1
        try:
            async for message in socket:
                if message.data == "close":
                    await socket.close(code=4001, message=b"as asked")
                elif isinstance(message.data, bytes):
                    await socket.send_bytes(message.data[::-1])
                else:
                    await socket.send_str(message.data.upper())
        finally:
            self.sockets -= 1
        return socket
