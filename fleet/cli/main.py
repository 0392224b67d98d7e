"""Command `fleet`: parses the command line, and runs the module of the chosen sub-command.

Rules:

1. Data goes to standard output, everything else to standard error. Each error is one line.
2. Exit status 0: done; 1: failed; 2: misused (argparse's own); 3: a configuration or another input file was refused.
3. `fleet.cli.console.command_line` finds the sub-commands.
"""

import errno
import os
import sys
from collections.abc import Sequence

from fleet.cli.console.command_line import command_parser, option_meant
from fleet.cli.console.exits import CONFIGURATION_REFUSED, DONE, FAILED
from fleet.core.errors import ConfigurationRefused


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
        guesses = (option_meant(word.partition("=")[0], known) for word in unknown if word.startswith("--"))
        message = f"unrecognized arguments: {' '.join(unknown)}{next(filter(None, guesses), '')}"
        (parser if chosen is None else parser.commands()[chosen]).error(message)
    status: int = modules[arguments.command].run(arguments)
    return status


if __name__ == "__main__":
    main()
