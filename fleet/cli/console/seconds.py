"""Durations on a command line."""

import argparse

LONGEST = 86_400  # one day; a longer time is a typing mistake


def seconds(text: str) -> float:
    """Parse the `type` of an argument: a number of seconds above 0, up to one day.

    Raises:
        ArgumentTypeError: It is invalid.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, up to a day ({LONGEST})")
    return number
