"""Clock: exports from `kvstore.clock` the type `Nanos` for times in integer nanoseconds, two units of it, and the port `Clock`."""

from kvstore.clock import MILLISECOND, SECOND, Clock, Nanos

__all__ = ["MILLISECOND", "SECOND", "Clock", "Nanos"]
