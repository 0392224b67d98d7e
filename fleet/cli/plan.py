"""`fleet plan`: what sizes of pools a planner decides, would decide, or would have decided."""

import argparse

from fleet.cli import plan_replay


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    replay = actions.add_parser(
        "replay",
        help="replay a load with scaling rules on simulated pools",
        description="Replay a load with scaling rules on simulated pools, and compare goals kept, GPU-hours and turns.",
    )
    plan_replay.configure(replay)


def run(arguments: argparse.Namespace) -> int:
    return plan_replay.run(arguments)
