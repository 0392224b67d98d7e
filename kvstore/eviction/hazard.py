"""Hazard eviction: evicts the block that is expected to save the least time per second and byte of memory.

Rules:

1. The value of a block is the product of its expected uses per second (`kvstore.eviction.reuse_times`) and the time
   that a use saves per byte because the pool has the block (`kvstore.eviction.hit_savings`). The policy learns the
   expected uses for each class of blocks, from the uses of the blocks.
2. The class of a block is its number of uses and the rhythm of its chain. The rhythm says whether the last two uses of
   the longest known part of the chain were less than 30 s apart (`RHYTHMS`). A conversation that has continued before
   is more likely to continue again, and an agent returns sooner than a person. Other features of a chain add little. An
   example is the second half of the public conversation trace, with a cache for a twentieth of the blocks: the hit rate
   of this policy is 24.5 %, and that of boosted trees over a dozen features of chains is 25.9 %
   (`loadtests/kvstore/reuse_bound.py`).
3. Blocks that are admitted at one instant belong to one chain, and its last block is admitted first. Consecutive blocks
   of this chain with the same class form a *run*. All runs with the same class and the same saving per byte form a
   *row*, ordered by last use. The value as a function of the age has a single maximum, so the least valuable run of a
   row is its first or its last one. Only these two are candidates. A choice therefore costs a few steps per row; the
   number of blocks does not matter.
4. A chain is evicted from its end: if later runs of the chain of the chosen run are still held, the last of them is
   evicted instead.
5. Uses within `SAME_USE` count as one use.
6. Evicted blocks are remembered for a while, so that the policy learns from their return. The memory is bounded.
"""

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policy import SAME_USE, K
from kvstore.eviction.reuse_times import USES, ReuseCohort, ReuseTimes

RHYTHMS = (Nanos(30 * SECOND),)
"""Lower bounds of all rhythm classes except the first one. The rhythm of a chain is the time between its last two uses.
The first class has the rhythms below the first bound, and the chains that were used only once."""

LEARN_AFTER = 512  # minimum number of block uses between two calls of `ReuseTimes.learn`
LEARN_SHARE = 1 / 64  # the same minimum, as a share of all block uses until now; both minimums apply
PAUSE = Nanos(1 * SECOND)  # minimum time between two rankings of all candidates for eviction (rule 3)
REMEMBERED = 32_768
"""Maximum number of evicted blocks that are remembered. If the pool holds more blocks than this, the maximum is the
number of held blocks."""


Row = tuple[int, float]
"""Key of a row of runs (rule 3): the class of the runs, and the seconds that a use saves per byte."""


Candidate = tuple[float, Nanos, Row, bool]
"""Candidate for eviction: the run at one end of a row (rule 3). The tuple has the run's value, the instant of its last
use, the key of the row, and True if the run is the newest one of the row."""


class _ChainRun(Generic[K]):
    """A run (rule 3): consecutive blocks of one chain that were last used at the same instant, and equally often."""

    __slots__ = ("cohort", "following", "keys", "live", "rhythm", "row", "used_at", "uses")

    def __init__(self, used_at: Nanos, uses: int, rhythm: int, row: Row):
        self.used_at = used_at
        self.uses = uses
        self.rhythm = rhythm
        self.row = row
        # The run's blocks in the order of the chain. Some of them may have been evicted, or moved to another run.
        self.keys: list[K] = []
        self.live = 0  # number of the run's blocks that were neither evicted nor moved to another run
        self.cohort: ReuseCohort
        self.following: _ChainRun[K] | None = None  # run that continued the chain when this run was last used


