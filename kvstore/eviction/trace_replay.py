"""What a cache would have made of recorded requests: the store's policies and admission, without bytes and I/O. Pure.

Rules, which are those of `kvstore.pool.machine` as far as they matter to a hit rate:

1. A request names a chain. What is held of it without a gap from its start is a hit, and used.
2. Then the rest gets places, from its start, as far as admission lets it in and others can make room. A chain never
   pushes out its own blocks; what finds no place is not held.
3. Then all of the chain that is held is used, which is the same use for what was held before. Uses reach the policy tail first.
4. Hits are counted in tokens of the prompt. The last block of a recorded chain may be partly filled.

A policy that is told the future (`optimal`, after Belady) and a cache without end (`ideal`) bound what can be reached.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from kvstore.clock import Nanos
from kvstore.eviction.policy import EvictionPolicy


class TraceRequest(Struct, frozen=True, gc=False):
    """One recorded request. Positional: there are millions."""

    arrival: Nanos  # from the start of the trace
    prompt_tokens: int
    chain: tuple[int, ...]  # names of the prompt's blocks; equal names, equal blocks and equal beginnings
    output_tokens: int = 0
    session: int = 0  # 0: not known


class ReplayAdmission(Protocol):
    """`kvstore.hierarchy.tier_states.TierAdmission`, over a trace's names."""

    def admits(self, key: int, size_bytes: int, now: Nanos) -> bool: ...


class TraceReplayResult(Struct, frozen=True, kw_only=True):
    """What came of it."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    blocks_written: int  # into the cache

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(
    requests: Iterable[TraceRequest],
    policy: EvictionPolicy[int],
    *,
    capacity_blocks: int,
    block_tokens: int,
    block_bytes: int = 1,
    admission: ReplayAdmission | None = None,
) -> TraceReplayResult:
    """Run requests through an empty cache.

    Args:
        requests: In the order of their arrival.
        policy: Has admitted nothing yet.
        capacity_blocks: That fit.
        block_tokens: Of a full block.
        block_bytes: What the policy and the admission are told.
        admission: Which blocks may be written; None: all.
    """
    held: set[int] = set()
    admit, withdraw, choose = policy.admit, policy.withdraw, policy.choose
    count = prompt_tokens = hit_tokens = written = 0
    for request in requests:
        chain, now = request.chain, request.arrival
        count += 1
        prompt_tokens += request.prompt_tokens
        hits = _prefix(chain, held)
        hit_tokens += min(hits * block_tokens, request.prompt_tokens)
        complete = True
        if hits < len(chain):
            new = [name for name in chain[hits:] if name not in held]
            if admission is not None:
                new = [name for name in new if admission.admits(name, block_bytes, now)]
            missing = len(held) + len(new) - capacity_blocks
            if missing > 0:
                own = set(chain)
                for name in reversed(chain):
                    if name in held:
                        admit(name, block_bytes, now)
                while missing > 0 and (victim := choose()) is not None:
                    withdraw(victim)
                    if victim not in own:  # else it is admitted again below
                        held.remove(victim)
                        missing -= 1
                if missing > 0:
                    del new[-missing:]
            held.update(new)
            written += len(new)
            complete = held.issuperset(chain)
        for name in reversed(chain) if complete else [name for name in reversed(chain) if name in held]:
            admit(name, block_bytes, now)
    return TraceReplayResult(requests=count, prompt_tokens=prompt_tokens, hit_tokens=hit_tokens, blocks_written=written)


def ideal(requests: Iterable[TraceRequest], *, block_tokens: int) -> TraceReplayResult:
    """A cache without end."""
    held: set[int] = set()
    count = prompt_tokens = hit_tokens = 0
    for request in requests:
        count += 1
        prompt_tokens += request.prompt_tokens
        hit_tokens += min(_prefix(request.chain, held) * block_tokens, request.prompt_tokens)
        held.update(request.chain)
    return TraceReplayResult(
        requests=count, prompt_tokens=prompt_tokens, hit_tokens=hit_tokens, blocks_written=len(held)
    )


def optimal(requests: Sequence[TraceRequest], *, capacity_blocks: int, block_tokens: int) -> TraceReplayResult:
    """A cache that knows the future: whatever is used again the latest goes, or is not written in the first place.

    Blocks whose next use is the same request are one pile, in chain order, so that a pile goes from its tail.
    """
    never = len(requests)
    following = _next_uses(requests)
    held: set[int] = set()
    piles: dict[int, list[int]] = {}  # index of the next request that uses them -> held blocks
    latest: list[int] = []  # a heap of those indices, negative
    prompt_tokens = hit_tokens = written = 0
    for index, request in enumerate(requests):
        chain = request.chain
        prompt_tokens += request.prompt_tokens
        hits = _prefix(chain, held)
        hit_tokens += min(hits * block_tokens, request.prompt_tokens)
        before = set(piles.pop(index, ()))  # all of them are in this chain
        held -= before
        for name, next_use in zip(chain, following[index], strict=True):
            if next_use == never:
                continue
            if next_use not in piles:
                piles[next_use] = []
                heapq.heappush(latest, -next_use)
            piles[next_use].append(name)
            held.add(name)
        while len(held) > capacity_blocks:
            pile = piles[-latest[0]]
            if pile:
                held.remove(pile.pop())
            else:
                del piles[-heapq.heappop(latest)]
        written += sum(name in held and name not in before for name in chain)
    return TraceReplayResult(
        requests=len(requests), prompt_tokens=prompt_tokens, hit_tokens=hit_tokens, blocks_written=written
    )


def distinct_blocks(requests: Iterable[TraceRequest]) -> int:
    """Blocks that a cache without end would hold in the end: the trace's footprint."""
    names: set[int] = set()
    for request in requests:
        names.update(request.chain)
    return len(names)


def _prefix(chain: Sequence[int], held: set[int]) -> int:
    if held.issuperset(chain):
        return len(chain)
    for count, name in enumerate(chain):
        if name not in held:
            return count
    return len(chain)


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """For each block of each chain, the index of the next request that uses it; their number when there is none."""
    never = len(requests)
    upcoming: dict[int, int] = {}
    rows: list[list[int]] = []
    for index in range(never - 1, -1, -1):
        chain = requests[index].chain
        rows.append([upcoming.get(name, never) for name in chain])
        upcoming.update(dict.fromkeys(chain, index))
    rows.reverse()
    return rows
