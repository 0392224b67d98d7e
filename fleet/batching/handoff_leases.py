"""Handoff leases: decide how long a prefill engine keeps the blocks of a prompt for a decode engine.

The prefill engine is the lender, the decode engine the borrower. Rules:

1. The lender offers the blocks of a prompt under a lease. The lender keeps the blocks until the borrower returns the lease, or until
   the lease ends by itself. So if a borrower dies or never asks for the blocks, the lender keeps them at most for the duration of the
   lease.
2. The borrower accepts the handoff when it has room for the prompt. It pulls all blocks that it lacks in one exchange, and then
   returns the lease. A borrower that lacks no block returns the lease at once.
3. If a step fails (no connection, no answer in time, a missing or wrong block), the borrower computes the blocks that it lacks. It
   does not use this lease any more.
4. After a lease has ended, a late borrower gets no blocks, because the memory of the blocks may already have other content. The leases
   of a lender end with its process, and the process that follows it does not know them.
5. `NEXT_LEASE` and `NEXT_LOAN` are the transition tables of the two sides. `fleet.app.fault_simulation.handoff_states` runs the code
   of both sides through all orders of their steps, with the death of either side at every point.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Generic

from msgspec import Struct

from fleet.batching.attempts import Name
from fleet.batching.kv_blocks import KvBlocks
from fleet.core.clock import Nanos


class LeaseState(StrEnum):
    """State of a lease, as the lender sees it."""

    OFFERED = "offered"
    PULLED = "pulled"  # the borrower has requested the blocks, and may have received them
    RETURNED = "returned"
    EXPIRED = "expired"


class LeaseStep(StrEnum):
    PULL = "pull"
    RETURN = "return"
    EXPIRE = "expire"


NEXT_LEASE: Mapping[tuple[LeaseState, LeaseStep], LeaseState] = {
    (LeaseState.OFFERED, LeaseStep.PULL): LeaseState.PULLED,
    (LeaseState.OFFERED, LeaseStep.RETURN): LeaseState.RETURNED,  # the borrower had all blocks already
    (LeaseState.OFFERED, LeaseStep.EXPIRE): LeaseState.EXPIRED,
    (LeaseState.PULLED, LeaseStep.RETURN): LeaseState.RETURNED,
    (LeaseState.PULLED, LeaseStep.EXPIRE): LeaseState.EXPIRED,
}


class LoanState(StrEnum):
    """State of a lease, as the borrower sees it."""

    OFFERED = "offered"  # the borrower has the handoff, and waits for room in its engine
    PULLING = "pulling"
    RECEIVED = "received"  # the borrower uses the leading blocks that arrived completely
    NEEDLESS = "needless"  # the borrower lacked no block
    COMPUTING = "computing"


class LoanStep(StrEnum):
    PULL = "pull"
    DECLINE = "decline"
    RECEIVE = "receive"
    FAIL = "fail"


NEXT_LOAN: Mapping[tuple[LoanState, LoanStep], LoanState] = {
    (LoanState.OFFERED, LoanStep.PULL): LoanState.PULLING,
    (LoanState.OFFERED, LoanStep.DECLINE): LoanState.NEEDLESS,
    (LoanState.OFFERED, LoanStep.FAIL): LoanState.COMPUTING,  # the lender cannot be reached
    (LoanState.PULLING, LoanStep.RECEIVE): LoanState.RECEIVED,
    (LoanState.PULLING, LoanStep.FAIL): LoanState.COMPUTING,
}


class IllegalHandoffStep(AssertionError):
    """Error: `NEXT_LEASE` or `NEXT_LOAN` does not have this step in this state, so the code of the lender or the borrower has a bug."""


def advance_lease(state: LeaseState, step: LeaseStep) -> LeaseState:
    """Return the next state of a lease at the lender. Raise IllegalHandoffStep if `NEXT_LEASE` has none."""
    if (following := NEXT_LEASE.get((state, step))) is None:
        raise IllegalHandoffStep(f"a lease that is {state} cannot {step}")
    return following


def advance_loan(state: LoanState, step: LoanStep) -> LoanState:
    """Return the next state of a lease at the borrower. Raise IllegalHandoffStep if `NEXT_LOAN` has none."""
    if (following := NEXT_LOAN.get((state, step))) is None:
        raise IllegalHandoffStep(f"a loan that is {state} cannot {step}")
    return following


class _HandoffLease(Struct, Generic[Name]):
    names: Sequence[Name]
    until: Nanos
    state: LeaseState = LeaseState.OFFERED


class HandoffLeases(Generic[Name]):
    """Keeps the open leases of one lender. The caller keeps the bytes of the blocks."""

    def __init__(self, blocks: KvBlocks[Name], lasting: Nanos):
        """Begin without leases.

        Args:
            blocks: The blocks of the lender's engine. A block under an open lease is not evicted.
            lasting: Duration of each lease in nanoseconds.
        """
        self._blocks = blocks
        self._lasting = lasting
        # The open leases by name, in the order in which they end, because all leases last equally long.
        self._open: dict[str, _HandoffLease[Name]] = {}
        self.expired = 0  # number of leases so far that ended by themselves, because they were not returned in time

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    @property
    def next_end(self) -> Nanos | None:
        """The instant at which the next lease ends by itself; None if no lease is open."""
        return next((lease.until for lease in self._open.values()), None)

    def offer(self, lease: str, names: Sequence[Name], now: Nanos) -> None:
        """Open a lease on blocks with these names, which must be in the cache. The name of the lease must never have been used before."""
        assert lease not in self._open, lease
        self._blocks.hold(names)
        self._open[lease] = _HandoffLease(names=tuple(names), until=Nanos(now + self._lasting))

    def pull(self, lease: str) -> Sequence[Name]:
        """Record that the borrower pulls the blocks of a lease. Return their names, or an empty sequence if the lease has ended."""
        pulled = self._open.get(lease)
        if pulled is None:
            return ()
        if pulled.state is not LeaseState.PULLED:  # a second request of the borrower gets the blocks again
            pulled.state = advance_lease(pulled.state, LeaseStep.PULL)
        return pulled.names

    def give_back(self, lease: str) -> bool:
        """End a lease that the borrower has returned (rule 2). Return False if the lease has already ended."""
        return self._end(lease, LeaseStep.RETURN)

    def expire(self, now: Nanos) -> Sequence[str]:
        """End the leases whose duration has passed. Return the names of these leases."""
        ended = [lease for lease, held in self._open.items() if held.until <= now]
        for lease in ended:
            self._end(lease, LeaseStep.EXPIRE)
        self.expired += len(ended)
        return ended

    def state(self, lease: str) -> LeaseState | None:
        """Return the state of a lease, or None if no lease of this name is open."""
        held = self._open.get(lease)
        return None if held is None else held.state

    def check(self) -> None:
        """Assert that the blocks of every open lease are in the cache, and that the leases are in the order of their ends."""
        ends = [lease.until for lease in self._open.values()]
        assert ends == sorted(ends)
        for lease, held in self._open.items():
            assert held.state in (LeaseState.OFFERED, LeaseState.PULLED), lease
            assert all(name in self._blocks for name in held.names), lease

    def _end(self, lease: str, step: LeaseStep) -> bool:
        if (ended := self._open.pop(lease, None)) is None:
            return False
        ended.state = advance_lease(ended.state, step)
        self._blocks.release(ended.names)
        return True
