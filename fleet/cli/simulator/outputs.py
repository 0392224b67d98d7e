"""Outputs of `fleet sim`: the requested files, and standard output."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from fleet.core.errors import ConfigurationRefused

OPTIONS = ("requests", "report", "json")
READ = ("scenario", "a", "b", "recording", "expect", "model", "prices")
"""Arguments that name input files."""


def check_outputs(arguments: argparse.Namespace, options: Sequence[str]) -> None:
    """Check that no two options write to the same file, and that no option overwrites an input file.

    Raises:
        ConfigurationRefused: Two options write to the same file, or an option overwrites an input file.
    """
    named: dict[Path, str] = {}
    for name in READ:
        given = getattr(arguments, name, None)
        for path in given if isinstance(given, list) else [given]:
            if path is not None:
                named[Path(path).resolve()] = "which is read"
    for option in options:
        path = getattr(arguments, option, None)
        if path in {None, "-"}:
            continue
        if other := named.get(Path(path).resolve()):
            raise ConfigurationRefused(f"--{option}: {path} is the file {other}")
        named[Path(path).resolve()] = f"of --{option} as well"


class SimulationOutputs:
    """Opens the requested output files before anything runs, so that a file which cannot be written is reported at once."""

    def __init__(self, arguments: argparse.Namespace, files: ExitStack):
        from fleet.cli.console.files import whole_file  # noqa: PLC0415

        check_outputs(arguments, OPTIONS)

        def begun(option: str) -> Path | None:
            path = getattr(arguments, option, None)
            return None if path in {None, "-"} else files.enter_context(whole_file(Path(path), f"--{option}"))

        self.requests, self.report, self._json = (begun(option) for option in OPTIONS)

    def write_json(self, answer: object) -> None:
        if self._json is not None:
            self._json.write_bytes(msgspec.json.encode(answer) + b"\n")


def say(arguments: argparse.Namespace, answer: object, lines: Sequence[str]) -> None:
    """Print the result as JSON if requested, or else as lines for people.

    Print nothing if the JSON is written to a file.
    """
    if arguments.json == "-":
        print(msgspec.json.encode(answer).decode())
    elif arguments.json is None:
        print("\n".join(lines))
