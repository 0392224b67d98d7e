"""Seconds: parses durations on a command line."""

import argparse

LONGEST = 86_400  # maximum duration in seconds: one day; a longer one is probably a typing mistake


def seconds(text: str) -> float:
    """Parse a command-line argument: a number of seconds above 0, up to one day. It is a `type` for argparse.

    Raises:
        ArgumentTypeError: The text is not such a number.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, up to a day ({LONGEST})")
    return number
