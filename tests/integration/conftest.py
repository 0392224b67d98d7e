"""Fixtures of several integration tests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs

from fleet.net.settings import GrpcLibrary, GrpcSettings
from tests.support.frontend.frontends import Frontends, open_frontends


@pytest.fixture
def grpc_library() -> GrpcLibrary:
    """Return the library that serves gRPC; the files that test its ports override this, to run on both libraries."""
    return GrpcLibrary.NGH2


@pytest.fixture
async def frontends(
    request: pytest.FixtureRequest, model_dir: Path, grpc_library: GrpcLibrary
) -> AsyncIterator[Frontends]:
    """Open both frontends in front of a router whose answers the test writes; parameters of the fixture are settings."""
    settings = dict(getattr(request, "param", {}))
    settings["grpc"] = structs.replace(settings.get("grpc", GrpcSettings()), library=grpc_library)
    async with asyncio.timeout(100), open_frontends(model_dir, **settings) as frontends:
        yield frontends


@pytest.fixture(autouse=True)
def patient_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engines of this process wait long for their store node, because the machine may be busy."""
    for module in ("workers.store.client_thread", "workers.engines.simulated.store"):
        monkeypatch.setattr(f"{module}.CONNECT_SECONDS", 60.0)
