"""Metrics port of a planner or a worker, served by threads of its own and not by the event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from fleet.core.errors import ConfigurationRefused
from kvstore.net.addresses import host_port
from kvstore.security.certificates import CertificateFiles
from kvstore.security.metrics_access import MetricsAccess, MetricsGuard
from kvstore.service.metrics_server import MetricsServer


@asynccontextmanager
async def metrics_port(
    listen: str, access: MetricsAccess, registry: CollectorRegistry, certificates: CertificateFiles | None = None
) -> AsyncIterator[str]:
    """Serve /metrics in threads while the context is open; yield the address of the port.

    If `listen` is empty, nothing is served, and an empty text is yielded.

    Raises:
        ConfigurationRefused: The address is malformed or cannot be bound.
    """
    if not listen:
        yield ""
        return
    try:
        host, port = host_port(listen)
        server = MetricsServer.open(host, port, registry, MetricsGuard.of(access, listen), certificates)
    except (ValueError, OSError) as error:
        raise ConfigurationRefused(f"metrics_listen: {listen}: {error}") from error
    try:
        yield f"{host}:{server.port}"
    finally:
        await asyncio.to_thread(server.close)  # `close` waits up to 0.5 s for the thread that accepts connections
