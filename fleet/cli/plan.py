"""`fleet plan`: what sizes of pools a planner decides, would decide, or would have decided."""

import argparse

from fleet.cli import plan_replay, plan_show


def configure(parser: argparse.ArgumentParser) -> None:
    plan_show.configure(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    watch = actions.add_parser("watch", help="show each decision", description="Show a running planner's decisions.")
    plan_show.configure(watch)
    replay = actions.add_parser(
        "replay",
        help="replay a load with scaling rules on simulated pools",
        description="Replay a load with scaling rules on simulated pools, and compare goals kept, GPU-hours and turns.",
    )
    plan_replay.configure(replay)


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "replay":
            return plan_replay.run(arguments)
        case "watch":
            return plan_show.watch(arguments)
        case _:
            return plan_show.show(arguments)
