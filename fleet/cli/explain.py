"""`fleet explain`: shows why a request was placed as it was, or why a planner made a plan."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from fleet.cli.console.address import add_control, control_client, describe_control_error
from fleet.cli.console.exits import DONE, FAILED
from fleet.cli.planner.show import add_planner
from fleet.cli.planner.show import explain as explain_plan
from fleet.client import CandidateCost, Client, FleetError, OverflowExplained, PlacementExplained, RequestNotFound
from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import without_surrogates
from fleet.router.settings.router import RouterSettings

DEFAULT_POLICY = RouterSettings().policy

ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""Prefixes that the HTTP APIs put before the id of a request to make the id of its answer."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request",
        nargs="?",
        type=_identifier,
        metavar="REQUEST",
        help="id of a recent request: that of the answer (such as chatcmpl-…), of the header x-request-id, or from --json",
    )
    parser.add_argument("--plan", type=_identifier, metavar="ID", help="a plan instead of a request, as in fleet plan")
    add_control(parser)
    add_planner(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _identifier(text: str) -> str:
    """Return an id from the command line. No id has bytes that are not UTF-8."""
    if without_surrogates(text) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8")
    return text


def run(arguments: argparse.Namespace) -> int:
    if (arguments.request is None) == (arguments.plan is None):
        raise ConfigurationRefused("REQUEST or --plan: give one of the two")
    if arguments.plan is not None:
        return explain_plan(arguments)
    try:
        with control_client(arguments) as client:
            request, placements, overflow = _ask(client, arguments.request)
    except FleetError as error:
        print(f"fleet: {describe_control_error(error, arguments)}", file=sys.stderr)
        return FAILED
    if arguments.json:
        print(msgspec.json.encode({"request_id": request, "placements": placements, "overflow": overflow}).decode())
        return DONE
    for number, placed in enumerate(placements, start=1):
        if number > 1:
            print("\nplaced again:")
        print("\n".join(_lines(placed)))
    if overflow is not None:
        print("\n".join(_overflow_lines(overflow)))
    return DONE


def _ask(client: Client, name: str) -> tuple[str, tuple[PlacementExplained, ...], OverflowExplained | None]:
    """Return the id of a request, its placements, and its overflow to a hosted endpoint.

    `name` is the id of the request or of its answer.

    Raises:
        FleetError: The call failed, or no such request is known.
    """
    without = next((name.removeprefix(each) for each in ANSWER_PREFIXES if name.startswith(each)), name)
    try:
        return name, client.explain(name), client.explain_overflow(name)
    except RequestNotFound:
        if without == name:
            raise
        return without, client.explain(without), client.explain_overflow(without)


def _lines(placed: PlacementExplained) -> Iterator[str]:
    where = f"on {placed.decode}"
    if placed.prefill:
        where = f"prefill on {placed.prefill}, decode on {placed.decode}, blocks by {placed.kv_path}"
    yield f"{where}: {placed.why.replace('_', ' ')}; {placed.prefill_tokens} prompt tokens to compute"
    yield from _table(f"decode, by {_policy(placed.policy)}", placed.candidates, placed.decode)
    if placed.prefill_candidates:
        yield from _table(f"prefill, by {_policy(placed.prefill_policy)}", placed.prefill_candidates, placed.prefill)
    for worker, cause in placed.unfit.items():
        yield f"  {worker:14} no candidate: {cause.replace('_', ' ')}"


def _policy(name: str) -> str:
    """Return the name of a policy, followed by the unit in which it counts costs."""
    return f"{name}, costs in {'blocks of prefill' if name == DEFAULT_POLICY else 'a unit of its own'}"


def _overflow_lines(overflow: OverflowExplained) -> Iterator[str]:
    yield f"refused: {overflow.reason}: {overflow.message}"
    yield (
        f"overflow to {overflow.url}: {overflow.outcome.replace('_', ' ')}; estimated ${overflow.estimated_dollars:.6f},"
        f" charged ${overflow.dollars:.6f} for {overflow.prompt_tokens} prompt and {overflow.answer_tokens} answer tokens"
    )


def _table(title: str, candidates: Sequence[CandidateCost], chosen: str) -> Iterator[str]:
    """Return a table with a line for each candidate, the cheapest first: its cost, and the parts of the cost."""
    parts: dict[str, None] = {}
    for candidate in candidates:
        parts |= dict.fromkeys(candidate.parts)
    yield f"{title}:"
    yield f"  {'':14} {'cost':>10}" + "".join(f" {name:>{_width(name)}}" for name in parts)
    for candidate in sorted(candidates, key=lambda candidate: candidate.cost):
        mark = " <" if candidate.worker_id == chosen else ""
        yield f"  {candidate.worker_id:14} {candidate.cost:>10.2f}{_values(candidate.parts, parts)}{mark}"


def _values(values: Mapping[str, float], parts: Mapping[str, None]) -> str:
    return "".join(f" {values.get(name, 0.0):>{_width(name)}.2f}" for name in parts)


def _width(name: str) -> int:
    return max(10, len(name))
