"""Health server of the operator and the planner: answers /healthz, /readyz and /metrics over HTTP or HTTPS.

It has no endpoint that changes anything.
"""

import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kvstore.security.certificates import CertificateFiles, RenewedContext
from kvstore.security.metrics_access import CHALLENGE, MetricsGuard
from kvstore.service.metrics_server import metrics_port_context

STOP_SECONDS = 2.0


@asynccontextmanager
async def open_health_server(
    host: str,
    port: int,
    unread: Callable[[], Sequence[str]],
    lost: Callable[[], Sequence[str]],
    registry: CollectorRegistry,
    guard: MetricsGuard,
    certificates: CertificateFiles | None = None,
) -> AsyncIterator[str]:
    """Serve health and metrics while the context is open.

    Args:
        host: The host to listen at.
        port: The port; 0 means any free port.
        unread: Returns the kinds whose objects have not been read yet from the API server. A process that does not lead
            reads all objects too, so it also becomes ready.
        lost: Returns the unread kinds, and the kinds whose changes cannot be watched now, because the API server is not
            reachable or does not have the kind. The process is ready when this list is empty.
        registry: The metrics that /metrics shows.
        guard: Decides who may read the metrics.
        certificates: The certificate files of a port that speaks TLS; None if it does not.

    Yields:
        The bound address, host:port.

    Raises:
        OSError: The address cannot be listened on, for example because it is in use.
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
        if refusal := guard.refusal(request.headers.get("Authorization", "")):
            return web.Response(status=401, text=f"{refusal}\n", headers=dict([CHALLENGE]))
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    application = web.Application(client_max_size=1024)
    application.router.add_get("/healthz", healthz)
    application.router.add_get("/readyz", readyz)
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    tls = None if certificates is None else _renewed(certificates)
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        bound = runner.addresses[0]
        yield f"{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()


def _renewed(certificates: CertificateFiles) -> ssl.SSLContext:
    """Return a TLS context for listening.

    Each new connection gets the certificate that is in use at that time, so that a renewed certificate needs no
    restart.
    """
    renewed = RenewedContext(certificates, metrics_port_context)
    context = renewed.built()

    def use_present(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = renewed.current

    # OpenSSL calls this callback at each handshake, even if the client names no host.
    context.sni_callback = use_present
    return context
