"""Clock: exports the time in integer nanoseconds and the port `Clock`, which `kvstore.clock` defines."""

from kvstore.clock import MILLISECOND, SECOND, Clock, Nanos

__all__ = ["MILLISECOND", "SECOND", "Clock", "Nanos"]
