"""What the actions of `fleet sim` write: files that were asked for, and what they say on standard output."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from fleet.errors import ConfigurationRefused


class Outputs:
    """Files that were asked for, begun before anything runs: what cannot be written is refused at once."""

    def __init__(self, arguments: argparse.Namespace, files: ExitStack):
        from fleet.sim.files import whole_file  # noqa: PLC0415

        named: dict[Path, str] = {}

        def begun(option: str) -> Path | None:
            path = getattr(arguments, option, None)
            if path in {None, "-"}:
                return None
            if (other := named.setdefault(Path(path).resolve(), option)) != option:
                raise ConfigurationRefused(f"--{option}: {path} is the file of --{other} as well")
            return files.enter_context(whole_file(Path(path), f"--{option}"))

        self.requests, self.report, self._json = begun("requests"), begun("report"), begun("json")

    def write_json(self, answer: object) -> None:
        if self._json is not None:
            self._json.write_bytes(msgspec.json.encode(answer) + b"\n")


def say(arguments: argparse.Namespace, answer: object, lines: Sequence[str]) -> None:
    """The answer as JSON if that was asked for, or lines for people; nothing where a file has it."""
    if arguments.json == "-":
        print(msgspec.json.encode(answer).decode())
    elif arguments.json is None:
        print("\n".join(lines))
