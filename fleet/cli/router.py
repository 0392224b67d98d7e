"""`fleet router`: lists placement policies, and shows or sets thresholds."""

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from fleet.cli.console.address import add_control, control_client, describe_control_error
from fleet.cli.console.exits import DONE, FAILED
from fleet.client import FleetError, RemotePrefill


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="router_command", required=True, metavar="COMMAND", parser_class=type(parser))
    policies = commands.add_parser(
        "policies",
        help="list the placement policies, ours and installed ones",
        description="List the placement policies, ours and installed ones.",
    )
    policies.add_argument(
        "--json", action="store_true", help="print one JSON object, with parameters and their defaults"
    )
    thresholds = commands.add_parser(
        "thresholds",
        help="show the thresholds of a running router, or set some",
        description="Show the thresholds of a running router, or set some. They apply from the next request until the router "
        "ends. The output also shows the measured break-even of remote_prefill_min_tokens: the number of tokens from "
        "which a prefill worker answers sooner.",
    )
    thresholds.add_argument("changes", nargs="*", type=_change, metavar="NAME=NUMBER", help="as in max_queued=100")
    add_control(thresholds)
    thresholds.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.router_command == "thresholds":
        return _tune(arguments)
    from fleet.router.placement.plugins import policy_catalogue  # noqa: PLC0415 - imports numpy
    from fleet.router.settings.router import RouterSettings  # noqa: PLC0415

    policies = policy_catalogue().policies
    default = RouterSettings().policy
    if arguments.json:
        print(msgspec.json.encode({"default": default, "policies": _policy_lines(policies)}).decode())
        return DONE
    width = max(map(len, policies))
    for name, kind in policies.items():
        print(f"{name:{width}}  {_summary(kind)}{' (default)' if name == default else ''}")
    return DONE


def _change(text: str) -> tuple[str, float]:
    name, separator, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = None
    if not separator or number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER")
    return name.replace("-", "_"), int(number) if number.is_integer() else number


def _tune(arguments: argparse.Namespace) -> int:
    try:
        with control_client(arguments) as client:
            in_force = client.tune(**dict(arguments.changes))
            measured = client.remote_prefill()
    except FleetError as error:
        print(f"fleet: {describe_control_error(error, arguments)}", file=sys.stderr)
        return FAILED
    if arguments.json:
        print(msgspec.json.encode({**in_force, "remote_prefill": measured}).decode())
        return DONE
    width = max(map(len, in_force))
    for name, value in in_force.items():
        print(f"{name:{width}}  {value if isinstance(value, int) else f'{value:g}'}")
    for line in break_even_lines(measured):
        print(line)
    return DONE


def break_even_lines(found: RemotePrefill) -> Iterator[str]:
    """Yield lines about the prefill break-even that the router has measured; none if the router does not report it."""
    if not found.handoffs_needed:
        return  # a router of an earlier version does not report this
    counts = "counts" if found.learned else "does not count: learn_remote_prefill is off"
    if found.handoffs < found.handoffs_needed:
        yield f"measured: {found.handoffs} hand-offs, of {found.handoffs_needed} that are needed; it {counts}"
        return
    yield f"measured: {found.handoffs} hand-offs, lately {found.handoff_ms:.3g} ms; it {counts}"
    for worker in found.workers:
        if worker.min_tokens:
            yield (
                f"  {worker.worker_id}: from {worker.min_tokens} tokens on, with {worker.requests} requests there and "
                f"{worker.token_ms:.3g} ms a token"
            )
        else:
            yield f"  {worker.worker_id}: not known yet what a token takes"


def _policy_lines(policies: Mapping[str, type[Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "summary": _summary(kind),
            "parameters": {
                field.name: None if field.default is msgspec.NODEFAULT else msgspec.to_builtins(field.default)
                for field in msgspec.structs.fields(kind)
            },
        }
        for name, kind in policies.items()
    ]


def _summary(kind: type[Any]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]
