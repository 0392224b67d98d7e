"""Time as integers, and who may tell it: the store's words, since what it is given comes from our clocks."""

from kvstore.clock import MILLISECOND, SECOND, Clock, Nanos

__all__ = ["MILLISECOND", "SECOND", "Clock", "Nanos"]
