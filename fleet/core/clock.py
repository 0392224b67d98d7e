"""Clock: exports from `kvstore.clock` the type of times in integer nanoseconds, two units, and the port `Clock`."""

from kvstore.clock import MILLISECOND, SECOND, Clock, Nanos

__all__ = ["MILLISECOND", "SECOND", "Clock", "Nanos"]
