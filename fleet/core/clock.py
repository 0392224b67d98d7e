"""Time as integers, and the Clock port. `kvstore.clock` defines both, because the store gets times from workers and routers."""

from kvstore.clock import MILLISECOND, SECOND, Clock, Nanos

__all__ = ["MILLISECOND", "SECOND", "Clock", "Nanos"]
