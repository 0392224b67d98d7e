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
    LIMIT,
    LIVE_BLOCKS,
    MAX_RUNNING,
    NEW_BLOCKS,
    PREFILL_SPEED,
    REQUESTS,
    STORE_BLOCKS,
    Floats,
    Rows,
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
    others: float,
    stall: float,
    warm: bool,
    even: bool,
    prefill: bool,
    /,
) -> None:
    """The cost of `fleet.router.placement.policies.fleet`, without the session, of each candidate.

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
        others: What the waiting of those who come later weighs.
        stall: What holding up a running request weighs.
        warm: Whether anybody may hold anything of the prompt.
        even: Whether all speeds are 1.
        prefill: Whether it is about the prompt only.
    """
    np.add(columns[BACKLOG_TOKENS], prompt_tokens, out=out)
    out /= columns[BLOCK_TOKENS]
    work = prompt_tokens / columns[BLOCK_TOKENS]
    if warm:
        credit, shared = credit_of(columns, engine, store, lower, spread, even)
        out -= credit + shared
        np.maximum(out, 0.0, out=out)
        work = np.maximum(work - credit, 0.0)
    load = request * columns[REQUESTS]
    if not prefill:
        load = decode * (columns[ACTIVE_BLOCKS] + columns[NEW_BLOCKS]) + load
    out += price_of(columns, others, stall, prefill) * work
    if not even:
        out /= columns[PREFILL_SPEED]
        load /= columns[DECODE_SPEED]
    out += load


def fleet_lowest(
    columns: Floats,
    prompt_tokens: int,
    engine: float,
    store: float,
    lower: float,
    request: float,
    decode: float,
    spread: float,
    others: float,
    stall: float,
    warm: bool,
    even: bool,
    prefill: bool,
    /,
) -> list[int]:
    """`lowest` of `fleet_costs`, for those who need no more of the costs.

    Raises:
        ValueError: There is none, or one is not finite.
    """
    costs = np.empty(columns.shape[1])
    weights = (engine, store, lower, request, decode, spread, others, stall)
    fleet_costs(columns, costs, prompt_tokens, *weights, warm, even, prefill)
    return lowest(costs)


def credit_of(
    columns: Floats, engine: float, store: float, lower: float, spread: float, even: bool
) -> tuple[Floats, Floats]:
    """What each need not compute, in blocks of prefill on its own hardware; and what of its backlog is that very work."""
    credit: Floats = engine * columns[ENGINE_BLOCKS]
    coming = columns[COMING_BLOCKS]
    shared: Floats = np.minimum(coming, columns[BACKLOG_TOKENS] / columns[BLOCK_TOKENS])
    credit += engine * coming
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
        worth = np.where(full, np.minimum(np.maximum(1 - spread * waiting, 0.0), 1.0), 1.0)
        credit *= worth
        shared *= worth
    return credit, shared


def price_of(columns: Floats, others: float, stall: float, prefill: bool) -> Floats:
    """What a block computed on each costs others, in blocks."""
    count = columns.shape[1]
    busy = int(np.count_nonzero(columns[BACKLOG_TOKENS] > 0))
    price: Floats = np.full(count, others * (busy / (count + 1 - busy)))
    return price if prefill else price + stall * columns[REQUESTS]


def lowest(costs: Floats, /) -> list[int]:
    """Places of the lowest cost, in order.

    Raises:
        ValueError: There is none, or one is not finite.
    """
    if len(costs) == 0 or not np.isfinite(costs).all():
        raise ValueError("costs must be finite, and at least one")
    places: list[int] = (costs == costs.min()).nonzero()[0].tolist()
    return places


def all_have_room(columns: Floats, /) -> bool:
    """Whether no worker is at its limit of requests."""
    return bool((columns[REQUESTS] < columns[LIMIT]).all())


def spread(runs: list[tuple[int, int]], row_at: Rows, column: Floats, /) -> None:
    """Write how many leading blocks workers have.

    Args:
        runs: Numbers of blocks, and the bits of those who have so many (`fleet.router.kv_index.prefix_index.runs`).
        row_at: Rows of the workers by place of their bits; -1, and what is missing at the end: somebody else's bit.
        column: For the numbers.
    """
    for depth, mask in runs:
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        places = np.unpackbits(packed, bitorder="little").nonzero()[0]
        rows = row_at[places[places < len(row_at)]]
        column[rows[rows >= 0]] = depth


def spread_live(runs: list[tuple[int, int]], row_at: Rows, columns: Floats, /) -> None:
    """Write how many leading blocks live requests hold where: those need not be held twice, and are there or coming.

    Args:
        runs: As for `spread`.
        row_at: Likewise; a row at one place at most.
        columns: Of all workers; what their engines hold is written.
    """
    spread(runs, row_at, columns[LIVE_BLOCKS])
    rows = row_at[row_at >= 0]
    live = columns[LIVE_BLOCKS, rows]
    columns[NEW_BLOCKS, rows] -= live
    columns[COMING_BLOCKS, rows] = np.maximum(live - columns[ENGINE_BLOCKS, rows], 0.0)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def block_keys(tokens: bytes | memoryview, size: int, factors: bytes, /) -> tuple[int, ...]:
    """Names for the full blocks of a prompt, each standing for all that is before it too, in 64 bits.

    A block is the sum of its tokens times the factor of each place, modulo 2**64, which for random odd factors is another one for
    another block; mixed with its place in the prompt, and added to the name before it.

    Args:
        tokens: Of the prompt, 4 bytes each.
        size: Of a block in bytes, a multiple of 4.
        factors: One for each token of a block, 8 bytes each.
    """
    if size <= 0 or len(factors) != 2 * size:
        raise ValueError("a size above 0, and a factor of 8 bytes for each 4 of it")
    count = len(tokens) // size
    words = np.frombuffer(tokens, "<u4", count * (size // 4)).reshape(count, size // 4)
    sums = (words * np.frombuffer(factors, "<u8")).sum(axis=1, dtype=np.uint64)
    sums += np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    sums = (sums ^ (sums >> np.uint64(30))) * _FIRST
    sums = (sums ^ (sums >> np.uint64(27))) * _SECOND
    sums ^= sums >> np.uint64(31)
    names: list[int] = np.cumsum(sums, dtype=np.uint64).tolist()
    return tuple(names)
