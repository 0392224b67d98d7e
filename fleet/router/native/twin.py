"""The functions of `costs.c` in numpy, operation by operation: the same roundings, so the same choices."""

import numpy as np

from fleet.router.candidates import (
    ACTIVE_BLOCKS,
    BACKLOG_TOKENS,
    BELOW_BLOCKS,
    BLOCK_TOKENS,
    COMING_BLOCKS,
    CONVERSION,
    DECODE_SPEED,
    ENGINE_BLOCKS,
    MAX_RUNNING,
    NEW_BLOCKS,
    PREFILL_SPEED,
    REQUESTS,
    STORE_BLOCKS,
    Floats,
)


def fleet_costs(
    columns: Floats,
    out: Floats,
    prompt_tokens: int,
    engine: float,
    store: float,
    lower: float,
    request: float,
    decode: float,
    spread: float,
    warm: bool,
    even: bool,
    prefill: bool,
    /,
) -> None:
    """The cost of `fleet.router.policies.fleet`, without the session, of each candidate.

    Args:
        columns: The candidates' table.
        out: For the costs.
        prompt_tokens: Of the request.
        engine: Credit for a block in the engine.
        store: Credit for a block in the store's memory.
        lower: Credit for a block below that.
        request: What a running request weighs.
        decode: What a block that live requests hold weighs.
        spread: How fast a full batch takes the worth of a hit.
        warm: Whether anybody may hold anything of the prompt.
        even: Whether all speeds are 1.
        prefill: Whether it is about the prompt only.
    """
    np.add(columns[BACKLOG_TOKENS], prompt_tokens, out=out)
    out /= columns[BLOCK_TOKENS]
    if warm:
        out -= credit_of(columns, engine, store, lower, spread, even)
    if not even:
        out /= columns[PREFILL_SPEED]
    if warm:
        np.maximum(out, 0.0, out=out)
    load = request * columns[REQUESTS]
    if not prefill:
        load = decode * (columns[ACTIVE_BLOCKS] + columns[NEW_BLOCKS]) + load
    if not even:
        load /= columns[DECODE_SPEED]
    out += load


def credit_of(columns: Floats, engine: float, store: float, lower: float, spread: float, even: bool) -> Floats:
    """What each need not compute, in blocks of prefill on its own hardware."""
    credit: Floats = engine * columns[ENGINE_BLOCKS]
    coming = columns[COMING_BLOCKS]
    credit += engine * coming
    credit += np.minimum(coming, columns[BACKLOG_TOKENS] / columns[BLOCK_TOKENS])
    if even:
        credit += store * columns[STORE_BLOCKS]
        credit += lower * columns[BELOW_BLOCKS]
        credit -= columns[CONVERSION]
    else:
        speed = columns[PREFILL_SPEED]
        credit += np.maximum(0.0, 1 - (1 - store) * speed) * columns[STORE_BLOCKS]
        credit += np.maximum(0.0, 1 - (1 - lower) * speed) * columns[BELOW_BLOCKS]
        credit -= columns[CONVERSION] * speed
    full = columns[REQUESTS] >= columns[MAX_RUNNING]
    if np.count_nonzero(full):
        waiting = (columns[REQUESTS] + 1) / columns[MAX_RUNNING] - 1
        credit *= np.where(full, np.minimum(np.maximum(1 - spread * waiting, 0.0), 1.0), 1.0)
    return credit


def lowest(costs: Floats, /) -> list[int]:
    """Places of the lowest cost, in order.

    Raises:
        ValueError: There is none, or one is not finite.
    """
    if len(costs) == 0 or not np.isfinite(costs).all():
        raise ValueError("costs must be finite, and at least one")
    places: list[int] = (costs == costs.min()).nonzero()[0].tolist()
    return places
