"""Health server of the operator: /healthz, /readyz and /metrics. It accepts no commands."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

STOP_SECONDS = 2.0


@asynccontextmanager
async def open_health_server(
    host: str,
    port: int,
    unread: Callable[[], Sequence[str]],
    lost: Callable[[], Sequence[str]],
    registry: CollectorRegistry,
) -> AsyncIterator[str]:
    """Answer requests while the context is open.

    Args:
        host: The host to listen at.
        port: The port; 0: any.
        unread: The kinds that have not been read yet. Standbys read them too, so they are ready.
        lost: These, and kinds that cannot be followed now, because the server or the kind is missing.
        registry: The metrics of /metrics.

    Yields:
        The bound address, host:port.

    Raises:
        OSError: The address is in use.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if not (what := ", ".join(lost())):
            return web.Response(text="ok\n")
        if not_yet := ", ".join(unread()):
            return web.Response(status=503, text=f"not read from the API server yet: {not_yet}\n")
        return web.Response(status=503, text=f"cannot be followed at the API server now: {what}\n")

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    application = web.Application(client_max_size=1024)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0]
        yield f"{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
