"""Time as integers, and the Clock port. Both come from the store, because workers and routers pass it their times."""

from kvstore.clock import MILLISECOND, SECOND, Clock, Nanos

__all__ = ["MILLISECOND", "SECOND", "Clock", "Nanos"]
