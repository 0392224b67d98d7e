"""Prediction error: the one formula by which the planner compares a predicted latency with the measured one. Pure."""

from math import isinf


def prediction_error(predicted: float, measured: float) -> float:
    """Return |predicted - measured| / max(predicted, measured): the difference as a share of the longer time.

    Both times are in seconds and at least 0. The result is from 0 to 1: it is 0.5 if one time is twice the other one, and 0.9 if it
    is ten times the other one, whichever of them is the longer one. So a prediction that is far too high does not count more than
    one that is far too low. The result is 0 if both times are 0, and 1 if a time is infinite.
    """
    longer = max(predicted, measured)
    if isinf(longer):
        return 1.0
    return abs(predicted - measured) / longer if longer else 0.0
