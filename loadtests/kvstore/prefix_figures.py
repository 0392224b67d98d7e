"""Figures of the repeated-prefix benchmark: lines of its table, and the length from which loading pays."""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

LENGTHS = (32, 64, 128, 512, 1024, 2048, 3072)  # lengths of prefixes in tokens; multiples of a block


class PrefixOrigin(StrEnum):
    """The place where the KV of the prefix is before the prompt is sent; `COMPUTED`: nowhere, so the engine computes it."""

    COMPUTED = "computed"
    ENGINE = "engine"
    CPU = "cpu"
    SSD = "ssd"
    REDIS = "redis"


LOADED = tuple(origin for origin in PrefixOrigin if origin is not PrefixOrigin.COMPUTED)


class PrefixLine(Struct, frozen=True, kw_only=True):
    """TTFT of prompts of one length with the prefix in one place."""

    origin: PrefixOrigin
    tokens: int  # length of the prefix
    blocks: int  # number of blocks that came from this place; checked for each answer
    rounds: int  # number of measured answers
    declined: int  # answers whose load was not started or was given up, because computing seemed faster
    median_ms: float | None  # None: all were declined
    spread_ms: tuple[float, float] | None  # the fastest and the slowest answer; None: all were declined


def break_even(computed: Mapping[int, float], loaded: Mapping[int, float]) -> float | None:
    """Return the length from which loading a prefix is faster than computing it.

    Args:
        computed: Milliseconds by number of tokens.
        loaded: Milliseconds by number of tokens, without lengths whose loads were always declined.

    Returns:
        Tokens, interpolated between two lengths. The shortest length if loading is faster at all lengths; None if it is not
        faster at the longest length, or if no length has both values.
    """
    lengths = sorted(computed.keys() & loaded.keys())
    gains = [computed[length] - loaded[length] for length in lengths]
    if not gains or gains[-1] <= 0:
        return None
    # This is the longest length at which loading is not faster.
    last = next((i for i in reversed(range(len(gains))) if gains[i] <= 0), None)
    if last is None:
        return float(lengths[0])
    share = -gains[last] / (gains[last + 1] - gains[last])
    return lengths[last] + share * (lengths[last + 1] - lengths[last])


def break_evens(lines: Sequence[PrefixLine]) -> dict[str, float | None]:
    """Return for each origin the length in tokens from which loading is faster than computing; None as in `break_even`."""
    medians: dict[PrefixOrigin, dict[int, float]] = {origin: {} for origin in PrefixOrigin}
    for line in lines:
        if line.median_ms is not None:
            medians[line.origin][line.tokens] = line.median_ms
    return {str(origin): break_even(medians[PrefixOrigin.COMPUTED], medians[origin]) for origin in LOADED}


def table(lines: Sequence[PrefixLine]) -> str:
    """Format a table with a row for each length."""
    found = {(line.tokens, line.origin): line for line in lines}
    rows = ["tokens " + "".join(f"{origin:>26}" for origin in PrefixOrigin)]
    rows += [f"{length:6} " + "".join(_cell(found[length, origin]) for origin in PrefixOrigin) for length in LENGTHS]
    return "\n".join(rows)


def _cell(line: PrefixLine) -> str:
    declined = f" -{line.declined}" if line.declined else ""
    if line.median_ms is None or line.spread_ms is None:
        return f"{'declined':>26}"
    return f"{f'{line.median_ms:.1f} ({line.spread_ms[0]:.1f}-{line.spread_ms[1]:.1f}){declined}':>26}"
