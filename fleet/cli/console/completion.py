"""`fleet completion`: prints a script that completes commands and options in a shell."""

import argparse

import shtab

from fleet.cli.console.command_line import command_parser
from fleet.cli.console.exits import DONE

SHELLS = ("bash", "zsh", "fish")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='for example: eval "$(fleet completion bash)"')


def run(arguments: argparse.Namespace) -> int:
    parser, _ = command_parser(lambda _name: True)
    print(shtab.complete(parser, shell=arguments.shell))
    return DONE
