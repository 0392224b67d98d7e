"""Trace replay: computes the hit rate of eviction and admission rules for recorded requests, without bytes and I/O.

The rules are those of `kvstore.pool.machine`, as far as they affect a hit rate:

1. A request names a chain. The longest prefix of the chain that is in the cache counts as hits and as used.
2. Then the other blocks are written, from the start of the chain on, as far as admission allows and other blocks can be
   evicted for them. A chain never evicts its own blocks. Blocks without space are not written.
3. Then all blocks of the chain that are in the cache count as used. For the hits, this is not a second use: it is the
   use of rule 1. The policy receives the uses in reverse order, beginning with the last block of the chain.
4. Hits are counted in tokens of the prompt, because the last block of a recorded chain may be partly filled.

Two replays are upper bounds of the possible hit rates: `optimal`, whose eviction knows the future (Belady's algorithm),
and `ideal`, whose cache is unlimited.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from kvstore.clock import Nanos
from kvstore.eviction.policy import EvictionPolicy


class TraceRequest(Struct, frozen=True, gc=False):
    """One recorded request.

    A trace has millions of requests. They are therefore created with positional arguments, and are excluded from
    Python's cyclic garbage collection (`gc=False`).
    """

    arrival: Nanos  # nanoseconds since the start of the trace
    prompt_tokens: int
    # numbers of the prompt's blocks; if two blocks have equal numbers, they and all blocks before them are equal
    chain: tuple[int, ...]
    output_tokens: int = 0
    session: int = 0  # number of the session; 0 if unknown


class ReplayAdmission(Protocol):
    """Protocol of the rule that decides which blocks are written.

    It is like `kvstore.hierarchy.tier_states.TierAdmission`, but for block numbers of a trace.
    """

    def admits(self, key: int, size_bytes: int, now: Nanos) -> bool: ...


class TraceReplayResult(Struct, frozen=True, kw_only=True):
    """Counts of hits and of written blocks in one replay."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    blocks_written: int  # number of blocks written to the cache; a block that is written again counts again

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
    """Replay requests, in the order of their arrival, with a cache that is empty at the start.

    `policy` is a new eviction policy, without any block. The policy and the admission get `block_bytes` as the size of
    each block. If `admission` is None, all blocks are written.
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
                    # A block of the request's own chain stays in the cache, and is admitted to the policy again below.
                    if victim not in own:
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
    """Replay requests with an unlimited cache, which has the highest possible hit rate."""
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
    """Replay requests with a cache that knows the future.

    The cache evicts the block whose next use is the latest. If this is a new block, it is not written at all. Blocks
    whose next use is in the same request form one pile in the order of their chain, and are evicted from the end of the
    pile.
    """
    never = len(requests)
    following = _next_uses(requests)
    held: set[int] = set()
    piles: dict[int, list[int]] = {}  # index of a later request -> the blocks whose next use is in that request
    latest: list[int] = []  # The keys of `piles` as a max-heap. The numbers are negated, because heapq is a min-heap.
    prompt_tokens = hit_tokens = written = 0
    for index, request in enumerate(requests):
        chain = request.chain
        prompt_tokens += request.prompt_tokens
        hits = _prefix(chain, held)
        hit_tokens += min(hits * block_tokens, request.prompt_tokens)
        before = set(piles.pop(index, ()))  # blocks whose next use is in this request, so all of them are in its chain
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
    """Return the number of distinct blocks in the trace, which an unlimited cache would contain after the trace."""
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
    """Return for each block of each chain the index of the next request that uses it.

    The index is the number of requests if no later request uses the block.
    """
    never = len(requests)
    upcoming: dict[int, int] = {}
    rows: list[list[int]] = []
    for index in range(never - 1, -1, -1):
        chain = requests[index].chain
        rows.append([upcoming.get(name, never) for name in chain])
        upcoming.update(dict.fromkeys(chain, index))
    rows.reverse()
    return rows
