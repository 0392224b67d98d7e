"""Costs of candidates: native where it was built (`costs.c`), numpy elsewhere, the same numbers to the last bit."""

try:
    from fleet.router.native._costs import fleet_costs, lowest

    BUILT = True
    """Whether the native module runs."""
except ImportError:  # not built
    from fleet.router.native.twin import fleet_costs, lowest

    BUILT = False

__all__ = ["BUILT", "fleet_costs", "lowest"]
