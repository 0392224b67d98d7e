"""Handoff states: tries every order of the steps of a few handoffs with a few faults, and checks the leases after each step.

The lender (`BlockLender` over `HandoffLeases` and `KvBlocks`) and the borrowers (`BlockBorrower`) run the same code as in the
simulated engine (`workers.engines.simulated.direct_transfer`). `BOUNDS` limits the numbers of handoffs and of faults. The
prompts of the handoffs share a block. A fault is the death of the lender (which may start again), the death or cancellation
of a borrower, the loss of a connection, or a damaged answer. Other requests of the lender may overwrite every block that is
not leased. Time is not measured: a lease or a deadline may end between any two steps.

Rules:

1. After every step, a leased block has the right bytes for its block hash, the lender locks exactly the leased blocks,
   and a borrower has only right blocks.
2. In every final state (`STEPS_BESIDE`), no lease is open and no block is locked. Every borrower that is alive needs no
   block, has received the blocks, or computes them itself.
3. A lease that a borrower has returned is not open any more, even if its time has not passed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy, deepcopy
from typing import TypeAlias

from msgspec import Struct

from fleet.batching.attempts import BatchedAttempt, Job
from fleet.batching.handoff_leases import LoanState
from fleet.batching.kv_blocks import KvBlocks
from fleet.core.clock import Nanos
from fleet.core.ids import RequestId
from kvstore.block import BlockHash
from workers.engines.simulated.direct_transfer import BlockBorrower, BlockLender, BlockLoan, BlockRequest, LentBlock

SHARED, FIRST, SECOND_ = (BlockHash(letter * 16) for letter in (b"a", b"b", b"c"))
PROMPTS = ((SHARED, FIRST), (SHARED, SECOND_))
POOL_BLOCKS = 5
LEASE = Nanos(1000)
BOUNDS = ((1, 3), (2, 1))
"""Numbers of handoffs and of faults in each exploration: one handoff with up to three faults, and two handoffs with
at most one fault."""

OTHER_WORK = 1  # how often, in each sequence of steps, other requests may overwrite all blocks that are not leased
ENDED = (LoanState.RECEIVED, LoanState.NEEDLESS, LoanState.COMPUTING)

Action = tuple[str, int]


class HandoffExploration(Struct, kw_only=True):
    """Result of all explorations: counts of states and steps, and the violation that was found, if any."""

    states: int
    steps: int
    ends: int  # number of final states (`STEPS_BESIDE`)
    deaths: int  # number of steps that end a lender or a borrower
    violation: str = ""
    path: tuple[str, ...] = ()  # steps that lead to the violation; empty: none was found


class HandoffViolation(Exception):
    """Error: a state breaks one of the rules 1 to 3 of this module."""


def _content(name: BlockHash) -> bytes:
    return name * 2


class _Lender:
    """Represents one incarnation of a prefill engine that lends blocks to borrowers."""

    def __init__(self) -> None:
        self.blocks: KvBlocks[BlockHash] = KvBlocks(POOL_BLOCKS, 1)
        self.lender = BlockLender(self.blocks, LEASE)
        self.contents: dict[BlockHash, bytearray] = {}


class _HandoffCase:
    """State of one handoff: its lease, its borrower, and the messages on its connection."""

    def __init__(self, names: Sequence[BlockHash]):
        self.names = tuple(names)
        self.lease = ""
        self.borrower: BlockBorrower | None = None
        self.received: tuple[bytes, ...] = ()
        self.dead = False
        self.connected = False  # True if the borrower believes that the connection is open
        self.to_lender: list[BlockRequest] = []
        self.to_borrower: list[BlockLoan] = []
        self.is_returned = False  # True if the lender has read that the lease was returned

    def copy(self) -> "_HandoffCase":
        """Return a copy. It shares with this object only data that no step changes."""
        other = copy(self)
        other.borrower = copy(self.borrower)
        other.to_lender, other.to_borrower = self.to_lender[:], self.to_borrower[:]
        return other


class _HandoffWorld:
    """State of the lender and of all handoffs at one point of an exploration."""

    def __init__(self, handoffs: int, faults: int) -> None:
        self.now = 0
        self.incarnation = 1
        self.lender: _Lender | None = _Lender()
        self.other_work = OTHER_WORK
        self.faults = faults
        self.cases = [_HandoffCase(names) for names in PROMPTS[:handoffs]]

    def copy(self, *, with_lender: bool) -> "_HandoffWorld":
        """Return a copy to perform a step on. The step may change the lender only if `with_lender` is True."""
        other = copy(self)
        other.cases = [case.copy() for case in self.cases]
        if with_lender:
            other.lender = deepcopy(self.lender)
        return other

    # Steps. Each method returns True and changes the state if the step is possible. If not, it returns False.

    def offer(self, number: int) -> bool:
        case, lender = self.cases[number], self.lender
        if lender is None or case.lease:
            return False
        self._work(lender, case.names)
        case.lease = f"{self.incarnation}/{number}"
        self.now += 1
        lender.lender.lend(case.lease, {name: lender.contents[name] for name in case.names}, Nanos(self.now))
        return True

    def accept(self, number: int, missing: int = 2) -> bool:
        """Let the borrower of a handoff begin to fetch the last `missing` blocks, which it does not have.

        If the lender is dead, the borrower computes these blocks itself.
        """
        case = self.cases[number]
        if not case.lease or case.dead or case.borrower is not None:
            return False
        case.borrower = borrower = BlockBorrower(
            case.lease, case.names[len(case.names) - missing :], len(_content(SHARED))
        )
        if self.lender is None:
            borrower.fail()
            return True
        request = borrower.begin()
        case.to_lender.append(request)
        case.connected = not request.done
        return True

    def decline(self, number: int) -> bool:
        return self.accept(number, missing=0)

    def serve(self, number: int) -> bool:
        case = self.cases[number]
        if self.lender is None or not case.to_lender:
            return False
        request = case.to_lender.pop(0)
        loan = self.lender.lender.answer(request)
        case.is_returned = case.is_returned or request.done
        if loan is not None and case.connected:
            case.to_borrower.append(loan)
        return True

    def receive(self, number: int) -> bool:
        case = self.cases[number]
        if not case.to_borrower:
            return False
        assert case.borrower is not None
        case.received = tuple(case.borrower.receive(case.to_borrower.pop(0)))
        case.to_lender.append(case.borrower.end())
        case.connected = False
        return True

    def expire(self, number: int) -> bool:
        """Let time pass until the next lease ends, and end all leases whose time is over."""
        if number or self.lender is None or (ends := self.lender.lender.leases.next_end) is None:
            return False
        self.lender.lender.expire(ends)
        return True

    def time_out(self, number: int) -> bool:
        """Let the borrower's deadline pass. Messages that the borrower has sent still arrive."""
        case = self.cases[number]
        if not case.connected:
            return False
        assert case.borrower is not None
        case.borrower.fail()
        case.connected = False
        case.to_borrower.clear()
        return True

    # Faults. Like the steps, each method returns True and changes the state if the fault is possible.

    def lose(self, number: int) -> bool:
        """Break the connection, and lose all messages on it."""
        case = self.cases[number]
        if not (case.connected or case.to_lender):
            return False
        self._break(case)
        return True

    def damage(self, number: int) -> bool:
        case = self.cases[number]
        if not case.to_borrower or case.to_borrower[0].blocks[0] is None:
            return False
        first, *others = case.to_borrower[0].blocks
        assert first is not None
        wrong = LentBlock(crc32c=first.crc32c, content=b"?" + first.content[1:])
        case.to_borrower[0] = BlockLoan(blocks=(wrong, *others))
        return True

    def die(self, number: int) -> bool:
        """End the borrower, or cancel its attempt if no borrower has begun. Messages that the borrower has sent still arrive."""
        case = self.cases[number]
        if case.dead or not case.lease:
            return False
        case.dead = True
        case.connected = False
        case.to_borrower.clear()
        return True

    def kill_lender(self, number: int) -> bool:
        if number or self.lender is None or self.incarnation > 1:
            return False
        self.lender = None
        for case in self.cases:
            self._break(case)
        return True

    def restart_lender(self, number: int) -> bool:
        """Start a new lender at the address of the first one, after its death. So borrowers that connect late reach the new lender."""
        if number or self.lender is not None:
            return False
        self.incarnation += 1
        self.lender = _Lender()
        return True

    def overwrite(self, number: int) -> bool:
        """Let other requests of the lender take all blocks that are not leased, and write to them."""
        lender = self.lender
        if number or lender is None or not self.other_work or not lender.blocks.available:
            return False
        self.other_work -= 1
        self._work(
            lender,
            tuple(BlockHash(bytes([120 + self.other_work, index]) * 8) for index in range(lender.blocks.available - 1)),
        )
        return True

    def _work(self, lender: _Lender, names: Sequence[BlockHash]) -> None:
        """Compute a prompt of these blocks on the lender, and leave them in its cache. The bytes of evicted blocks are overwritten."""
        job = Job(attempt_id=RequestId("work"), prompt_tokens=len(names), answer_tokens=1, keys=names)
        attempt: BatchedAttempt[BlockHash] = BatchedAttempt(job)
        if not lender.blocks.reserve(attempt, lender.blocks.leading(names)):
            raise HandoffViolation(f"the lender has no room for {len(names)} blocks: {lender.blocks.used} are held")
        lender.blocks.name(attempt, names, len(names))
        for evicted in lender.blocks.changes()[1]:
            if evicted in lender.contents:
                # other requests now use the memory of the evicted block and overwrite it
                lender.contents.pop(evicted)[:] = b"!" * len(_content(evicted))
        for name in names:
            lender.contents.setdefault(name, bytearray(_content(name)))
        lender.blocks.free(attempt)

    def _break(self, case: _HandoffCase) -> None:
        case.to_lender.clear()
        case.to_borrower.clear()
        if case.connected and case.borrower is not None:
            case.borrower.fail()
        case.connected = False

    # Checks of the rules of this module.

    def check(self) -> None:
        """Assert rules 1 and 3 of this module, after a step."""
        if self.lender is not None:
            self.lender.lender.check()
            self.lender.blocks.check(0)
            leased = {name for case in self.cases if self._is_open(case) for name in case.names}
            _demand(
                self.lender.blocks.used == len(leased),
                f"{self.lender.blocks.used} blocks are held, {len(leased)} leased",
            )
            for name in leased:
                _demand(bytes(self.lender.contents.get(name, b"")) == _content(name), "a leased block was overwritten")
        for number, case in enumerate(self.cases):
            begin = 0 if case.borrower is None else len(case.names) - len(case.received)
            known = [_content(name) for name in case.names]
            _demand(
                any(list(case.received) == known[start : start + len(case.received)] for start in range(begin + 1)),
                f"the borrower of handoff {number} has a wrong block",
            )
            _demand(
                not (case.is_returned and self._is_open(case)),
                f"the lease of handoff {number} was returned, and is open",
            )

    def check_end(self) -> None:
        """Assert rule 2 of this module, in a final state."""
        if self.lender is not None:
            _demand(not len(self.lender.lender.leases), "a lease stays open for ever")
            _demand(not self.lender.blocks.used, "blocks stay held for ever")
        for number, case in enumerate(self.cases):
            waits = case.lease and not case.dead and (case.borrower is None or case.borrower.state not in ENDED)
            _demand(not waits, f"the borrower of handoff {number} waits for ever")

    def _is_open(self, case: _HandoffCase) -> bool:
        return self.lender is not None and self.lender.lender.leases.state(case.lease) is not None

    def key(self) -> tuple[object, ...]:
        """Return a key of the state, by which an exploration recognises a state that it has already visited."""
        lender = self.lender
        return (
            self.incarnation,
            self.other_work,
            self.faults,
            lender is not None
            and (
                tuple(lender.contents),
                *((lease, lender.lender.leases.state(lease)) for lease in lender.lender.leases),
            ),
            *(
                (
                    case.lease,
                    None if case.borrower is None else case.borrower.state,
                    case.received,
                    case.dead,
                    case.connected,
                    tuple(case.to_lender),
                    tuple(case.to_borrower),
                    case.is_returned,
                )
                for case in self.cases
            ),
        )


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise HandoffViolation(otherwise)


