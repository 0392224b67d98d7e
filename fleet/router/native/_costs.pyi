# Of `costs.c`; see `fleet.router.native.twin`.

from fleet.router.candidates import Floats

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
) -> None: ...
def lowest(costs: Floats, /) -> list[int]: ...
