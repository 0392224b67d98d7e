"""`fleet serve`: runs one process of a cluster, such as a router or a worker.

A supervisor, a container or a person starts it.
"""

import argparse
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fleet.cli.console.exits import DONE, FAILED, HUNG, REPLACED
from fleet.config import parse_changes, read_file_changes
from fleet.core.errors import ConfigurationRefused
from fleet.local.process_group import die_with_parent

PARTS = ("router", "worker", "kvstore", "operator", "planner")
MAX_PROCESSES = 64
# Minimum number of open files that the operating system must allow to this process; an idle router opens about 30.
MIN_OPEN_FILES = 64


def configure(parser: argparse.ArgumentParser) -> None:
    others = sorted(entry_points(group="fleet.services").names - set(PARTS))
    parser.add_argument("part", choices=(*PARTS, *others))
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="TOML or JSON: the settings of the part"
    )
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="file descriptor for one line of JSON, the endpoints, when ready"
    )
    parser.add_argument(
        "--heartbeat",
        action="store_true",
        help="write the phases of the start there before, as lines after #, and then heartbeats from the event loop",
    )
    parser.add_argument(
        "--processes",
        type=_count,
        default=1,
        metavar="N",
        help="router only: number of processes behind the same ports (default: 1)",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="router only: record events and decisions there, for `fleet sim replay`",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change a setting, such as worker_id=$(POD_NAME)",
    )
    parser.add_argument(
        "--set-file",
        action="append",
        default=[],
        metavar="PATH=FILE",
        help="change a setting to the content of a file; a .json file is parsed",
    )
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, the parent, does")


def run(arguments: argparse.Namespace) -> int:
    if arguments.record is not None and arguments.part != "router":
        raise ConfigurationRefused(f"--record: only a router can record, not a {arguments.part}")
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    # Until the service installs its own handlers, SIGTERM ends the process at once, and Ctrl-C raises KeyboardInterrupt. Children of a
    # supervisor never get Ctrl-C, because each has a session of its own.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if arguments.ready_fd is not None:
        try:
            # without this, an engine process would inherit the file descriptor, and keep it open after the end of this process
            os.set_inheritable(arguments.ready_fd, False)
        except OSError as error:
            raise ConfigurationRefused(f"--ready-fd: {arguments.ready_fd}: {error.strerror}") from error
    elif arguments.heartbeat:
        raise ConfigurationRefused("--heartbeat: needs --ready-fd, where it is written")

    _require_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    # Raise a router's limit of open files. A stream of a client needs two open files, so with the usual limit of 1024, many
    # streams would leave none for connections to workers.
    if arguments.part == "router":
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.processes > 1:
        return _serve_routers(arguments)
    from fleet.app.serving import serve  # noqa: PLC0415 - takes a second, so after `die_with_parent`
    from kvstore.errors import NodeEnded  # noqa: PLC0415
    from workers.ports import EngineDied, EngineHung, WorkerReplaced  # noqa: PLC0415
    from workers.start_phase import telling_phases  # noqa: PLC0415

    try:
        with telling_phases(partial(_write_phase, arguments.ready_fd)) if arguments.heartbeat else nullcontext():
            serve(arguments.part, arguments.config, _announcer(arguments), _changes(arguments))
    except (EngineDied, NodeEnded) as error:
        print(f"fleet: {type(error).__name__}: {error}", file=sys.stderr)
        return HUNG if isinstance(error, EngineHung) else FAILED
    except WorkerReplaced as error:
        print(f"fleet: {type(error).__name__}: {error}", file=sys.stderr)
        return REPLACED
    return DONE


def _require_open_files(limit: int) -> None:
    """Raise an error if the limit of open files is so low that event loops and gRPC would fail during the start."""
    if limit < MIN_OPEN_FILES:
        raise ConfigurationRefused(
            f"the limit of open files is {limit}, too low for any service: raise it to {MIN_OPEN_FILES} at least (ulimit -n)"
        )


def _serve_routers(arguments: argparse.Namespace) -> int:
    """Run several router processes behind the same ports, until a signal stops them."""
    import asyncio  # noqa: PLC0415 - needed only here

    from fleet.cli.local.cluster import hold, say  # noqa: PLC0415
    from fleet.config import child_environment, load  # noqa: PLC0415
    from fleet.core.system_clock import SystemClock  # noqa: PLC0415
    from fleet.local.control_relay import open_control_relay  # noqa: PLC0415
    from fleet.local.processes import ClusterFailed, LocalProcesses  # noqa: PLC0415
    from fleet.local.router_processes import plan_routers  # noqa: PLC0415
    from fleet.local.runs import runtime_folder  # noqa: PLC0415
    from fleet.router.settings.router import RouterSettings  # noqa: PLC0415

    if arguments.part != "router":
        raise ConfigurationRefused(f"--processes: a {arguments.part} is one process; start it several times instead")
    settings = load(arguments.config, RouterSettings, _changes(arguments))
    announce = _announcer(arguments)
    if settings.counts_limits_without_redis:
        say(
            f"tenants' limits hold for these {arguments.processes} processes together; each router elsewhere counts for itself, unless "
            "tenants_redis names a Redis for all"
        )
    try:
        with runtime_folder() as folder:
            planned = plan_routers(settings, arguments.processes, folder)
            processes = LocalProcesses(
                planned.processes,
                folder=folder,
                logs=folder,
                environment=child_environment(),
                clock=SystemClock(),
                say=say,
            )

            async def stay() -> None:
                others = {"health": planned.health, "kserve": planned.kserve, "endpoint_picker": planned.picker}
                asked_for = {name: address for name, address in others.items() if address}
                async with (
                    open_control_relay(planned.control, planned.control_sockets)
                    if planned.control_sockets
                    else nullcontext()
                ):
                    announce({"http": planned.http, "grpc": planned.grpc, "control": planned.control, **asked_for})
                    await asyncio.Event().wait()

            asyncio.run(hold(processes, stay))
    except ClusterFailed as error:
        say(str(error))
        return FAILED
    return DONE


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the changes of settings that the options demand."""
    changes = parse_changes(arguments.set) | read_file_changes(arguments.set_file)
    return changes if arguments.record is None else changes | {"record": str(arguments.record.absolute())}


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_PROCESSES}")
    return int(text)


def _write_phase(ready_fd: int, phase: str) -> None:
    with suppress(OSError):  # the supervisor has ended; the kernel then ends this process
        os.write(ready_fd, f"# {phase}\n".encode())


def _announcer(arguments: argparse.Namespace) -> Callable[[Mapping[str, str]], None]:
    """Return the function that reports readiness to the supervisor, or to a person if there is no supervisor.

    With `--heartbeat`, this function also begins the heartbeats.
    """
    ready_fd: int | None = arguments.ready_fd

    def announce(endpoints: Mapping[str, str]) -> None:
        line = json.dumps(dict(endpoints)) + "\n"
        if ready_fd is None:
            print(line, end="", flush=True)
        else:
            os.write(ready_fd, line.encode())
            if arguments.heartbeat:
                from fleet.local.heartbeat import send_heartbeats  # noqa: PLC0415 - slow, so after `die_with_parent`

                send_heartbeats(ready_fd)
            else:
                os.close(ready_fd)

    return announce
