"""What tests of several doors of a router begin with."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fronts import Fronts, open_fronts


@pytest.fixture
async def fronts(model_dir: Path) -> AsyncIterator[Fronts]:
    """Both, over a router whose answers the test writes."""
    async with asyncio.timeout(60), open_fronts(model_dir) as fronts:
        yield fronts
