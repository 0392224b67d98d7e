"""Session pauses: replays recorded sessions to compare policies for the KV of sessions that wait for a tool or a user.

Rules:

1. There are two tiers in LRU order: memory, and a lower tier (SSD) that receives the blocks that memory evicts. When a
   session resumes, its blocks that are not in memory are loaded from the lower tier. Blocks that are in neither tier
   are computed again, and so are all blocks after the first such block. The cost of the resume is the sum of the costs
   of the chain's blocks (`BlockCosts`).
2. The length of a pause is predicted from earlier pauses of all sessions. Only pauses in a similar situation count: the
   pause before them in the same session was about as long as the last pause of this session (`GapTimes`). The length of
   a pause is known only when it is over. While too few lengths are known, the predicted length is `longest_hold`.
3. Under `HOLD`, the chain of a session is pinned in memory at the end of a request. The pin has a deadline: it lasts
   for the `LATEST` quantile of the predicted pause, but at most for `longest_hold`. All pins together pin at most
   `held_blocks`. If a chain does not fit, only its beginning is pinned, as in `kvstore.pool.session_pins`. Pinned
   blocks are not evicted.
4. A pin ends when the session resumes, or at its deadline. Its blocks then count as just used.
5. Under `ADAPT`, a chain whose pin ends at its deadline becomes the next to be evicted from memory. A pause is
   predicted to be long if the `EARLIEST` quantile of its predicted length exceeds `longest_hold`. In a long pause, the
   chain gets no pin, and becomes the next to be evicted. At the `EARLIEST` quantile, its blocks are loaded into memory,
   and pinned as in rule 3.
6. Requests without a session (number 0) use memory like other requests, but have no pauses, and their costs are not
   counted.
"""

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.trace_replay import TraceRequest

EARLIEST = 0.25
LATEST = 0.9
LEAST_SEEN = 20  # minimum number of known pauses in a class before the quantiles of the class are used
GAP_EDGES = tuple(round(1.25**step * SECOND) for step in range(-4, 56))
"""Bounds between classes of pause lengths, in nanoseconds: from 0.4 s to 2.5 days, each bound 1.25 times the
one before."""

CLASS_EDGES = tuple(each * SECOND for each in (5, 10, 20, 40, 80, 160, 640))


class PausePolicy(StrEnum):
    NOTHING = "nothing"  # no pins and no prefetches: memory and the lower tier are plain LRU caches
    HOLD = "hold"
    ADAPT = "adapt"


class BlockCosts(Struct, frozen=True, kw_only=True):
    """The time that it takes to get one block, in nanoseconds, for each place where the block can be."""

    memory: int  # time if the block is in memory
    below: int  # time if the block is in the lower tier, and not in memory
    compute: int


class PauseReport(Struct, frozen=True, kw_only=True):
    """Costs of all resumes of a replay. Each request of a session except the first one is a resume."""

    resumes: int
    mean_seconds: float
    p90_seconds: float
    recompute_mean_seconds: float  # mean cost of a resume if the whole prompt were computed each time
    memory_blocks: int  # number of blocks of resumed chains that were in memory
    below_blocks: int
    computed_blocks: int
    written_blocks: int  # number of blocks written to the lower tier
    prefetched_blocks: int  # number of blocks loaded into memory before the session resumed
    holds: int
    overdue: int  # number of pins that ended at their deadline, before their session resumed
    most_held_blocks: int


class GapTimes:
    """Counts the lengths of pauses, separately for each class of the previous pause's length."""

    def __init__(self) -> None:
        self._counts = [[0] * (len(GAP_EDGES) + 1) for _ in range(len(CLASS_EDGES) + 2)]

    def seen(self, before: Nanos | None, gap: Nanos) -> None:
        self._counts[_class(before)][bisect_right(GAP_EDGES, gap)] += 1

    def quantile(self, before: Nanos | None, share: float) -> tuple[Nanos, Nanos] | None:
        """Return the two bounds between which the quantile `share` of the pause lengths lies.

        Only pauses after a pause about as long as `before` count. Return None if fewer than `LEAST_SEEN` are known.
        """
        counts = self._counts[_class(before)]
        total = sum(counts)
        if total < LEAST_SEEN:
            return None
        left = share * total
        shorter = 0
        for edge, count in zip(GAP_EDGES, counts, strict=False):
            left -= count
            if left <= 0:
                return Nanos(shorter), Nanos(edge)
            shorter = edge
        return Nanos(shorter), Nanos(shorter)


