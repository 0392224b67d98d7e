"""Limits: the highest load that keeps a goal, found by search. Pure functions."""

from collections.abc import Callable

HALVINGS = 40
"""Halvings of an interval around a limit; more would not change a float."""

LEAST_STRIDE = 0.25
STRIDE = 1.1
"""Distance between two loads in the search, in running requests and as a factor; the searched functions have no narrower humps."""


def highest_unbroken(
    kept: Callable[[float], bool], least: float, most: float, stride: float = STRIDE, halvings: int = HALVINGS
) -> float:
    """Return the highest load below which every load is kept, although a higher one may be kept again; 0 if the least is not.

    In a full batch a short prompt costs the others less than in a small one, so a goal may be missed at a low load and kept at a high one.
    """
    if not kept(least):
        return 0.0
    low = least
    while low < most:
        high = min(most, max(stride * low, low + LEAST_STRIDE))
        if not kept(high):
            return highest(kept, low, high, halvings)
        low = high
    return low


def highest(kept: Callable[[float], bool], least: float, most: float, halvings: int = HALVINGS) -> float:
    """Return the highest load that is kept if every higher one is missed; 0 if the least is not kept."""
    if not kept(least):
        return 0.0
    if kept(most):
        return max(most, least)
    low, high = least, most
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        if kept(middle):
            low = middle
        else:
            high = middle
    return low
