"""Costs of candidates and names of blocks: native where it was built (`costs.c`), numpy elsewhere, the same to the last bit."""

try:
    from fleet.router.native._costs import (
        all_have_room,
        block_keys,
        fleet_costs,
        fleet_lowest,
        lowest,
        spread,
        spread_live,
    )

    BUILT = True
    """Whether the native module runs."""
except ImportError:  # not built
    from fleet.router.native.twin import (
        all_have_room,
        block_keys,
        fleet_costs,
        fleet_lowest,
        lowest,
        spread,
        spread_live,
    )

    BUILT = False

__all__ = ["BUILT", "all_have_room", "block_keys", "fleet_costs", "fleet_lowest", "lowest", "spread", "spread_live"]
