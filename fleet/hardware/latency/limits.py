"""Limits: searches for the highest load that keeps a goal. All functions are pure."""

from collections.abc import Callable

HALVINGS = 40
"""Default for the number of times that a search halves the interval around a limit. The interval is then so small that
further halvings would change the result by less than a rounding error."""

LEAST_STRIDE = 0.25
STRIDE = 1.1
"""Default for the ratio of two consecutive loads that `highest_unbroken` tries. The loads also differ by at least
`LEAST_STRIDE` running requests. With this ratio, the search finds every peak of the latencies, because no peak is narrower
than the distance of two such loads."""


def highest_unbroken(
    kept: Callable[[float], bool], least: float, most: float, stride: float = STRIDE, halvings: int = HALVINGS
) -> float:
    """Return the highest load up to `most` below which every load keeps the goal, or 0 if the load `least` misses it.

    A load above the result may keep the goal again: in a large batch, a prompt delays the other requests less than in
    a small batch.
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
    """Return the highest load from `least` to `most` that keeps the goal, or 0 if the load `least` misses it.

    The result is only right if all loads above it miss the goal.
    """
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
