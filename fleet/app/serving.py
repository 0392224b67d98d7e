"""Service start: finds a service, which is one kind of process, by the entry points `fleet.services`, and runs it.

Each service announces its endpoints when it is ready, serves until SIGTERM or SIGINT, drains, and returns.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import uvloop

from fleet.app.process import Announce, ServiceDefinition
from fleet.config import load
from fleet.core.errors import ConfigurationRefused
from fleet.core.telemetry import configure_logging
from kvstore.errors import NodeEnded
from workers.ports import EngineDied, WorkerReplaced

OWN_SERVICES = ("router", "worker", "kvstore", "operator", "planner")


def serve(name: str, config: Path, announce: Announce, changes: Mapping[str, Any] | None = None) -> None:
    """Run one process of a cluster until a stop signal.

    Args:
        name: Name of the service: one of `OWN_SERVICES`, or of the entry points `fleet.services`.
        config: The settings file of the process.
        announce: Function that is called when the process is ready.
        changes: Values that replace values of the settings file, by the path of their key, such as `http.max_connections`.

    Raises:
        ConfigurationRefused: The settings cannot be used; no process is left running.
        EngineDied: The engine of a worker ended by itself.
        NodeEnded: The store node in a worker's process ended by itself.
        WorkerReplaced: Another process has the worker's id.
    """
    service = _service(name)
    running = service.run(load(config, service.settings, changes), announce)
    configure_logging()
    try:
        uvloop.run(running)
    except BaseExceptionGroup as group:
        raise _expected_error(group) from group


def _service(name: str) -> ServiceDefinition:
    found = {entry.name: entry for entry in entry_points(group="fleet.services")}
    own = {each: EntryPoint(each, f"fleet.app.{each}:SERVICE", "fleet.services") for each in OWN_SERVICES}
    service: ServiceDefinition = (own | found)[name].load()
    return service


def _expected_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first expected error in an exception group; if it has none, return the group itself."""
    expected = group.subgroup((ConfigurationRefused, EngineDied, NodeEnded, WorkerReplaced))
    while expected is not None:
        first = expected.exceptions[0]
        if not isinstance(first, BaseExceptionGroup):
            return first
        expected = first
    return group