STEPS: dict[str, Callable[[_HandoffWorld, int], bool]] = {
    "offer": _HandoffWorld.offer,
    "accept": _HandoffWorld.accept,
    "decline": _HandoffWorld.decline,
    "serve": _HandoffWorld.serve,
    "receive": _HandoffWorld.receive,
    "expire": _HandoffWorld.expire,
    "time out": _HandoffWorld.time_out,
}
FAULTS: dict[str, Callable[[_HandoffWorld, int], bool]] = {
    "lose connection": _HandoffWorld.lose,
    "damage answer": _HandoffWorld.damage,
    "borrower dies": _HandoffWorld.die,
    "lender dies": _HandoffWorld.kill_lender,
}
STEPS_BESIDE: dict[str, Callable[[_HandoffWorld, int], bool]] = {
    "lender restarts": _HandoffWorld.restart_lender,
    "other work overwrites": _HandoffWorld.overwrite,
}
"""Steps that nothing forces to happen. A state is final if only faults and these steps are possible in it."""

DEATHS = ("borrower dies", "lender dies")
LENDER_STEPS = ("offer", "serve", "expire", *STEPS_BESIDE)


def explore(bounds: Sequence[tuple[int, int]] = BOUNDS) -> HandoffExploration:
    """Visit the reachable states until a violation is found.

    The search goes breadth first, so that the reported path to the violation is short.

    Args:
        bounds: For each exploration, the number of handoffs and the largest number of faults.
    """
    result = HandoffExploration(states=0, steps=0, ends=0, deaths=0)
    for handoffs, faults in bounds:
        if not result.violation:
            _explore(_HandoffWorld(handoffs, faults), result)
    return result


