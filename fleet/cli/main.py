"""Command `fleet`: parses the command line, and runs the module of the chosen sub-command.

Rules:

1. Data goes to standard output, everything else to standard error. Each error is one line.
2. Exit status 0: done; 1: failed; 2: misused (argparse's own); 3: a configuration or another input file was refused.
3. Sub-commands are found by the entry points `fleet.commands`; a module has `configure(parser)` and `run(arguments)`. Only the
   module of the chosen sub-command is imported.
4. `fleet` alone prints the help. Errors about an unknown command, option or choice propose the nearest one.
"""

import argparse
import errno
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NoReturn

from fleet.cli.console.exits import CONFIGURATION_REFUSED, DONE, FAILED, MISUSED
from fleet.cli.console.stopping import raise_interrupt_on
from fleet.core.errors import ConfigurationRefused

SUMMARIES = {  # help texts of our own sub-commands, in the order in which the help lists them
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
    "serve": "run one process of a cluster: router, worker, kvstore or operator",
}

IN_FOLDERS = {"logs": "local.logs", "down": "local.down", "completion": "console.completion"}
"""Modules of our own sub-commands that are not named after the command."""


class CommandParser(argparse.ArgumentParser):
    """Parser that reports an error in one line, proposes what was probably meant, and refers to `--help`."""

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
        actions = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))  # noqa: SLF001 - argparse names it nowhere else
        return {name: parser for each in actions for name, parser in each.choices.items()}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is no choice; argparse calls this for commands and for options with choices."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        message = f"{str(value)!r} is none of {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"{message}{did_you_mean(str(value), choices)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that proposes the known word most like `word`; empty if none is like it."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for errors

    near = get_close_matches(word, sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class _VersionAction(argparse.Action):
    """Option that looks the version up only when it is used."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"fleet {importlib.metadata.version('fleet-serving')}")
        parser.exit()


def main() -> None:
    if sys.argv[1:3] in (["serve", "planner"], ["serve", "kvstore"]):
        # These start children: rehearsals, and the process of the NIXL transport. gRPC's handlers for fork would run in every child.
        # While another thread calls gRPC they are in a wrong state, and the child dies of SIGSEGV before its program starts. Not in
        # workers: their engines may fork without starting a program.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251 - gRPC reads it at its import
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status; argparse itself exits with 0 (help) or 2 (misuse)."""
    try:
        status = _run(argv)
        if sys.stdout is not None:  # the caller may have closed it
            sys.stdout.flush()
    except ConfigurationRefused as error:
        print(f"fleet: {_in_one_line(str(error))}", file=sys.stderr)
        return CONFIGURATION_REFUSED
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:  # the reader of the output has gone, so nothing may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # for example a full disk; an error without a file name concerns the output
        if error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"fleet: {_in_one_line(error.filename or 'standard output')}: {error.strerror}", file=sys.stderr)
        return FAILED
    return status


def _in_one_line(text: str) -> str:
    """Escape characters that a terminal would interpret."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _run(argv: Sequence[str]) -> int:
    chosen = next((argument for argument in argv if not argument.startswith("-")), None)
    parser, modules = command_parser(lambda name: name == chosen)
    if not argv:
        parser.print_help()
        return DONE
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        known = parser.options(argv)
        guesses = (did_you_mean(word.partition("=")[0], known) for word in unknown if word.startswith("--"))
        message = f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, guesses), '')}"
        (parser if chosen is None else parser.commands()[chosen]).error(message)
    status: int = modules[arguments.command].run(arguments)
    return status


def command_parser(is_loaded: Callable[[str], bool]) -> tuple[CommandParser, dict[str, ModuleType]]:
    """Return the parser of the whole command line, and the modules of the sub-commands by name.

    Args:
        is_loaded: Says by its name whether a sub-command is imported and its options are added to the parser.
    """
    parser = CommandParser(prog="fleet", description="Disaggregated serving of large language models.")
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print the version, and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=CommandParser)
    modules = {}
    for name, entry in _commands():
        summary = SUMMARIES.get(name) or f"command of the package {entry.dist.name if entry.dist else entry.module}"
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if is_loaded(name):
            with raise_interrupt_on((signal.SIGINT,)):  # a Ctrl-C during the import crashes msgspec
                modules[name] = entry.load()
            modules[name].configure(command)
    return parser, modules


def _commands() -> Iterator[tuple[str, EntryPoint]]:
    """Yield the installed sub-commands: ours in the order of the help, then those of other packages."""
    found = {entry.name: entry for entry in entry_points(group="fleet.commands")}
    for name in (*SUMMARIES, *sorted(found.keys() - SUMMARIES.keys())):
        yield name, found.get(name) or EntryPoint(name, f"fleet.cli.{IN_FOLDERS.get(name, name)}", "fleet.commands")


if __name__ == "__main__":
    main()
