"""Ray tasks: runs a function on each item as a task of a Ray cluster, and returns the results in order.

All nodes need the same version of Fleet; the files of the items are sent to them. Ray is an optional package; only this module
imports it.
"""

import importlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fleet.core.errors import ConfigurationRefused

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD = 4
"""Maximum number of unfinished tasks for each CPU of the cluster. The number is large enough to keep all nodes busy, and
small enough that Ray's queue does not hold thousands of tasks."""

KNOCK_SECONDS = 10.0  # time limit of one attempt to connect to the cluster

TASK_SECONDS = 6 * 3600
"""Maximum time to wait for the next result, in seconds. No simulation takes so long. So if no result has come within
this time, no node of the cluster runs tasks, and `map_on_ray` raises ConfigurationRefused."""


def map_on_ray(
    address: str,
    work: Callable[[Item, bytes], Result],
    items: Sequence[tuple[Item, Path | None]],
) -> Iterator[Result]:
    """Run a function on each item and yield the results in order.

    Args:
        address: Address of the cluster for `ray.init`: ``host:6379``, ``ray://host:10001``, ``auto``.
        work: A function of a module that nodes can import. It gets an item and the content of its file.
        items: Items with their files. For an item without a file (None), `work` gets empty content. A file of several items is sent once.

    Raises:
        ConfigurationRefused: Ray is not installed, the cluster cannot be used or fails, a file cannot be read, or the function raised
            this error.
        ray.exceptions.RayTaskError: The function raised any other error.
    """
    ray = _joined(address)
    try:
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus < 1:
            raise ConfigurationRefused(f"--ray: {address}: the cluster has no CPU to give")
        contents = _sent(ray, items)
        task = ray.remote(work).options(num_cpus=1)
        waiting: deque[Any] = deque()
        for item, file in items:
            waiting.append(task.remote(item, contents[file]))
            if len(waiting) >= AHEAD * cpus:
                yield _result(ray, waiting.popleft())
        while waiting:
            yield _result(ray, waiting.popleft())
    finally:
        ray.shutdown()  # closing the connection also ends the tasks that still run


def _joined(address: str) -> Any:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationRefused("--ray: needs the package ray: pip install 'fleet-serving[ray]'") from error
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise ConfigurationRefused(
            f"--ray: {address}: {_one_line(str(error))}: is it up, and does it want a token (RAY_AUTH_MODE=token)?"
        ) from error
    except (RuntimeError, TimeoutError, ValueError) as error:
        # the cluster runs another version of Ray or Python, or the address is not valid
        raise ConfigurationRefused(f"--ray: {address}: {_one_line(str(error))}") from error
    return ray


def _knock(address: str) -> None:
    """Raise an error if no program listens at the address, because Ray itself would wait for minutes in this case."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return  # the address is `auto`, `local` or a cluster's name, so there is no host to connect to
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigurationRefused(f"--ray: {address}: {getattr(error, 'strerror', None) or error}") from error


def _sent(ray: Any, items: Sequence[tuple[Any, Path | None]]) -> Mapping[Path | None, Any]:
    contents: dict[Path | None, Any] = {}
    for _, file in items:
        if file not in contents:
            try:
                contents[file] = ray.put(b"" if file is None else file.read_bytes())
            except OSError as error:
                raise ConfigurationRefused(f"{file}: {error.strerror}") from error
    return contents


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference, timeout=TASK_SECONDS)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigurationRefused):
            raise ConfigurationRefused(str(cause)) from error
        if isinstance(cause, ImportError):
            raise ConfigurationRefused(
                f"--ray: nodes need the same Fleet installed: {_one_line(str(cause))}"
            ) from error
        raise
    except ray.exceptions.RayError as error:
        raise ConfigurationRefused(f"--ray: the cluster failed: {_one_line(str(error))}") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())