def _explore(world: _HandoffWorld, result: HandoffExploration) -> None:
    seen = {world.key()}
    waiting: deque[tuple[_HandoffWorld, _Path]] = deque([(world, None)])
    while waiting and not result.violation:
        world, path = waiting.popleft()
        goes_on = False
        here = world.key()
        for name, following, violation in _following(world):
            result.steps += 1
            result.deaths += name.startswith(DEATHS)
            goes_on = goes_on or name.rpartition(" ")[0] in STEPS
            if violation:
                result.violation, result.path = violation, _steps_of((path, name))
                return
            key = following.key()
            if key == here:
                result.violation, result.path = (
                    "the step changes nothing, so it is possible for ever",
                    _steps_of((path, name)),
                )
                return
            if key not in seen:
                seen.add(key)
                waiting.append((following, (path, name)))
        if not goes_on:
            result.ends += 1
            try:
                world.check_end()
            except HandoffViolation as found:
                result.violation, result.path = str(found), _steps_of(path)
    result.states += len(seen)


_Path: TypeAlias = "tuple[_Path, str] | None"
"""The steps that lead from the first state to a state, as a linked list that begins with the last step; None: no steps."""


def _steps_of(path: _Path) -> tuple[str, ...]:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step)
    return tuple(reversed(steps))


def _following(world: _HandoffWorld) -> Iterator[tuple[str, _HandoffWorld, str]]:
    """Yield for every possible step or fault: its name, the state after it, and a text on the rule that it breaks.

    The text is empty if no rule is broken.
    """
    for name, step in (STEPS | STEPS_BESIDE | FAULTS).items():
        if name in FAULTS and not world.faults:
            continue
        for number in range(len(world.cases)):
            following = world.copy(with_lender=name in LENDER_STEPS)
            try:
                if not step(following, number):
                    continue
                following.faults -= name in FAULTS
                following.check()
            except (HandoffViolation, AssertionError, KeyError) as found:
                yield f"{name} {number}", following, str(found) or repr(found)
            else:
                yield f"{name} {number}", following, ""
