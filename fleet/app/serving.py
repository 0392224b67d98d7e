"""Composition roots: one module for each process, and only these know everything.

Each announces its endpoints when it is ready, serves until it is asked to stop (SIGTERM, SIGINT), drains, and returns.
"""

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import uvloop

from fleet.app.kvstore import run_kvstore
from fleet.app.operator import run_operator
from fleet.app.process import Announce
from fleet.app.router import run_router
from fleet.app.worker import run_worker
from fleet.config import load
from fleet.core.errors import ConfigurationRefused
from fleet.core.telemetry import configure_logging
from fleet.router.settings.router import RouterSettings
from kvstore.errors import NodeEnded
from kvstore.service.settings import StoreSettings
from operators.settings import OperatorSettings
from workers.ports import EngineDied, WorkerReplaced
from workers.settings import WorkerSettings

ServiceName = str
"""router, worker, kvstore or operator"""


def serve(part: ServiceName, config: Path, announce: Announce, changes: Mapping[str, Any] | None = None) -> None:
    """Run one process of a cluster until it is asked to stop.

    Args:
        part: Which.
        config: Its settings.
        announce: Told when it is ready.
        changes: Settings in place of the file's, by path.

    Raises:
        ConfigurationRefused: The settings cannot be obeyed; nothing is left running.
        EngineDied: The engine of a worker ended by itself.
        NodeEnded: The store node in a worker's process did.
        WorkerReplaced: Another process has a worker's id.
    """
    running = _SERVICES[part](config, announce, changes)
    configure_logging()
    try:
        uvloop.run(running)
    except BaseExceptionGroup as group:
        raise _expected_error(group) from group


def _expected_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a task group wrapped, where it is one of the expected ends of a process; else the group."""
    expected = group.subgroup((ConfigurationRefused, EngineDied, NodeEnded, WorkerReplaced))
    while expected is not None:
        first = expected.exceptions[0]
        if not isinstance(first, BaseExceptionGroup):
            return first
        expected = first
    return group


_SERVICES: Mapping[ServiceName, Callable[[Path, Announce, Mapping[str, Any] | None], Coroutine[Any, Any, None]]] = {
    "router": lambda config, announce, changes: run_router(load(config, RouterSettings, changes), announce),
    "worker": lambda config, announce, changes: run_worker(load(config, WorkerSettings, changes), announce),
    "kvstore": lambda config, announce, changes: run_kvstore(load(config, StoreSettings, changes), announce),
    "operator": lambda config, announce, changes: run_operator(load(config, OperatorSettings, changes), announce),
}
