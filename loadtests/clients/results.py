"""Results of client programs against a server."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct


class CallOutcome(StrEnum):
    """The end of one call."""

    PASSED = "passed"
    REFUSED = "refused"  # with status 400, and the name of the field that the server does not obey
    FAILED = "failed"


class CallResult(Struct, frozen=True, kw_only=True):
    """One call against one server."""

    call: str
    outcome: CallOutcome
    field: str = ""  # that a refusal names
    why: str = ""


class ClientResult(Struct, frozen=True, kw_only=True):
    """All calls of one client program."""

    name: str
    version: str
    passed: int
    failed: int
    refused: int = 0  # calls that the server refuses by the name of a field
    why: Mapping[str, str] = {}  # the reason of each call that was not served
    beside: "ClientResult | None" = None  # the same calls against plain vLLM


def summed(name: str, version: str, results: list[CallResult], beside: ClientResult | None = None) -> ClientResult:
    """Return the sums of a client's calls."""
    outcomes = [result.outcome for result in results]
    return ClientResult(
        name=name,
        version=version,
        passed=outcomes.count(CallOutcome.PASSED),
        failed=outcomes.count(CallOutcome.FAILED),
        refused=outcomes.count(CallOutcome.REFUSED),
        why={result.call: result.why for result in results if result.outcome is not CallOutcome.PASSED},
        beside=beside,
    )


def missing_here(
    ours: list[CallResult], refusals: Mapping[str, str], theirs: list[CallResult] | None = None
) -> dict[str, str]:
    """Return the reasons of the calls that this server neither serves nor is known to refuse.

    Args:
        ours: The calls of this server.
        refusals: The field that each call which is known to be refused names.
        theirs: The calls of a server beside it; those that it does not serve either are left out. None: there was no such server.
    """
    return {
        each.call: each.why
        for each in ours
        if each.outcome is not CallOutcome.PASSED
        and not (each.outcome is CallOutcome.REFUSED and refusals.get(each.call) == each.field)
        and (theirs is None or any(it.call == each.call and it.outcome is CallOutcome.PASSED for it in theirs))
    }
