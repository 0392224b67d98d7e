"""Times on a command line."""

import argparse

LONGEST = 86_400  # a day: what is longer is a slip of the pen


def seconds(text: str) -> float:
    """For an argument's `type`: a number of seconds, above 0 and up to a day.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, up to a day ({LONGEST})")
    return number
