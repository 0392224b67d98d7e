"""Fixtures and pytest hooks for all tests."""

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

# Test machines are busy, so the duration of an example says nothing.
settings.register_profile("fleet", deadline=None)
settings.load_profile("fleet")

ENGINES = (
    "tests/e2e/",
    "tests/integration/workers/vllm/",
    "tests/integration/backends/external/test_real_servers",
    # These tests look for files left in /dev/shm, which engines use too.
    "tests/integration/local/test_processes",
    "tests/integration/local/test_up",
)

IMAGE_STEPS = "tests/kube/images/test_steps.py"
"""Tests that install a hundred packages each, which they keep in memory: up to 4 GB. They are the longest tests of `make kube-test`."""

ON_BOTH_LOOPS = {
    "test_http_connections.py",
    "test_relay.py",
    "test_relay_failures.py",
    "test_relay_placement.py",
    "test_openai_client.py",
    "test_grpc_frontend.py",
    "test_grpc_server.py",
    "test_client_servers.py",
    "test_client_tls.py",
    "test_frames.py",
    "test_kserve_frontend.py",
    "test_worker_stream_tls.py",
    "test_worker_streams.py",
}
"""Tests that use transports directly. Routers run on uvloop, whose transports differ from asyncio's in details."""


def _of_this_test(record: logging.LogRecord) -> bool:
    """Drop poller errors of earlier tests.

    grpc has one poller for all event loops of a process. The end of a call that an earlier test left can reach its closed loop.
    """
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_of_this_test)


class LongTestScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Distribute the test files to the processes of a run, with two exceptions.

    One process gets all tests that start large engines, in order. The tests of `IMAGE_STEPS` may each go to another process.
    """

    def _split_scope(self, nodeid: str) -> str:
        if starts_engines(nodeid):
            return "engines"
        return nodeid if nodeid.startswith(IMAGE_STEPS) else nodeid.partition("::")[0]


def starts_engines(nodeid: str) -> bool:
    return nodeid.startswith(ENGINES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip long tests unless they are asked for, and put the longest of the others first, so that no process waits for them at the end."""
    if os.environ.get("FLEET_LONG_TESTS") != "1":
        skip = pytest.mark.skip(reason="takes long: set FLEET_LONG_TESTS=1, as .ci/nightly does")
        for item in items:
            if item.get_closest_marker("long") is not None:
                item.add_marker(skip)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.nodeid.startswith((*ENGINES, IMAGE_STEPS)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lower the priority of tests beside engines, and collect garbage before tests that read the log.

    Publishing and loading have deadlines, which the engine tests check. Warnings of the collector about an earlier test
    must not reach the log of this one.
    """
    if "caplog" in getattr(item, "fixturenames", ()):
        gc.collect()
    if (
        "PYTEST_XDIST_WORKER" in os.environ
        and not starts_engines(item.nodeid)
        and os.getpriority(os.PRIO_PROCESS, 0) < 5
    ):
        os.setpriority(os.PRIO_PROCESS, 0, 5)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongTestScheduling:
    return LongTestScheduling(config, log)


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    plain = {"asyncio": asyncio.new_event_loop}
    return {**plain, "uvloop": uvloop.new_event_loop} if item.path.name in ON_BOTH_LOOPS else plain


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder without weights: a byte-level tokenizer of a few hundred tokens and a chat template."""
    return write_model(tmp_path_factory.mktemp("model"))
