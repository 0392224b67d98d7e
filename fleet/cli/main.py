"""The command `fleet`.

Rules: data goes to standard output, everything else to standard error. Exit status 0: done; 1: failed; 2: misused (argparse's
own); 3: a configuration was refused. Only the module of the sub-command that was asked for is imported.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from fleet.cli.exits import FAILED, REFUSED
from fleet.errors import ConfigurationRefused

COMMANDS = {
    "up": "start a whole cluster on this machine",
    "generate": "stream an answer from a running cluster",
    "status": "show pools, workers, load and caches of a running cluster",
    "doctor": "say which optional parts are usable on this machine, and what to do about the others",
    "serve": "run one process of a cluster: router, worker or kvstore",
}


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit status, except that argparse exits by itself with 0 (help) or 2 (misuse)."""
    parser = argparse.ArgumentParser(prog="fleet", description="Disaggregated serving of large language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in argv if not argument.startswith("-")), None)
    module = None
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            module = importlib.import_module(f"fleet.cli.{name}")
            module.configure(command)
    arguments = parser.parse_args(argv)
    assert module is not None, "argparse lets only known commands pass"
    try:
        status: int = module.run(arguments)
    except ConfigurationRefused as error:
        print(f"fleet: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return FAILED
    return status


if __name__ == "__main__":
    main()
