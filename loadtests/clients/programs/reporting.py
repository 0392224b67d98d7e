"""Report of a client program: runs its calls and prints one line of JSON for each, which `registry.run_program` reads.

The programs import this module by its bare name, because they run as scripts, with this folder on their path, in
environments that have nothing of Fleet.
"""

import json
from collections.abc import Callable, Mapping

MAX_WHY_CHARACTERS = 300
"""Number of characters of an error that a line keeps."""


def report_calls(calls: Mapping[str, Callable[[], object]]) -> None:
    """Run all calls and report each; a call passes if it returns a true value and raises nothing."""
    for name, call in calls.items():
        try:
            ok, why = bool(call()), ""
        except Exception as error:  # noqa: BLE001 - supervisor: the other calls go on
            ok, why = False, f"{type(error).__name__}: {error}"[:MAX_WHY_CHARACTERS]
        report(name, ok=ok, why=why)


def report(call: str, *, ok: bool, why: str) -> None:
    """Report the result of one call."""
    print(json.dumps({"call": call, "ok": ok, "why": why}), flush=True)
