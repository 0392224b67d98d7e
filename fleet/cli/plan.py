"""`fleet plan`: what the planner would do now, what a load needs, and what rules would have done with a load."""

import argparse

from fleet.cli import plan_size
from fleet.cli.planner import show
from fleet.cli.simulator import plan_replay


def configure(parser: argparse.ArgumentParser) -> None:
    show.configure(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=type(parser))
    summary = "show each decision of a running planner"
    show.configure(actions.add_parser("watch", help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    summary = "size pools for a load that is described, and price them"
    plan_size.configure(actions.add_parser("size", help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    summary = "replay a load with scaling rules on simulated pools, and compare goals kept and GPU-hours"
    plan_replay.configure(actions.add_parser("replay", help=summary, description=f"{summary[0].upper()}{summary[1:]}."))


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "size":
            return plan_size.run(arguments)
        case "replay":
            return plan_replay.run(arguments)
        case "watch":
            return show.watch(arguments)
        case _:
            return show.show(arguments)
