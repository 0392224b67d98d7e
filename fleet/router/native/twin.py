"""Numpy twin of `costs.c`: the same operations with the same rounding, so that both make the same choices."""

import numpy as np

from fleet.router.policy import (
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
    """Compute the cost of each candidate by `fleet.router.placement.policies.pipeline`, without the term for the session.

    Args:
        columns: The table of the candidates, with the rows of `fleet.router.policy`.
        out: The array to which the costs are written.
        prompt_tokens: Tokens of the prompt.
        engine: Credit for a block in the engine's prefix cache, in blocks of prefill, as are the next four numbers.
        store: Credit for a block in the store's memory.
        lower: Credit for a block in a lower tier of the store.
        request: Cost of a running request.
        decode: Cost of a block that live requests hold.
        spread: How fast the credit of a cached block falls with the length of the queue on a full worker (item 6 of the policy).
        others: Weight of the delay of later requests (item 4 of the policy).
        stall: Weight of a running request that the prefill delays (item 4 of the policy).
        warm: False if it is certain that no worker and no store holds the beginning of the prompt, or will soon hold it.
        even: True if the speeds of all workers are 1.
        prefill: True if the chosen worker is to compute only the prompt, and another worker answers.
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
    """Return the result of `lowest` for the costs of `fleet_costs`, for callers that do not need the costs themselves.

    Raises:
        ValueError: There is no candidate, or a cost is not finite.
    """
    costs = np.empty(columns.shape[1])
    weights = (engine, store, lower, request, decode, spread, others, stall)
    fleet_costs(columns, costs, prompt_tokens, *weights, warm, even, prefill)
    return lowest(costs)


def credit_of(
    columns: Floats, engine: float, store: float, lower: float, spread: float, even: bool
) -> tuple[Floats, Floats]:
    """Return the credit of each worker, and how many blocks of the worker's backlog the request needs itself.

    The module `fleet.router.placement.policies.pipeline` defines both (items 2, 3 and 6).
    """
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
    """Return, for each worker, what computing one block on it costs other requests, in blocks of prefill.

    Item 4 of `fleet.router.placement.policies.pipeline` defines this price.
    """
    count = columns.shape[1]
    busy = int(np.count_nonzero(columns[BACKLOG_TOKENS] > 0))
    price: Floats = np.full(count, others * (busy / (count + 1 - busy)))
    return price if prefill else price + stall * columns[REQUESTS]


def lowest(costs: Floats, /) -> list[int]:
    """Return the column indices of all candidates with the lowest cost, in ascending order.

    Raises:
        ValueError: There is no cost, or one is not finite.
    """
    if len(costs) == 0 or not np.isfinite(costs).all():
        raise ValueError("costs must be finite, and there must be at least one")
    places: list[int] = (costs == costs.min()).nonzero()[0].tolist()
    return places


def all_have_room(columns: Floats, /) -> bool:
    """Return whether every worker has fewer requests than its limit."""
    return bool((columns[REQUESTS] < columns[LIMIT]).all())


def spread(runs: list[tuple[int, int]], row_at: Rows, column: Floats, /) -> None:
    """Write the number of leading blocks of each worker to one row of the table.

    Args:
        runs: Pairs of a number of leading blocks and the bits of its holders (`fleet.router.kv_index.prefix_index.runs`).
        row_at: The worker's position in the table for each bit position; -1 or no entry: the bit does not belong to a worker of the table.
        column: The array to which the numbers are written, with an element for each worker.
    """
    for depth, mask in runs:
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
        places = np.unpackbits(packed, bitorder="little").nonzero()[0]
        rows = row_at[places[places < len(row_at)]]
        column[rows[rows >= 0]] = depth


def spread_live(runs: list[tuple[int, int]], row_at: Rows, columns: Floats, /) -> None:
    """Write how many leading blocks live requests hold on each worker, subtract them from the new blocks, and compute the coming blocks.

    Args:
        runs: As for `spread`.
        row_at: As for `spread`; each row occurs at most once.
        columns: The table of all workers. Its rows `NEW_BLOCKS` and `ENGINE_BLOCKS` are filled already.
    """
    spread(runs, row_at, columns[LIVE_BLOCKS])
    rows = row_at[row_at >= 0]
    live = columns[LIVE_BLOCKS, rows]
    columns[NEW_BLOCKS, rows] -= live
    columns[COMING_BLOCKS, rows] = np.maximum(live - columns[ENGINE_BLOCKS, rows], 0.0)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def block_keys(tokens: bytes | memoryview, size: int, factors: bytes, /) -> tuple[int, ...]:
    """Return a 64-bit key for each full block of a prompt. The key covers the block and all tokens before it.

    Each token is multiplied with the factor of its place in the block, and the products are summed modulo 2**64. With random odd factors,
    different blocks almost always have different sums. The sum is mixed with the block's position, and added to the key of the block
    before.

    Args:
        tokens: The prompt, 4 bytes for each token.
        size: The size of a block in bytes, a multiple of 4.
        factors: A factor of 8 bytes for each token of a block.

    Raises:
        ValueError: `size` is not above 0, or `factors` has another length.
    """
    if size <= 0 or len(factors) != 2 * size:
        raise ValueError("size must be above 0, with a factor of 8 bytes for each 4 bytes of it")
    count = len(tokens) // size
    words = np.frombuffer(tokens, "<u4", count * (size // 4)).reshape(count, size // 4)
    sums = (words * np.frombuffer(factors, "<u8")).sum(axis=1, dtype=np.uint64)
    sums += np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    sums = (sums ^ (sums >> np.uint64(30))) * _FIRST
    sums = (sums ^ (sums >> np.uint64(27))) * _SECOND
    sums ^= sums >> np.uint64(31)
    names: list[int] = np.cumsum(sums, dtype=np.uint64).tolist()
    return tuple(names)
