"""`fleet plan` and `fleet plan watch`: show what a running planner decides now, and the reasons."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import msgspec

from fleet.cli.console.address import router_address
from fleet.cli.console.exits import DONE, FAILED
from fleet.core.errors import ConfigurationRefused
from fleet.core.system_clock import unix_milliseconds
from fleet.local.planner import PLANNER_SOCKET
from fleet.local.runs import local_plans
from fleet.net.control.access import load_control_access
from fleet.planner.control.service import default_address
from fleet.planner.records import PlannerStatus, PlanRecord
from fleet.planner.settings import PlannerMode
from fleet.v1 import planner_pb2 as pb
from fleet.v1 import planner_pb2_grpc
from kvstore.net.addresses import unix_path
from kvstore.protocol.range_messages import agree_with_server, range_message
from kvstore.protocol.versions import NoCommonProtocol
from kvstore.security.credentials import Credentials

CALL_SECONDS = 10.0
SHOWN_PLANS = 5
SCORE_LATE_MS = 60_000
"""Time after which a score that was due counts as lost: a planner writes it at its next decision, and clocks may differ."""


def configure(parser: argparse.ArgumentParser, *, repeated: bool = False) -> None:
    """Add the options of the command.

    If `repeated` is true, the parent command has the same options, and an option that is not given here keeps the value
    from there. Without that, argparse would replace this value by the default.
    """
    missing = argparse.SUPPRESS if repeated else False
    parser.add_argument("--json", action="store_true", default=missing, help="print JSON instead of lines for people")
    add_planner(parser, repeated=repeated)


def add_planner(parser: argparse.ArgumentParser, *, repeated: bool = False) -> None:
    """Add the options for the address of a planner; `repeated` has the same meaning as in `configure`."""
    missing = argparse.SUPPRESS if repeated else ""
    parser.add_argument(
        "--planner",
        type=router_address,
        default=argparse.SUPPRESS if repeated else None,
        metavar="HOST:PORT",
        help="the planner's control address, or unix:/path (default: that of this user's planner on this machine)",
    )
    files = {
        "secret-file": "file with the secret of the planner's control port",
        "authority": "certificates (PEM) that verify it",
        "certificate": "certificate (PEM) for it",
        "key": "private key (PEM) of that certificate",
    }
    for name, text in files.items():
        parser.add_argument(f"--planner-{name}", default=missing, metavar="FILE", help=text)
    parser.add_argument(
        "--deployment",
        default=missing,
        metavar="NAMESPACE/NAME",
        help="the DisaggDeployment, if the planner of a cluster plans several",
    )


def show(arguments: argparse.Namespace) -> int:
    """Show the present state of the planner."""
    try:
        with planner(arguments) as stub:
            status = _status(stub.ShowPlan(_asked(arguments), timeout=CALL_SECONDS))
    except grpc.RpcError as error:
        return _failed(error, arguments)
    print(msgspec.json.encode(status).decode() if arguments.json else "\n".join(status_lines(status)))
    return DONE


def watch(arguments: argparse.Namespace) -> int:
    """Show the state of the planner whenever it has changed, until Ctrl-C."""
    last_state: Any = None
    try:
        with planner(arguments) as stub, suppress(KeyboardInterrupt):
            for document in stub.WatchPlan(_asked(arguments)):
                status = _status(document)
                states = tuple((each.id, each.state) for each in status.plans[:SHOWN_PLANS])
                state = (status.leads, status.reason, status.replicas, status.conditions, status.pools, states)
                if state == last_state:
                    continue
                last_state = state
                if arguments.json:
                    print(msgspec.json.encode(status).decode(), flush=True)
                else:
                    print("\n".join((*status_lines(status), "")), flush=True)
    except grpc.RpcError as error:
        return _failed(error, arguments)
    return DONE


def explain(arguments: argparse.Namespace) -> int:
    """Show one plan: its reason, its predicted effects, and its outcome."""
    try:
        with planner(arguments) as stub:
            asked = pb.ExplainPlanRequest(plan_id=arguments.plan, deployment=arguments.deployment)
            document = stub.ExplainPlan(asked, timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        return _failed(error, arguments)
    record = msgspec.json.decode(document.json, type=PlanRecord)
    print(
        msgspec.json.encode(record).decode() if arguments.json else "\n".join(record_lines(record, unix_milliseconds()))
    )
    return DONE


@contextmanager
def planner(arguments: argparse.Namespace) -> Iterator[Any]:
    """Yield a gRPC stub for the planner that the options name.

    Raises:
        ConfigurationRefused: A credentials file cannot be used; only one of `--planner-certificate` and `--planner-key` is
            given; or `--planner` is not given, and none or several planners of this user run on this machine.
    """
    names = ("secret_file", "authority", "certificate", "key")
    try:
        credentials = Credentials(**{name: getattr(arguments, f"planner_{name}") for name in names})
    except ValueError as error:
        raise ConfigurationRefused("--planner-key: --planner-certificate and --planner-key go together") from error
    arguments.planner = arguments.planner or _only_planner()
    try:
        access = load_control_access("--planner", credentials)
    except ConfigurationRefused as error:  # it names a field of the credentials, such as --planner.secret_file
        message = str(error).replace("--planner.secret_file", "--planner-secret-file")
        raise ConfigurationRefused(message.replace("--planner.", "--planner-")) from error
    with access.channel(arguments.planner) as channel:
        yield planner_pb2_grpc.PlannerStub(channel)


def _asked(arguments: argparse.Namespace) -> pb.ShowPlanRequest:
    return pb.ShowPlanRequest(deployment=arguments.deployment, protocols=range_message())


def _only_planner() -> str:
    sockets = [plans.parent / PLANNER_SOCKET for plans in local_plans()]
    found = [f"unix:{path}" for path in sockets if path.is_socket()]
    if Path(unix_path(default_address())).is_socket():
        found.append(default_address())
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationRefused(f"several planners run on this machine: --planner names one of {', '.join(found)}")
    raise ConfigurationRefused(
        "no planner of this user runs on this machine: a section [planner] of fleet up, or fleet serve planner, starts one;"
        " --planner names one elsewhere"
    )


def _failed(error: grpc.RpcError, arguments: argparse.Namespace) -> int:
    call: Any = error
    said = {
        grpc.StatusCode.UNAVAILABLE: "no planner answers there now: it has ended, or is starting again; try again, or look into its log",
        grpc.StatusCode.DEADLINE_EXCEEDED: f"the planner has not answered within {CALL_SECONDS:g} s; try again",
        grpc.StatusCode.UNIMPLEMENTED: "what answers there is no planner; --planner names the control address of one",
    }.get(call.code(), call.details())
    print(f"fleet: {arguments.planner}: {said}", file=sys.stderr)
    return FAILED


def _status(document: pb.PlannerDocument) -> PlannerStatus:
    """Decode a planner's state.

    Raises ConfigurationRefused if planner and command have no protocol version in common.
    """
    try:
        agree_with_server(document, "the planner")
    except NoCommonProtocol as error:
        raise ConfigurationRefused(f"--planner: {error}") from error
    return msgspec.json.decode(document.json, type=PlannerStatus)


def status_lines(status: PlannerStatus) -> Iterator[str]:
    leads = "leads" if status.leads else "another planner leads"
    yield f"{status.model}  planner {status.planner}  mode {status.mode}  rule {status.rule}  {leads}"
    if status.reason is None:
        yield "no decision yet" + (f": {status.message}" if status.message else "")
    else:
        yield f"{status.reason.replace('_', ' ')}: {status.message}"
    for condition in status.conditions:
        yield f"condition {condition.type} ({condition.field}): {condition.message}"
    for pool in status.pools:
        draining = f"  draining {pool.draining}" if pool.draining else ""
        pinned = f"  {pool.pinned}" if pool.pinned else ""
        planned = status.replicas.get(pool.name, pool.wanted)
        yield f"  {pool.name:12} wanted {pool.wanted}  ready {pool.ready}{draining}  planned {planned}{pinned}"
    known = {name: value for name, value in status.demand.items() if value is not None}
    if known:
        yield "demand   " + "  ".join(f"{name} {value:.4g}" for name, value in known.items())
    if status.numbers:
        yield "numbers  " + "  ".join(f"{name} {value:.4g}" for name, value in status.numbers.items())
    if status.overflow.get("requests"):
        hosted = status.overflow
        yield f"overflow  {hosted['requests']:.0f} requests for ${hosted['dollars']:.4f} since this planner started"
    if status.error is not None:
        errors = ", ".join(f"{name.upper()} {error:.0%}" for name, error in status.errors.items())
        yield f"error of rehearsals  {errors}"
    for record in status.plans[:SHOWN_PLANS]:
        yield f"plan {record.id}  {record.state.replace('_', ' ')}  {_sizes(record)}  {record.reason.replace('_', ' ')}"


def record_lines(record: PlanRecord, now_ms: int) -> Iterator[str]:
    """Yield the lines that show a plan to a person; `now_ms` is the present time in milliseconds since 1970."""
    at = datetime.fromtimestamp(record.at_ms / 1000, UTC).isoformat(timespec="seconds")
    yield f"plan {record.id}  {at}  by {record.planner}  mode {record.mode}"
    yield f"{record.reason.replace('_', ' ')}: {record.message}"
    yield f"sizes  {_sizes(record)}"
    for name, value in record.numbers.items():
        yield f"  {name:28} {value:.6g}"
    for condition in record.conditions:
        yield f"condition {condition.type} ({condition.field}): {condition.message}"
    if record.rehearsal is not None:
        tried = record.rehearsal
        yield f"rehearsed with {tried.requests} requests in {tried.seconds:.1f} s"
        for name, expected in (("present", tried.present), ("planned", tried.planned)):
            refused = f"  refused {expected.refused:.1%}" if expected.refused else ""
            yield (
                f"  {name:8} TTFT {expected.ttft_seconds:.3f} s  TPOT {expected.tpot_seconds:.4f} s"
                f"  attainment {expected.attainment:.1%}{refused}  GPU-hours/h {expected.gpu_hours:g}  $/h {expected.dollars:.2f}"
            )
    elif record.rehearsal_skipped:
        yield f"not rehearsed: {record.rehearsal_skipped}"
    lasted = f" after {(record.ended_ms - record.at_ms) / 1000:.1f} s" if record.ended_ms else ""
    yield f"{record.state.replace('_', ' ')}{lasted}" + (f": {record.detail}" if record.detail else "")
    if record.score is None:
        yield _no_score(record, now_ms)
    else:
        score = record.score
        parts = {
            "TTFT": (score.ttft_seconds, score.ttft_error, "no answer began"),
            "TPOT": (score.tpot_seconds, score.tpot_error, "no answer of several tokens ended"),
        }
        pools = "present pools, because plans are not applied in shadow mode"
        whose = pools if record.mode is PlannerMode.SHADOW else "planned pools"
        if score.ttft_error is not None or score.tpot_error is not None:
            yield f"  compared with the prediction for the {whose}; errors are shares of the longer time"
        for name, (seconds, error, missing) in parts.items():
            if seconds is None:
                yield f"  {name} was not measured: {missing}"
            else:
                wrong = "" if error is None else f", {error:.0%} off the prediction"
                yield f"  {name} was {seconds:.4f} s{wrong}"
        if score.attainment is not None:
            yield f"  attainment was {score.attainment:.1%}"
        hosted = f" and {score.overflow_dollars:.2f} for overflow" if score.overflow_dollars else ""
        yield f"  GPU-hours/h {score.gpu_hours:g}  $/h {score.dollars:.2f}{hosted}"


def _no_score(record: PlanRecord, now_ms: int) -> str:
    """Return why a plan has no score."""
    if not record.ended_ms:
        return "no score yet: it is measured after the end of the plan"
    if record.score_due_ms + SCORE_LATE_MS > now_ms:
        until = datetime.fromtimestamp(record.score_due_ms / 1000, UTC).isoformat(timespec="seconds")
        return f"no score yet: latencies and costs are measured until {until}"
    if record.score_due_ms:
        return "no score: the planner ended, or too many later plans ended, while it was measured"
    return "no score: only plans that settled, and those of shadow mode, are scored"


def _sizes(record: PlanRecord) -> str:
    return ", ".join(f"{name} {record.before.get(name, '?')} to {count}" for name, count in record.replicas.items())
