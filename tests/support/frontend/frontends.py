"""Frontends on ports of their own, in front of a router whose answers the test writes."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct
from prometheus_client import CollectorRegistry

from fleet.core.system_clock import SystemClock
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.control.port import open_control_port
from fleet.frontend.generation import Generation
from fleet.frontend.grpc.service import GrpcFrontend
from fleet.frontend.openai.service import HttpFrontend, open_http_frontend
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.control.access import OPEN_ACCESS
from fleet.net.settings import DEFAULT_GRPC_LIMITS, GrpcSettings, HttpSettings
from fleet.router.ports import TextCodec
from fleet.router.tenants import Tenants, TenantSettings
from tests.support.builders import MODEL, token_ids
from tests.support.router.fake_router import FakeRouter


class Frontends(Struct):
    router: FakeRouter
    codec: TextCodec
    generation: Generation
    clock: SystemClock
    tenants: Tenants
    http: HttpFrontend
    grpc: GrpcFrontend
    control: str  # address

    @property
    def url(self) -> str:
        return f"http://{self.http.address}"

    def will_answer(self, text: str, *, step: int = 1, then: Sequence[int] = ()) -> list[int]:
        """Let the router answer with this text and then these tokens; return all ids."""
        self.router.answer = [*token_ids(self.codec.encode(text))[1:], *then]
        self.router.step = step
        return self.router.answer


@asynccontextmanager
async def open_frontends(
    model_dir: Path,
    tenants: Mapping[str, TenantSettings] | None = None,
    *,
    grpc_max_held_bytes: int = 1 << 30,
    grpc: GrpcSettings = DEFAULT_GRPC_LIMITS,
    health_listen: str = "",
    **settings: float,
) -> AsyncIterator[Frontends]:
    router = FakeRouter()
    codec = load_codec(model_dir)
    registry = CollectorRegistry()
    clock = SystemClock()
    known_tenants = Tenants(tenants or {}, clock.now())
    threads = TokenizerThreads()
    generation = Generation(
        router,
        {MODEL: codec},
        clock=clock,
        tenants=known_tenants,
        tenant_secret=b"secret",
        metrics=RouterProcessMetrics(registry),
        threads=threads,
    )
    limits = HttpSettings(**settings)  # type: ignore[arg-type]  # by name
    async with (
        open_http_frontend("127.0.0.1:0", limits, generation, registry, clock, health_listen=health_listen) as http,
        GrpcFrontend.open(
            "127.0.0.1:0", generation, clock, max_held_bytes=grpc_max_held_bytes, limits=grpc
        ) as grpc_front,
        open_control_port("", OPEN_ACCESS, router, grpc_front.ready, grpc_address=grpc_front.address) as control,
    ):
        yield Frontends(router, codec, generation, clock, known_tenants, http, grpc_front, control)
    threads.close()
