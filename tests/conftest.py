"""Fixtures of more than one package's tests."""

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.frontend.text_model import write_model

# How long an example takes says how busy the machine is, and nothing else.
settings.register_profile("fleet", deadline=None)
settings.load_profile("fleet")

ENGINES = (
    "tests/e2e/",
    "tests/integration/workers/vllm/",
    "tests/integration/backends/external/test_real_servers",
    # They look for what is left in /dev/shm, which engines use.
    "tests/integration/local/test_processes",
    "tests/integration/local/test_up",
)

ON_BOTH_LOOPS = {
    "test_http_connections.py",
    "test_relay.py",
    "test_relay_failures.py",
    "test_relay_placement.py",
    "test_openai_client.py",
    "test_grpc_frontend.py",
    "test_grpc_server.py",
    "test_frames.py",
    "test_kserve_frontend.py",
    "test_worker_stream_tls.py",
    "test_worker_streams.py",
}
"""Tests of what talks to transports directly: routers run on uvloop, whose transports differ in small things."""


def _of_this_test(record: logging.LogRecord) -> bool:
    """grpc has one poller for all loops of a process: the end of a call that an earlier test left reaches it when that loop is closed."""
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_of_this_test)


class EngineTestScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """With two processes (`make test`), one takes all that starts engines as large as vLLM, in order; the rest fills the other."""

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if starts_engines(nodeid) else nodeid.partition("::")[0]


def starts_engines(nodeid: str) -> bool:
    return nodeid.startswith(ENGINES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines first, since they take longest."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not starts_engines(item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What runs beside engines leaves them the processor: publishing and loading have deadlines that tests hold them to. And who looks
    at the log does not find there what an earlier test has left for the collector to say."""
    if "caplog" in getattr(item, "fixturenames", ()):
        gc.collect()
    if (
        "PYTEST_XDIST_WORKER" in os.environ
        and not starts_engines(item.nodeid)
        and os.getpriority(os.PRIO_PROCESS, 0) < 5
    ):
        os.setpriority(os.PRIO_PROCESS, 0, 5)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> EngineTestScheduling:
    return EngineTestScheduling(config, log)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    plain = {"asyncio": asyncio.new_event_loop}
    return {**plain, "uvloop": uvloop.new_event_loop} if item.path.name in ON_BOTH_LOOPS else plain


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: a byte-level tokenizer of a few hundred tokens, and a chat template."""
    return write_model(tmp_path_factory.mktemp("model"))
