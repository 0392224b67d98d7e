"""Results of client programs against a server."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

PROGRAM = "program"
"""Name of the call that stands for the failure of a whole program, which was not installed or did not come to its end."""

REFUSALS: Mapping[str, str] = {
    "completions suffix": "suffix",
    "completions beam search": "use_beam_search",
    "chat reasoning_effort": "reasoning_effort",  # the template of the built-in model does not read it
}
"""Calls of the OpenAI client that Fleet is known to refuse with every engine, each with the field that the refusal names."""

SIMULATED_REFUSALS: Mapping[str, str] = {
    **REFUSALS,
    "completions structured regex": "structured_outputs.regex",
    "chat structural_tag": "response_format",
}
"""The same with the simulated engine, which keeps no other forms of answers than JSON schemas and choices."""


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


def summed(name: str, version: str, results: list[CallResult]) -> ClientResult:
    """Return the sums of a client's calls."""
    outcomes = [result.outcome for result in results]
    return ClientResult(
        name=name,
        version=version,
        passed=outcomes.count(CallOutcome.PASSED),
        failed=outcomes.count(CallOutcome.FAILED),
        refused=outcomes.count(CallOutcome.REFUSED),
        why={result.call: result.why for result in results if result.outcome is not CallOutcome.PASSED},
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
    unserved = {each.call for each in theirs or () if each.outcome is not CallOutcome.PASSED and each.call != PROGRAM}
    return {
        each.call: each.why
        for each in ours
        if each.outcome is not CallOutcome.PASSED
        and not (each.outcome is CallOutcome.REFUSED and refusals.get(each.call) == each.field)
        and each.call not in unserved
    }
