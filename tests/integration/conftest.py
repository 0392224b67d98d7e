"""What tests of several doors of a router begin with."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.frontend.frontends import Frontends, open_frontends


@pytest.fixture
async def frontends(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[Frontends]:
    """Both, over a router whose answers the test writes; with settings, where the test is parametrized with them."""
    async with asyncio.timeout(100), open_frontends(model_dir, **getattr(request, "param", {})) as frontends:
        yield frontends


@pytest.fixture(autouse=True)
def patient_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process do not take a store node that the machine keeps waiting for one that is away."""
    for module in ("workers.store.client_thread", "workers.engines.simulated.store"):
        monkeypatch.setattr(f"{module}.CONNECT_SECONDS", 60.0)