class HazardEviction(Generic[K]):
    """Eviction policy that evicts the block with the least expected value, by the rules of this module."""

    def __init__(self, saving: Callable[[K, int], float] | None = None, *, remembered: int = REMEMBERED):
        """Start without observations. Until the policy has learned, blocks with equal savings are evicted in LRU order.

        Args:
            saving: Function of a block's key and size in bytes. It returns the seconds per byte that a use of the block
                saves because the pool has the block. The policy calls it for the first block of a chain, and uses the
                result for all blocks of the chain. None: a use saves the same time for all blocks.
            remembered: Number of evicted blocks that are remembered, as `REMEMBERED` defines it (rule 6).
        """
        self._saving = saving
        self._remembered = remembered
        self.times = ReuseTimes(len(RHYTHMS) + 1)
        self.held: dict[K, _ChainRun[K]] = {}
        self.gone: OrderedDict[K, _ChainRun[K]] = OrderedDict()
        self.rows: dict[Row, OrderedDict[_ChainRun[K], None]] = {}
        self._burst: list[K] = []
        self._burst_at, self._size = Nanos(0), 0
        self._now = Nanos(0)  # instant of the latest admission; never decreases
        self._uses = 0  # number of block uses since the policy was made
        self._learnt_at_uses = 0
        self._ranked_at = Nanos(0)
        self._victim: _ChainRun[K] | None = None
        self._ranking: list[Candidate] = []  # heap of candidates for eviction; their values may be outdated

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:
        if now != self._burst_at or size_bytes != self._size:
            if self._burst:
                self._use()
            self._burst_at, self._size = now, size_bytes
            self._now = max(self._now, now)
        self._burst.append(key)

    def withdraw(self, key: K) -> None:
        if self._burst:
            self._use()
        run = self.held.pop(key)
        self._leave(run, 1)
        self.gone[key] = run
        if len(self.gone) > self._remembered and len(self.gone) > len(self.held):
            _, forgotten = self.gone.popitem(last=False)
            forgotten.cohort.alive -= 1

    def choose(self) -> K | None:
        if self._burst:
            self._use()
        run = self._victim
        if run is None or not run.live:
            run = self._victim = self._least_valued()
        return self._tail(run) if run is not None else None

    def probability(self, key: K, span: Nanos) -> float:
        """Return the learned probability that blocks of the class of `key` are used within `span` after their last use.

        Return 0 for a block that is neither held nor remembered.
        """
        if self._burst:
            self._use()
        run = self.held.get(key) or self.gone.get(key)
        return self.times.probability(run.row[0], 0, span) if run is not None else 0.0

    def __len__(self) -> int:
        if self._burst:
            self._use()
        return len(self.held)

    def __contains__(self, key: K) -> bool:
        if self._burst:
            self._use()
        return key in self.held

    # The methods below record the uses of blocks.

    def _use(self) -> None:
        """Sort the blocks admitted at one instant into runs (rule 3), and learn from the times since their previous uses."""
        chain = list(dict.fromkeys(reversed(self._burst)))
        self._burst.clear()
        self._victim = None
        self._learn(len(chain))
        former = self._former(chain)
        rhythm = self._rhythm(former)
        saving = 1.0 if self._saving is None else self._saving(chain[0], self._size)
        last = former[-1]
        continuation = last.following if last is not None else None
        run: _ChainRun[K] | None = None
        start, end = 0, len(chain)
        while start < end:
            old = former[start]
            stop = start + 1
            while stop < end and former[stop] is old:
                stop += 1
            uses = 1 if old is None else self._uses_after(old, stop - start)
            if run is None or run.uses != uses:
                following = self._begin(uses, rhythm, saving)
                if run is not None:
                    self._times_used(run)
                    run.following = following
                run = following
            self._move(chain[start:stop], old, run)
            start = stop
        assert run is not None, "a burst has at least one block"
        self._times_used(run)
        run.following = last if last is not None and last.live else continuation

    def _learn(self, blocks: int) -> None:
        """Count block uses, and rank all candidates again if the last ranking is at least `PAUSE` old.

        Before a ranking, update the learned values if enough uses were counted since the last update.
        """
        self._uses += blocks
        if self._now < self._ranked_at + PAUSE:
            return
        fresh = self._uses - self._learnt_at_uses
        if fresh >= LEARN_AFTER and fresh >= self._uses * LEARN_SHARE:
            self._learnt_at_uses = self._uses
            self.times.learn(self._now)
        self._ranked_at = self._now
        self._ranking = [self._candidate(row, newest=newest) for row in self.rows for newest in (False, True)]
        heapq.heapify(self._ranking)

    def _former(self, chain: list[K]) -> list[_ChainRun[K] | None]:
        """Return for each block its run (rule 3), or its last run if it was evicted; None for unknown blocks.

        The evicted blocks among them are removed from `gone`.
        """
        former = list(map(self.held.get, chain))
        if self.gone and None in former:
            gone = self.gone
            return [gone.pop(key, None) if run is None else run for key, run in zip(chain, former, strict=True)]
        return former

    def _rhythm(self, former: list[_ChainRun[K] | None]) -> int:
        known = next((run for run in reversed(former) if run is not None), None)
        if known is None:
            return 0
        age = self._now - known.used_at
        return known.rhythm if age <= SAME_USE else bisect_right(RHYTHMS, age)

    def _uses_after(self, run: _ChainRun[K], blocks: int) -> int:
        """Take blocks out of a run's `cohort` because they are used again now, and return how often each has been used.

        The result includes this use, unless this use is part of the last one (rule 5). It is at most the last number of
        `USES`.

        Args:
            run: The run to which the blocks belong until now.
            blocks: Number of blocks that are used again.
        """
        if self._now - run.used_at <= SAME_USE:
            run.cohort.alive -= blocks
            return run.uses
        self.times.reused(run.cohort, blocks, self._now)
        return min(run.uses + 1, USES[-1])

    def _begin(self, uses: int, rhythm: int, saving: float) -> _ChainRun[K]:
        row = (self.times.class_of(uses, rhythm), saving)
        run: _ChainRun[K] = _ChainRun(self._now, uses, rhythm, row)
        runs = self.rows.get(row)
        if runs is None:
            runs = self.rows[row] = OrderedDict()
            heapq.heappush(self._ranking, (0.0, self._now, row, False))
        runs[run] = None
        heapq.heappush(self._ranking, (saving * self.times.value(row[0], 0), self._now, row, True))
        return run

    def _move(self, keys: list[K], old: _ChainRun[K] | None, run: _ChainRun[K]) -> None:
        """Move consecutive blocks of a chain from the run `old`, if any, to `run`.

        Blocks among them that were evicted are held again.
        """
        held_before = len(self.held)
        self.held.update(dict.fromkeys(keys, run))
        run.keys += keys
        run.live += len(keys)
        if old is not None:
            self._leave(old, len(keys) - (len(self.held) - held_before))

    def _times_used(self, run: _ChainRun[K]) -> None:
        run.cohort = self.times.used(run.row[0], len(run.keys), self._now)

    def _leave(self, run: _ChainRun[K], blocks: int) -> None:
        """Record that `blocks` blocks of the run were evicted or have moved to another run."""
        run.live -= blocks
        if run.live or not blocks:
            return
        run.keys.clear()
        run.following = None
        row = self.rows[run.row]
        del row[run]
        if not row:
            del self.rows[run.row]

    # The methods below choose the blocks to evict.

    def _least_valued(self) -> _ChainRun[K] | None:
        """Return the run (rule 3) with the least value; None if no block is held.

        If later runs of the chain of this run are still held, return the last of them (rule 4).
        """
        ranking = self._ranking
        while ranking:
            _, _, row, newest = heapq.heappop(ranking)
            if row not in self.rows:
                continue
            # compute the value again, because the row may have changed since the ranking
            candidate = self._candidate(row, newest=newest)
            least = not ranking or candidate <= ranking[0]
            heapq.heappush(ranking, candidate)
            if least:
                run = self._end(row, newest=newest)
                while run.following is not None and run.following.live:
                    run = run.following
                return run
        return None

    def _candidate(self, row: Row, *, newest: bool) -> Candidate:
        of, saving = row
        used_at = self._end(row, newest=newest).used_at
        return saving * self.times.value(of, self._now - used_at), used_at, row, newest

    def _end(self, row: Row, *, newest: bool) -> _ChainRun[K]:
        runs = self.rows[row]
        return next(reversed(runs)) if newest else next(iter(runs))

    def _tail(self, run: _ChainRun[K]) -> K:
        keys, held = run.keys, self.held
        while held.get(keys[-1]) is not run:
            keys.pop()
        return keys[-1]