class _Session:
    """Records the state of one session during the replay."""

    __slots__ = ("chain", "gap", "held", "hold", "last")

    def __init__(self) -> None:
        self.chain: Sequence[int] = ()
        self.last: Nanos | None = None  # instant of the last request; None before the first one
        self.gap: Nanos | None = None  # length of the pause before the last request; None before the second request
        self.held: Sequence[int] = ()
        # Number of the session's current pin or prefetch. Deadlines of `_due` with another number are ignored.
        self.hold = 0


class _PauseReplay:
    def __init__(self, policy: PausePolicy, memory_blocks: int, below_blocks: int, held_blocks: int, longest: Nanos):
        self._policy = policy
        self._capacity = memory_blocks
        self._below_capacity = below_blocks
        self._most_held = held_blocks
        self._longest = longest
        self._memory: OrderedDict[int, None] = OrderedDict()  # unpinned blocks, the longest unused one first
        self._pinned: dict[int, int] = {}  # pinned block -> number of sessions that pin it
        self._below: OrderedDict[int, None] = OrderedDict()
        self._gaps = GapTimes()
        self._sessions: dict[int, _Session] = {}
        self._due: list[tuple[Nanos, int, int, bool]] = []  # deadline, session, number of the pin, whether to prefetch
        self.written = self.prefetched = self.holds = self.overdue = self.most_held = 0

    def resume(self, request: TraceRequest) -> tuple[int, int, int] | None:
        """Replay a request (rule 1).

        Return how many of its blocks come from memory, come from the lower tier, and are computed. The result is None
        for the first request of a session, and for requests without a session.
        """
        now = request.arrival
        while self._due and self._due[0][0] <= now:
            self._fall_due(*heapq.heappop(self._due))
        session = self._sessions.setdefault(request.session, _Session())
        self._release(session)
        session.hold += 1
        found = None
        if not request.session:
            self._bring(request.chain)
            return None
        if session.last is not None:
            gap = Nanos(now - session.last)
            self._gaps.seen(session.gap, gap)
            session.gap = gap
            found = self._look(request.chain)
        self._bring(request.chain)
        session.chain, session.last = request.chain, now
        if self._policy is not PausePolicy.NOTHING:
            self._pause(request.session, session, now)
        return found

    def _look(self, chain: Sequence[int]) -> tuple[int, int, int]:
        memory = below = 0
        for block in chain:
            if block in self._memory or block in self._pinned:
                memory += 1
            elif block in self._below:
                below += 1
            else:
                break
        return memory, below, len(chain) - memory - below

    def _bring(self, chain: Sequence[int]) -> int:
        """Load a chain into memory and mark it as just used; return how many blocks were loaded.

        If memory has no room for the whole chain beside the pinned blocks, the end of the chain is not loaded.
        """
        new = [block for block in chain if block not in self._memory and block not in self._pinned]
        for block in reversed(chain):
            if block in self._memory:
                self._memory.move_to_end(block)
        kept = len(chain) - len(new)
        del new[max(0, self._capacity - len(self._pinned) - kept) :]
        self._make_room(len(new))
        for block in reversed(new):
            self._memory[block] = None
        for block in reversed(chain):
            if block in self._memory:
                self._memory.move_to_end(block)
        return len(new)

    def _make_room(self, blocks: int) -> None:
        while self._memory and len(self._memory) + len(self._pinned) + blocks > self._capacity:
            block, _ = self._memory.popitem(last=False)
            self._sink(block)

    def _sink(self, block: int) -> None:
        if block in self._below:
            self._below.move_to_end(block)
            return
        self._below[block] = None
        self.written += 1
        if len(self._below) > self._below_capacity:
            self._below.popitem(last=False)

    def _pause(self, number: int, session: _Session, now: Nanos) -> None:
        earliest = self._gaps.quantile(session.gap, EARLIEST)
        latest = self._gaps.quantile(session.gap, LATEST)
        if earliest is None or latest is None:
            self._hold(number, session, Nanos(now + self._longest))
            return
        if self._policy is PausePolicy.ADAPT and earliest[0] > self._longest:
            self._demote(session.chain)
            heapq.heappush(self._due, (Nanos(now + earliest[0]), number, session.hold, True))
        else:
            self._hold(number, session, Nanos(now + min(latest[1], self._longest)))

    def _demote(self, chain: Sequence[int]) -> None:
        """Make the unpinned blocks of a chain the next to be evicted from memory, the end of the chain first."""
        for block in chain:
            if block in self._memory:
                self._memory.move_to_end(block, last=False)

    def _hold(self, number: int, session: _Session, until: Nanos) -> None:
        held: list[int] = []
        room = self._most_held - len(self._pinned)
        for block in session.chain:
            if block in self._pinned:
                self._pinned[block] += 1
            elif room > 0 and block in self._memory:
                del self._memory[block]
                self._pinned[block] = 1
                room -= 1
            else:
                break
            held.append(block)
        if held:
            session.held = held
            self.holds += 1
            self.most_held = max(self.most_held, len(self._pinned))
            heapq.heappush(self._due, (until, number, session.hold, False))

    def _release(self, session: _Session) -> None:
        for block in reversed(session.held):
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]
                self._memory[block] = None
        session.held = ()

    def _fall_due(self, when: Nanos, number: int, hold: int, is_prefetch: bool) -> None:
        session = self._sessions[number]
        if session.hold != hold:
            return  # the session has resumed meanwhile
        if not is_prefetch:
            self.overdue += 1
            self._release(session)
            if self._policy is PausePolicy.ADAPT:
                self._demote(session.chain)
            return
        assert session.last is not None, "a session pauses after its first request"
        latest = self._gaps.quantile(session.gap, LATEST)
        memory, below, _ = self._look(session.chain)
        fitting = min(memory + below, self._most_held - len(self._pinned))
        if latest is not None and fitting > 0:
            self.prefetched += self._bring(session.chain[:fitting])
            self._hold(number, session, Nanos(min(max(session.last + latest[1], when), when + self._longest)))


