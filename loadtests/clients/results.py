"""Results of client programs that call a server: types, known refusals, and counts."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

PROGRAM = "program"
"""Name under which the failure of a whole program is reported: it could not be installed, or did not run to its end."""

REFUSALS: Mapping[str, str] = {
    "completions suffix": "suffix",
    "completions beam search": "use_beam_search",
    "chat reasoning_effort": "reasoning_effort",  # the chat template of the built-in model ignores this field
}
"""Calls of the OpenAI client that Fleet is known to refuse with every engine, each with the field that the refusal names."""

SIMULATED_REFUSALS: Mapping[str, str] = {
    **REFUSALS,
    "completions structured regex": "structured_outputs.regex",
    "chat structural_tag": "response_format",
}
"""Calls that Fleet refuses with the simulated engine, which supports only JSON schemas and choices, each with the named field."""


class CallOutcome(StrEnum):
    """How one call ended."""

    PASSED = "passed"
    REFUSED = "refused"  # HTTP 400 with the name of a field that the server does not support
    FAILED = "failed"


class CallResult(Struct, frozen=True, kw_only=True):
    """Result of one call of a program to a server."""

    call: str
    outcome: CallOutcome
    field: str = ""  # the field that a refusal names; empty: not refused
    why: str = ""


class ClientResult(Struct, frozen=True, kw_only=True):
    """Counts of the results of all calls of one client program."""

    name: str
    version: str
    passed: int
    failed: int
    refused: int = 0  # calls that the server refused with the name of a field
    why: Mapping[str, str] = {}  # the reason of each call that was not served
    beside: "ClientResult | None" = None  # results of the same calls to plain vLLM; None: not run


def summed(name: str, version: str, results: list[CallResult]) -> ClientResult:
    """Return the counts of the results of a client's calls."""
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
        ours: The results of calls to this server.
        refusals: The calls that may be refused, with the field that the refusal must name.
        theirs: The results of the same calls to another server. Calls that it does not serve either are left out. None: there is
            no other server.
    """
    unserved = {each.call for each in theirs or () if each.outcome is not CallOutcome.PASSED and each.call != PROGRAM}
    return {
        each.call: each.why
        for each in ours
        if each.outcome is not CallOutcome.PASSED
        and not (each.outcome is CallOutcome.REFUSED and refusals.get(each.call) == each.field)
        and each.call not in unserved
    }
