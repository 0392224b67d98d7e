"""The HTTP port of a router that runs in the process of the test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from fleet.core.ids import ModelName
from fleet.core.system_clock import SystemClock
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.generation import Generation
from fleet.frontend.openai.service import open_http_frontend
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.settings import HttpSettings
from fleet.router.server import RouterServer
from fleet.router.tenants import Tenants


@asynccontextmanager
async def an_http_port(router: RouterServer, model_dir: Path, model: str = "tiny") -> AsyncIterator[str]:
    """Serve a model of a router over HTTP, to clients without keys; yield the address as a URL."""
    clock, registry, threads = SystemClock(), CollectorRegistry(), TokenizerThreads()
    generation = Generation(
        router,
        {ModelName(model): load_codec(model_dir)},
        clock=clock,
        tenants=Tenants({}, clock.now()),
        tenant_secret=b"secret",
        metrics=RouterProcessMetrics(registry),
        threads=threads,
    )
    async with open_http_frontend("127.0.0.1:0", HttpSettings(), generation, registry, clock) as http:
        yield f"http://{http.address}"
    threads.close()
