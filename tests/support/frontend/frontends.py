"""Frontends for tests: the frontends on free ports, in front of a fake router whose answers the test sets."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct
from prometheus_client import CollectorRegistry

from fleet.backends.hosted.overflow import open_overflow
from fleet.core.ids import ModelName
from fleet.core.system_clock import SystemClock, unix_nanoseconds, unix_seconds
from fleet.core.telemetry import RouterProcessMetrics
from fleet.frontend.access_log import AccessLog
from fleet.frontend.control.port import open_control_port
from fleet.frontend.generation import Generation, ImageLoader
from fleet.frontend.grpc.service import GrpcFrontend
from fleet.frontend.metrics.overflow import OverflowMetrics
from fleet.frontend.openai.service import HttpFrontend, MetricsGuards, open_http_frontend
from fleet.frontend.request_tracing import RequestTracing
from fleet.frontend.resume_tokens import ResumeTokens
from fleet.frontend.text.codec import load_codec
from fleet.frontend.text.tokenizer_threads import TokenizerThreads
from fleet.net.control.access import OPEN_ACCESS
from fleet.net.settings import DEFAULT_GRPC_LIMITS, GrpcSettings, HttpSettings
from fleet.recording.access_records import AccessRecordFile
from fleet.router.ports import TextCodec
from fleet.router.settings.overflow import OverflowSettings
from fleet.router.tenants import Tenants, TenantSettings
from kvstore.security.metrics_access import OPEN_METRICS
from tests.support.builders import MODEL, token_ids
from tests.support.router.fake_router import FakeRouter


class Frontends(Struct):
    router: FakeRouter
    codec: TextCodec
    generation: Generation
    threads: TokenizerThreads
    clock: SystemClock
    tenants: Tenants
    http: HttpFrontend
    grpc: GrpcFrontend
    control: str  # address
    registry: CollectorRegistry

    @property
    def url(self) -> str:
        return f"http://{self.http.address}"

    def will_answer(self, text: str, *, step: int = 1, then: Sequence[int] = ()) -> list[int]:
        """Let the router answer with the tokens of `text` and then with the tokens `then`; return all token ids."""
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
    overflow: Mapping[ModelName, OverflowSettings] | None = None,
    records: AccessRecordFile | None = None,
    metrics_guards: MetricsGuards = (OPEN_METRICS, OPEN_METRICS),
    image_loader: ImageLoader | None = None,
    tracing: RequestTracing | None = None,
    **settings: float,
) -> AsyncIterator[Frontends]:
    router = FakeRouter()
    codec = load_codec(model_dir, model_defaults=True)
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
        resume_tokens=ResumeTokens(b"secret", 60, unix_seconds),
        kept_answers=router,
        access=None if records is None else AccessLog(router, clock, unix_nanoseconds, logs=False, records=records),
        tracing=tracing,
        image_loader=image_loader,
    )
    limits = HttpSettings(**settings)  # type: ignore[arg-type]  # by name
    async with (
        open_overflow(
            overflow or {},
            known_tenants,
            clock,
            unix_seconds,
            connect_timeout_seconds=20.0,
            explained_requests=100,
            sampling_defaults={MODEL: codec.sampling_defaults},
        ) as hosted,
        open_http_frontend(
            "127.0.0.1:0",
            limits,
            generation,
            registry,
            clock,
            health_listen=health_listen,
            overflow=hosted if overflow else None,
            metrics_guards=metrics_guards,
        ) as http,
        GrpcFrontend.open(
            "127.0.0.1:0", generation, clock, max_held_bytes=grpc_max_held_bytes, limits=grpc
        ) as grpc_front,
        open_control_port(
            "", OPEN_ACCESS, router, grpc_front.ready, grpc_address=grpc_front.address, overflow=hosted
        ) as control,
    ):
        registry.register(OverflowMetrics(hosted))
        yield Frontends(router, codec, generation, threads, clock, known_tenants, http, grpc_front, control, registry)
    threads.close()
