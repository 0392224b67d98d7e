"""Command `fleet`: parses the command line, and runs the module of the chosen sub-command.

Rules:

1. The output of a command goes to standard output, and messages go to standard error. Each error is one line; for a
   process that failed, the supervisor also shows the end of its log.
2. Exit status 0: done; 1: failed; 2: misused (set by argparse); 3: a configuration or another input file was refused.
   `fleet serve worker` also ends with 4 or 5 (`fleet.cli.console.exits`).
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
        # The planner starts child processes for rehearsals, and the store node starts one for the NIXL transport.
        # gRPC's fork handlers would run in such a child. If another thread of the parent calls gRPC at that moment, the
        # child dies of SIGSEGV before its program starts. So the handlers are switched off. In workers they stay on,
        # because an engine may fork without starting another program.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # noqa: TID251 - gRPC reads it at its import
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status. For help (0) and misuse (2), argparse ends the process itself."""
    try:
        status = _run(argv)
        if sys.stdout is not None:  # the caller may have closed standard output
            sys.stdout.flush()
    except ConfigurationRefused as error:
        print(f"fleet: {_in_one_line(str(error))}", file=sys.stderr)
        return CONFIGURATION_REFUSED
    except KeyboardInterrupt:
        return FAILED
    except BrokenPipeError:  # the program that reads the output has ended, so a flush at exit would fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:  # only a full disk is handled; if the error has no file name, it is about standard output
        if error.errno != errno.ENOSPC:
            raise
        if error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"fleet: {_in_one_line(error.filename or 'standard output')}: {error.strerror}", file=sys.stderr)
        return FAILED
    return status


def _in_one_line(text: str) -> str:
    """Return the text with escapes for its unprintable characters, such as line breaks, which a terminal would interpret."""
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
        guess = next(filter(None, guesses), "")
        if not guess and (advise := getattr(modules[arguments.command], "advise", None)) is not None:
            guess = advise(unknown)
        message = f"unrecognized arguments: {' '.join(unknown)}{guess}"
        (parser if chosen is None else parser.commands()[chosen]).error(message)
    status: int = modules[arguments.command].run(arguments)
    return status


if __name__ == "__main__":
    main()
