"""What tests of several doors of a router begin with."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fronts import Fronts, open_fronts


@pytest.fixture
async def fronts(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[Fronts]:
    """Both, over a router whose answers the test writes; with settings, where the test is parametrized with them."""
    async with asyncio.timeout(100), open_fronts(model_dir, **getattr(request, "param", {})) as fronts:
        yield fronts
