"""Parser of the whole command line: finds the sub-commands, and proposes the nearest known word for a mistyped one.

Rules:

1. There are Fleet's own sub-commands (`SUMMARIES`), and sub-commands that other packages install under the entry points
   `fleet.commands`. The module of a sub-command has the functions `configure(parser)` and `run(arguments)`. Only the
   module of the chosen sub-command is imported; `fleet completion` imports all.
2. `fleet` alone prints the help. Errors about an unknown command, option or choice propose the nearest one.
"""

import argparse
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NoReturn

from fleet.cli.console.exits import MISUSED
from fleet.cli.console.stopping import raise_interrupt_on
from fleet.core.errors import did_you_mean, nearest, question

SUMMARIES = {  # help texts of Fleet's own sub-commands, in the order of the help
    "up": "start a whole cluster on this machine",
    "generate": "stream an answer from a running cluster",
    "status": "show pools, workers, load and caches of a running cluster",
    "logs": "show the logs of a cluster on this machine",
    "down": "stop a cluster on this machine",
    "scale": "show how large the pools of a cluster are, or have them made larger and smaller",
    "plan": "show what the planner decides, size pools for a load, and replay loads with scaling rules",
    "explain": "say why a request went where it went",
    "doctor": "say which optional parts are usable on this machine, and what to do about the others",
    "kv": "measure the KV store, or replay recorded traffic through its policies",
    "hardware": "list accelerators, estimate models on them, and say how good estimates are",
    "router": "list placement policies, or set the thresholds of a running router",
    "sim": "run the router and a workload on simulated GPUs, or search the rate that they can take",
    "kube": "print what Fleet is on Kubernetes: custom resource definitions, and the objects of a deployment",
    "config": "list all keys of the settings files, or check a settings file",
    "completion": "print a completion script for a shell",
    "serve": "run one process of a cluster: router, worker, kvstore, operator or planner",
}

IN_FOLDERS = {"logs": "local.logs", "down": "local.down", "completion": "console.completion"}
"""Modules of Fleet's own sub-commands below `fleet.cli`, by the name of the command. A command that is not listed has a
module of its own name."""


class CommandParser(argparse.ArgumentParser):
    """Parser that reports an error in one line, proposes the nearest known word, and refers to `--help`."""

    def __init__(self, **fields: Any) -> None:
        # Abbreviations of options are not accepted: a mistyped option could be taken for an abbreviation, and a new option
        # could make an abbreviation ambiguous.
        super().__init__(**{"allow_abbrev": False, **fields})

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def options(self, argv: Sequence[str]) -> set[str]:
        """Return the long options of this parser and of the sub-commands that `argv` names."""
        found = {option for action in self._actions for option in action.option_strings if option.startswith("--")}
        commands = self.commands()
        chosen = next((name for name in argv if name in commands), None)
        return found if chosen is None else found | commands[chosen].options(argv)

    def commands(self) -> dict[str, "CommandParser"]:
        """Return the parsers of the sub-commands by name; empty if there are none."""
        actions = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))  # noqa: SLF001 - argparse has no public name for it
        return {name: parser for each in actions for name, parser in each.choices.items()}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error for a value that is not among the choices. argparse calls this for commands and for options with choices."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        message = f"{str(value)!r} is none of {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"{message}{did_you_mean(str(value), choices)}")


def option_meant(option: str, known: Iterable[str]) -> str:
    """Return a question that proposes a similar long option, or an empty text if no long option is similar.

    Names are compared without their leading dashes, because with them, all options with short names would be similar.
    """
    name = nearest(option.removeprefix("--"), (each.removeprefix("--") for each in known))
    return question(f"--{name}" if name else "")


class _VersionAction(argparse.Action):
    """The option `--version`, which looks the version up only when it is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from kvstore.protocol.versions import own_protocols  # noqa: PLC0415 - only this option needs it

        print(f"fleet {own_protocols().product or 'of an unknown version'}")
        parser.exit()


def command_parser(is_loaded: Callable[[str], bool]) -> tuple[CommandParser, dict[str, ModuleType]]:
    """Return the parser of the whole command line, and the modules of the sub-commands by name.

    Args:
        is_loaded: Function that takes the name of a sub-command, and returns True if its module is imported and its
            options are added.
    """
    parser = CommandParser(prog="fleet", description="Disaggregated serving of large language models.")
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print the version, and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    modules = {}
    for name, entry in _commands():
        summary = SUMMARIES.get(name) or f"command of the package {entry.dist.name if entry.dist else entry.module}"
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if is_loaded(name):
            with raise_interrupt_on((signal.SIGINT,)):  # an exception by Ctrl-C during an import could crash msgspec
                modules[name] = entry.load()
            modules[name].configure(command)
    return parser, modules


def _commands() -> Iterator[tuple[str, EntryPoint]]:
    """Yield the installed sub-commands: first Fleet's own in the order of the help, then sub-commands of other packages."""
    found = {entry.name: entry for entry in entry_points(group="fleet.commands")}
    for name in (*SUMMARIES, *sorted(found.keys() - SUMMARIES.keys())):
        yield name, found.get(name) or EntryPoint(name, f"fleet.cli.{IN_FOLDERS.get(name, name)}", "fleet.commands")
