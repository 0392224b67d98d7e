"""`fleet serve`: one process of a cluster, as supervisors of every kind start it."""

import argparse
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fleet.cli.console.exits import DONE, FAILED, HUNG, REPLACED
from fleet.config import parse_changes, read_file_changes
from fleet.core.errors import ConfigurationRefused
from fleet.local.process_group import die_with_parent

PARTS = ("router", "worker", "kvstore", "operator")
MAX_PROCESSES = 64


def configure(parser: argparse.ArgumentParser) -> None:
    others = sorted(entry_points(group="fleet.services").names - set(PARTS))
    parser.add_argument("part", choices=(*PARTS, *others))
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="TOML or JSON: the settings of the part"
    )
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="write one line of JSON, the endpoints, there when ready"
    )
    parser.add_argument(
        "--heartbeat",
        action="store_true",
        help="go on writing there, twice a second, for as long as the event loop turns",
    )
    parser.add_argument(
        "--processes",
        type=_count,
        default=1,
        metavar="N",
        help="of a router: so many, behind the same ports (default: 1)",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="of a router: write down what it hears and decides, for `fleet sim replay`",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, as in worker_id=$(POD_NAME)"
    )
    parser.add_argument(
        "--set-file",
        action="append",
        default=[],
        metavar="PATH=FILE",
        help="likewise, with what is in a file; of a .json file, with what that says",
    )
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process, the parent, does")


def run(arguments: argparse.Namespace) -> int:
    if arguments.record is not None and arguments.part != "router":
        raise ConfigurationRefused(f"--record: a {arguments.part} records nothing; only a router does")
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    # Until the part listens for it, a request to end ends the process at once; Ctrl-C is the supervisor's to handle.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if arguments.ready_fd is not None:
        try:
            os.set_inheritable(arguments.ready_fd, False)  # or an engine process would keep it open when this one dies
        except OSError as error:
            raise ConfigurationRefused(f"--ready-fd: {arguments.ready_fd}: {error.strerror}") from error
    elif arguments.heartbeat:
        raise ConfigurationRefused("--heartbeat: needs --ready-fd, where it is written")

    if arguments.part == "router":  # two a stream: the usual 1024 are 500 streams, and then no worker can be reached
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.processes > 1:
        return _serve_routers(arguments)
    from fleet.app.serving import serve  # noqa: PLC0415 - after the parent's death would be noticed, because it takes a second
    from kvstore.errors import NodeEnded  # noqa: PLC0415
    from workers.ports import EngineDied, EngineHung, WorkerReplaced  # noqa: PLC0415

    try:
        serve(arguments.part, arguments.config, _announcer(arguments), _changes(arguments))
    except (EngineDied, NodeEnded) as error:
        print(f"fleet: {type(error).__name__}: {error}", file=sys.stderr)
        return HUNG if isinstance(error, EngineHung) else FAILED
    except WorkerReplaced as error:
        print(f"fleet: {type(error).__name__}: {error}", file=sys.stderr)
        return REPLACED
    return DONE


def _serve_routers(arguments: argparse.Namespace) -> int:
    """Several routers behind the same ports, until a signal asks to stop."""
    import asyncio  # noqa: PLC0415 - for this alone

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
    """What options say in place of the settings file."""
    changes = parse_changes(arguments.set) | read_file_changes(arguments.set_file)
    return changes if arguments.record is None else changes | {"record": str(arguments.record.absolute())}


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MAX_PROCESSES}")
    return int(text)


def _announcer(arguments: argparse.Namespace) -> Callable[[Mapping[str, str]], None]:
    """Tells the supervisor, or else a person; called by what runs in an event loop."""
    ready_fd: int | None = arguments.ready_fd

    def announce(endpoints: Mapping[str, str]) -> None:
        line = json.dumps(dict(endpoints)) + "\n"
        if ready_fd is None:
            print(line, end="", flush=True)
        else:
            os.write(ready_fd, line.encode())
            if arguments.heartbeat:
                from fleet.local.heartbeat import send_heartbeats  # noqa: PLC0415 - after the parent's death would be noticed

                send_heartbeats(ready_fd)
            else:
                os.close(ready_fd)

    return announce
