"""Leader election: decides by one Lease, without I/O, which of several candidates acts.

Rules:

1. The leader renews the Lease regularly. A candidate takes the Lease if it is free, or if the candidate has seen no
   change of the Lease for the Lease's duration. The candidate measures this time by its own clock: the clocks of two
   machines are never compared.
2. A leader that could not renew for `renew_within`, counted from the start of its last successful renewal, stops
   acting. That is earlier than any candidate may take the Lease. The last writes of this leader may still arrive late;
   they are harmless then (`operators.controller.applier`, rule 3).
3. A leader that ends gives the Lease back, so that the next leader need not wait.
4. Processes with the same identity lead together. If one of these processes finds the Lease renewed, it cannot know
   which of them renewed it. Its own renewal may have arrived although the answer was lost. This makes no difference,
   because all of these processes may act.
"""

from enum import StrEnum

from msgspec import Struct

from fleet.core.clock import Nanos


class ElectionStep(StrEnum):
    CREATE = "create"
    """The Lease does not exist, so the candidate creates it with itself as the holder."""

    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


class ObservedLease(Struct, frozen=True, kw_only=True):
    """State of the Lease as one reading from the API server has found it."""

    holder: str
    """Identity of the holder; empty: the Lease was given back."""

    version: str
    duration: Nanos


class Election:
    """Decides for one candidate what to do with the Lease, and whether the candidate acts as the leader."""

    def __init__(self, identity: str, renew_within: Nanos) -> None:
        """Start as a follower.

        `identity` is the name of the candidate; processes with the same identity are one candidate (rule 4). `renew_within`
        must be shorter than the duration in the Lease.
        """
        self._identity = identity
        self._renew_within = renew_within
        self._seen: tuple[str, str] | None = None
        self._seen_at = Nanos(0)
        self._held_since: Nanos | None = None
        self._ours: tuple[str, Nanos] | None = None
        """Version of the Lease when it was last read with this candidate as its holder, and the instant of that reading."""

    def step(self, found: ObservedLease | None, now: Nanos) -> ElectionStep:
        """Return what to do with the Lease that was just read; `found` is None if there is no Lease."""
        if found is None:
            return ElectionStep.CREATE
        if found.holder == self._identity:
            if self._ours is not None and self._ours[0] != found.version:
                self._held_since = max(self._ours[1], self._held_since or self._ours[1])
            self._ours = found.version, now
            return ElectionStep.RENEW
        # A candidate with a different identity holds the Lease, or it was given back.
        self._held_since = self._ours = None
        if not found.holder:
            return ElectionStep.TAKE
        if self._seen != (found.holder, found.version):
            self._seen, self._seen_at = (found.holder, found.version), now
        return ElectionStep.TAKE if now >= self._seen_at + found.duration else ElectionStep.WAIT

    def wrote(self, began: Nanos) -> None:
        """Record that this candidate has written itself as the holder, by a write that began at the given instant."""
        self._held_since = began

    def gave_back(self) -> None:
        self._held_since = self._ours = None

    def leads(self, now: Nanos) -> bool:
        return (ends := self.ends()) is not None and now < ends

    def ends(self) -> Nanos | None:
        """Return the instant at which this candidate stops acting unless it renews the Lease; None: it does not act now."""
        return None if self._held_since is None else Nanos(self._held_since + self._renew_within)
