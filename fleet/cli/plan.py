"""`fleet plan`: shows a planner's decisions, repeats recorded ones, replays loads with scaling rules, and sizes pools."""

import argparse

from fleet.cli.planner import decide, replay, show, size


def configure(parser: argparse.ArgumentParser) -> None:
    show.configure(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=type(parser))
    watch = actions.add_parser("watch", help="show each decision", description="Show a running planner's decisions.")
    show.configure(watch, repeated=True)
    replay_parser = actions.add_parser(
        "replay",
        help="replay a load with scaling rules on simulated pools",
        description="Replay a load with scaling rules on simulated pools, and compare goals kept, GPU-hours and turns.",
    )
    replay.configure(replay_parser)
    decide_parser = actions.add_parser(
        "decide",
        help="decide again on the recording of a planner",
        description="Decide again on the recording of a planner, and compare with what it decided.",
    )
    decide.configure(decide_parser)
    size_parser = actions.add_parser(
        "size",
        help="size pools for a load that is described, and price them",
        description="Size pools for a load that is described, and price them.",
    )
    size.configure(size_parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action in {"replay", "size"} and isinstance(arguments.json, bool):
        # These two may name a file after `--json`. Without it, or before the action, the option is that of `fleet plan` itself.
        arguments.json = "-" if arguments.json else None
    match arguments.action:
        case "replay":
            return replay.run(arguments)
        case "decide":
            return decide.run(arguments)
        case "size":
            return size.run(arguments)
        case "watch":
            return show.watch(arguments)
        case _:
            return show.show(arguments)
