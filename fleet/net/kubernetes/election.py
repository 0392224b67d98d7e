"""Who of several operators acts: the holder of one Lease. Pure.

Rules:

1. Whoever holds the Lease renews it every `retry`. A candidate takes it when it is free, or when it has seen no change of it for its duration,
   by its own clock: clocks of two machines are never compared.
2. A leader that could not renew for `renew_within`, counted from the start of the last renewal that succeeded, stops acting. That is sooner than
   anybody may take the Lease. What it has sent by then may still arrive late: writes are made so that this does no harm
   (`operators.server`, rule 3).
3. A leader that ends gives the Lease back: the next one need not wait.
4. Processes with one identity lead together. Whoever of them finds that the Lease was renewed since it looked last need not have done so itself, and
   whether it was a renewal of its own, of which no answer came, is all the same.
"""

from enum import StrEnum

from msgspec import Struct

from fleet.core.clock import Nanos


class ElectionStep(StrEnum):
    CREATE = "create"
    """There is no Lease: make one, held by us."""

    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


class ObservedLease(Struct, frozen=True, kw_only=True):
    """The Lease as it was read."""

    holder: str
    """Empty: it was given back."""

    version: str
    duration: Nanos


class Election:
    """One candidate's view of the Lease."""

    def __init__(self, identity: str, renew_within: Nanos) -> None:
        """`identity` is no other candidate's; `renew_within` is shorter than the duration that we write into the Lease."""
        self._identity = identity
        self._renew_within = renew_within
        self._seen: tuple[str, str] | None = None
        self._seen_at = Nanos(0)
        self._held_since: Nanos | None = None
        self._ours: tuple[str, Nanos] | None = None
        """The version in which we last found it to be ours, and when that was."""

    def step(self, found: ObservedLease | None, now: Nanos) -> ElectionStep:
        """What to do with the Lease that was just read; None: there is none."""
        if found is None:
            return ElectionStep.CREATE
        if found.holder == self._identity:
            if self._ours is not None and self._ours[0] != found.version:
                self._held_since = max(self._ours[1], self._held_since or self._ours[1])
            self._ours = found.version, now
            return ElectionStep.RENEW
        self._held_since = self._ours = None  # somebody has taken it, or it was given back
        if not found.holder:
            return ElectionStep.TAKE
        if self._seen != (found.holder, found.version):
            self._seen, self._seen_at = (found.holder, found.version), now
        return ElectionStep.TAKE if now >= self._seen_at + found.duration else ElectionStep.WAIT

    def wrote(self, began: Nanos) -> None:
        """The Lease is ours, by a write that began then."""
        self._held_since = began

    def gave_back(self) -> None:
        self._held_since = self._ours = None

    def leads(self, now: Nanos) -> bool:
        return (ends := self.ends()) is not None and now < ends

    def ends(self) -> Nanos | None:
        """When we stop acting, unless we renew; None: we do not act."""
        return None if self._held_since is None else Nanos(self._held_since + self._renew_within)
