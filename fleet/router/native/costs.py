"""Costs of candidates and keys of blocks: computed by the C extension (`costs.c`) if it was built, or else by numpy with identical results."""

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
    """True if the C extension was built, and the functions of this module come from it."""
except ImportError:  # the C extension was not built
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