def replay_pauses(
    requests: Iterable[TraceRequest],
    policy: PausePolicy,
    pace: BlockCosts,
    *,
    memory_blocks: int,
    below_blocks: int,
    held_blocks: int,
    longest_hold: Nanos,
) -> PauseReport:
    """Replay recorded requests, in the order of their arrival, and return the costs of the resumes.

    Memory and the lower tier are empty at the start. All pins together pin at most `held_blocks`, which is at most
    `memory_blocks`. A pin lasts at most `longest_hold` after its request or prefetch. Requests and prefetches take no
    time in a replay.
    """
    assert 0 <= held_blocks <= memory_blocks, held_blocks
    pauses = _PauseReplay(policy, memory_blocks, below_blocks, held_blocks, longest_hold)
    costs: list[int] = []
    memory = below = computed = 0
    for request in requests:
        found = pauses.resume(request)
        if found is None:
            continue
        memory += found[0]
        below += found[1]
        computed += found[2]
        costs.append(found[0] * pace.memory + found[1] * pace.below + found[2] * pace.compute)
    everything = memory + below + computed
    ordered = sorted(costs)
    return PauseReport(
        resumes=len(costs),
        mean_seconds=sum(costs) / len(costs) / SECOND if costs else 0.0,
        p90_seconds=ordered[int(0.9 * len(ordered))] / SECOND if ordered else 0.0,
        recompute_mean_seconds=everything * pace.compute / len(costs) / SECOND if costs else 0.0,
        memory_blocks=memory,
        below_blocks=below,
        computed_blocks=computed,
        written_blocks=pauses.written,
        prefetched_blocks=pauses.prefetched,
        holds=pauses.holds,
        overdue=pauses.overdue,
        most_held_blocks=pauses.most_held,
    )


def _class(before: Nanos | None) -> int:
    return 0 if before is None else 1 + bisect_right(CLASS_EDGES, before)
