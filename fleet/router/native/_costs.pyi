# Types of `costs.c`; `fleet.router.native.twin` documents the functions.

from fleet.router.policy import Floats, Rows

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
) -> None: ...
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
) -> list[int]: ...
def all_have_room(columns: Floats, /) -> bool: ...
def block_keys(tokens: bytes | memoryview, size: int, factors: bytes, /) -> tuple[int, ...]: ...
def lowest(costs: Floats, /) -> list[int]: ...
def spread(runs: list[tuple[int, int]], row_at: Rows, column: Floats, /) -> None: ...
def spread_live(runs: list[tuple[int, int]], row_at: Rows, columns: Floats, /) -> None: ...
