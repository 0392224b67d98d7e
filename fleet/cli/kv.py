"""`fleet kv`: commands that concern only the KV store.

Each sub-command is a module `fleet.cli.store.NAME` with `configure(parser)` and `run(arguments)`, like the commands of
`fleet`.
"""

import argparse
import importlib

SUBCOMMANDS = {
    "bench": "measure the store beside the machine's own limits and its peers",
    "replay": "run a recorded trace through an eviction policy, without a store",
}


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="kv_command", required=True, metavar="COMMAND", parser_class=type(parser))
    for name, summary in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        importlib.import_module(f"fleet.cli.store.{name}").configure(command)


def run(arguments: argparse.Namespace) -> int:
    status: int = importlib.import_module(f"fleet.cli.store.{arguments.kv_command}").run(arguments)
    return status
