"""Report of a client program: runs its calls and prints one line of JSON for each, which `registry.run_program` reads as a `CallResult`.

The programs import this module by its bare name, because they run as scripts, with this folder on their path, in
environments that have nothing of Fleet.
"""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

MAX_WHY_CHARACTERS = 300
"""Maximum number of characters of an error in a line; the rest is cut off."""

COMMAND_SECONDS = 280.0
"""Time limit of one command of a program. Three commands end before the limit of the whole program (`registry.SECONDS`)."""


class CallFailed(Exception):
    """A call had a wrong result; the message says what happened."""


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command of a program, and return its status and what it printed.

    Args:
        command: The command and its arguments.
        environment: Variables that are set in addition to those of this process.

    Raises:
        CallFailed: The command did not end in time.
    """
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        raise CallFailed(f"no end within {COMMAND_SECONDS:.0f} s") from None


def report_calls(
    calls: Mapping[str, Callable[[], object]], refused_field: Callable[[Exception], str] = lambda _: ""
) -> None:
    """Run all calls and report each; a call passes if it returns a true value and raises nothing.

    Args:
        calls: The calls by name.
        refused_field: Returns the name of the field if the error says that the server refuses a field, otherwise an empty text.
    """
    for name, call in calls.items():
        try:
            ok, why, field = bool(call()), "", ""
        except Exception as error:  # noqa: BLE001 - supervisor: the other calls go on
            field = refused_field(error)
            ok, why = False, f"{field or type(error).__name__}: {error}"
        report(name, ok=ok, why=why, field=field)


def report(call: str, *, ok: bool, why: str, field: str = "") -> None:
    """Report the result of one call. If `field` is not empty, the server refused the call because of this field."""
    outcome = "passed" if ok else "refused" if field else "failed"
    print(json.dumps({"call": call, "outcome": outcome, "field": field, "why": why[:MAX_WHY_CHARACTERS]}), flush=True)
