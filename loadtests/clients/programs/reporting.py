"""Report of a client program: runs its calls and prints one line of JSON for each, which `registry.run_program` reads as a `CallResult`.

The programs import this module by its bare name, because they run as scripts, with this folder on their path, in
environments that have nothing of Fleet.
"""

import json
from collections.abc import Callable, Mapping

MAX_WHY_CHARACTERS = 300
"""Number of characters of an error that a line keeps."""


def report_calls(
    calls: Mapping[str, Callable[[], object]], refused_field: Callable[[Exception], str] = lambda _: ""
) -> None:
    """Run all calls and report each; a call passes if it returns a true value and raises nothing.

    Args:
        calls: The calls by name.
        refused_field: Gives the field that an error names if it is a refusal of a field, otherwise nothing.
    """
    for name, call in calls.items():
        try:
            ok, why, field = bool(call()), "", ""
        except Exception as error:  # noqa: BLE001 - supervisor: the other calls go on
            field = refused_field(error)
            ok, why = False, f"{field or type(error).__name__}: {error}"
        report(name, ok=ok, why=why, field=field)


def report(call: str, *, ok: bool, why: str, field: str = "") -> None:
    """Report the result of one call, which was refused if it names a field."""
    outcome = "passed" if ok else "refused" if field else "failed"
    print(json.dumps({"call": call, "outcome": outcome, "field": field, "why": why[:MAX_WHY_CHARACTERS]}), flush=True)
