"""`fleet plan`: what sizes of pools a planner decides, would decide, or would have decided, and what a load needs."""

import argparse

from fleet.cli import plan_replay, plan_size
from fleet.cli.planner import show


def configure(parser: argparse.ArgumentParser) -> None:
    show.configure(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=type(parser))
    watch = actions.add_parser("watch", help="show each decision", description="Show a running planner's decisions.")
    show.configure(watch)
    replay = actions.add_parser(
        "replay",
        help="replay a load with scaling rules on simulated pools",
        description="Replay a load with scaling rules on simulated pools, and compare goals kept, GPU-hours and turns.",
    )
    plan_replay.configure(replay)
    size = actions.add_parser(
        "size",
        help="size pools for a load that is described, and price them",
        description="Size pools for a load that is described, and price them.",
    )
    plan_size.configure(size)


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "replay":
            return plan_replay.run(arguments)
        case "size":
            return plan_size.run(arguments)
        case "watch":
            return show.watch(arguments)
        case _:
            return show.show(arguments)
