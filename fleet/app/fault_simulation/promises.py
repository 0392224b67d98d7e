"""Promises that the fault simulation asserts, and the exception of a run that breaks one."""

from enum import StrEnum


class Promise(StrEnum):
    ONE_END = "every request ends exactly once"
    EXACT_TOKENS = "no token is lost, repeated or wrong"
    RETRIED = "a request ends with an error only if it has one"
    ENDS_IN_TIME = "every request ends in bounded time after the faults have ended"
    GETS_WELL = "the cluster gets well in bounded time after the faults have ended"
    NOTHING_HELD = "reservations, slots, leases and pins return to zero"
    PUBLISHED = "no block is served that was not published"
    RIGHT_BLOCKS = "no block is used that has other bytes than its name says"
    CONSISTENT = "every machine's invariants hold"


class PromiseBroken(Exception):
    """The run of a seed broke a promise; the message states which one, and how."""

    def __init__(self, promise: Promise, detail: str):
        super().__init__(f"{promise}: {detail}")
        self.promise = promise
        self.detail = detail
