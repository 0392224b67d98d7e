"""Peer prompts: prompts that peer routers have sent to workers, and whose blocks the workers have not reported (yet).

Rules:

1. A router announces to its peers each prompt of which a worker has to compute `MIN_ANNOUNCED_TOKENS` or more, and later the end of the
   prompt's reservation on this worker. Between these two announcements, the peers expect the blocks of the prompt on that worker, as they
   do for prompts of their own. So requests with the same beginning are placed on one worker, whichever routers they use. Shorter prompts
   would cause too many announcements, and computing them twice costs little.
2. A prompt of rule 1 is announced by the keys of some of its blocks, its *marks*: the first 16 blocks, then eight for each doubling of the
   length, and the last block. These are fewer than 160 keys for any length, and fewer than 60 for up to 512 blocks. From the marks, a
   router knows at least eight ninths of the blocks that two prompts have in common, and all of them if the prompts are equal.
3. A worker that does not report its prefix cache is assumed to hold what any router has sent to it (`fleet.router.kv_index.assumed_cache`).
   All prompts for such workers are announced, with the keys of their first `MAX_ANNOUNCED_KEYS` blocks (of 64 tokens or more). The
   assumption ends when its time is over, or when a full assumed cache forgets the prompt for newer ones. It does not end when the router
   that announced the prompt leaves, because the worker still has its cache. The block keys of prompts for external backends are computed
   with a secret; routers without a common secret do not announce these prompts.
4. Both kinds of announcements are limited. A router announces at most `MAX_ANNOUNCED_PROMPTS` unfinished prompts at a time (rule 1), first
   come first served. One announcement contains at most the latest `MAX_SENT_PROMPTS` prompts of rule 3. Peers do not know the prompts beyond
   these limits. The only effect is that they may have the same blocks computed again on another worker.
5. When a router leaves, its peers forget its announcements by rule 1. A router that connects later gets the earlier announcements of
   unfinished prompts (rule 1), and the latest `MAX_SENT_PROMPTS` assumptions by rule 3 with their ages. If it does not know a worker yet,
   it keeps the assumptions about this worker until the worker joins.
6. A router without peers announces nothing.
"""

from bisect import bisect_right
from collections import deque
from operator import itemgetter

from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.router.kv_index.prefix_index import Chain, ChainHolder, Keys, RadixTree

# A prompt is announced by rule 1 if the worker has to compute at least this many of its tokens. A large GPU computes 512 tokens in about
# 30 ms; an announcement costs a router with three peers about 10 us.
MIN_ANNOUNCED_TOKENS = 512
# maximum number of block keys of a prompt that is announced by rule 3: 4 KB, for at least 32,768 tokens
MAX_ANNOUNCED_KEYS = 512
# Maximum number of unfinished prompts that one router announces; the marks of each take about 2 KB in every peer.
MAX_ANNOUNCED_PROMPTS = 10_000
MAX_SENT_PROMPTS = 1000

_GRID = (*range(1, 17), *((8 + part) << octave for octave in range(1, 17) for part in range(1, 9)))
"""Numbers of leading blocks after which there is a mark: 1 to 16, then eight numbers for each doubling."""

_marked = [itemgetter(*(number - 1 for number in _GRID[:count])) for count in range(17, len(_GRID) + 1)]


class PlacedPrompt(Struct, frozen=True, kw_only=True):
    """A prompt that a router has sent to a worker, as it is announced to peers."""

    worker_id: WorkerId
    number: int = 0
    """The number that the announcing router gave to an unfinished prompt (rule 1). 0: the prompt is assumed to be cached (rule 3)."""

    # Block keys of the prompt's marks (rule 2), or of its first `MAX_ANNOUNCED_KEYS` blocks if the prompt is assumed to be cached (rule 3).
    keys: tuple[int, ...]
    age_ms: int = 0  # milliseconds since the prompt was sent; 0 for an unfinished prompt, whose age does not matter


class PromptAnnouncements:
    """Collects the prompts that a router has to announce to its peers."""

    def __init__(self) -> None:
        self._numbers = 0
        # Worker and block keys of each unfinished prompt, by number.
        self._placed: dict[int, tuple[WorkerId, Keys]] = {}
        self._unannounced: dict[int, None] = {}  # numbers of unfinished prompts that were not announced yet, in order
        self._over: list[int] = []
        self._sent: deque[tuple[WorkerId, Keys]] = deque(maxlen=MAX_SENT_PROMPTS)
        self.changes = 0
        """Number of changes since the last call of `news`: reservations that began or ended, and prompts that were computed."""

    def has_prompts(self, *, assumed: bool) -> bool:
        """Return whether `news` would return prompts of rule 1, or, if `assumed` is true, prompts of rule 3."""
        return bool(self._unannounced or (assumed and self._sent))

    def placed(self, worker_id: WorkerId, keys: Keys) -> int | None:
        """Record a prompt that a worker has to compute.

        Return the prompt's number, which the caller passes to `over` when the prompt's reservation ends. If there are already
        `MAX_ANNOUNCED_PROMPTS` unfinished prompts, record nothing and return None.
        """
        if len(self._placed) >= MAX_ANNOUNCED_PROMPTS:
            return None
        self._numbers = number = self._numbers + 1
        self._placed[number] = worker_id, keys
        self._unannounced[number] = None
        return number

    def over(self, number: int) -> None:
        del self._placed[number]
        if number in self._unannounced:
            del self._unannounced[number]
        else:
            self._over.append(number)

    def sent(self, worker_id: WorkerId, keys: Keys) -> None:
        """Record a prompt that was sent to a worker without KV events, so that `news` returns it (rule 3)."""
        self._sent.append((worker_id, keys))

    def news(self) -> tuple[list[PlacedPrompt], list[int]]:
        """Return the prompts that are new since the last call, and the numbers of the announced prompts that have ended since then."""
        news = [self._make_announcement(number) for number in self._unannounced]
        news += [
            PlacedPrompt(worker_id=worker_id, keys=tuple(keys[:MAX_ANNOUNCED_KEYS])) for worker_id, keys in self._sent
        ]
        over, self._over = self._over, []
        self._unannounced.clear()
        self._sent.clear()
        self.changes = 0
        return news, over

    def latest(self) -> list[PlacedPrompt]:
        """Return the unfinished prompts that were already announced, for a peer that connects later."""
        return [self._make_announcement(number) for number in self._placed if number not in self._unannounced]

    def _make_announcement(self, number: int) -> PlacedPrompt:
        worker_id, keys = self._placed[number]
        return PlacedPrompt(worker_id=worker_id, number=number, keys=marks(keys))


class PeerPrompts:
    """Keeps the prompts that peer routers have announced for one worker, by the router and the number that the router gave to the prompt."""

    def __init__(self, chains: RadixTree, bit: int) -> None:
        """Start without prompts.

        Args:
            chains: The radix tree with the marks of the announced prompts on all workers of the model.
            bit: The worker's bit in `chains`.
        """
        self._chains = chains
        self._holder = ChainHolder(bit)
        self._announced_chains: dict[tuple[str, int], Chain] = {}

    def add(self, peer: str, number: int, keys: Keys) -> None:
        assert (peer, number) not in self._announced_chains, number
        self._announced_chains[peer, number] = self._chains.add(self._holder, keys)

    def remove(self, peer: str, number: int) -> None:
        """Forget a prompt. Do nothing if it is unknown: the worker may have left and joined again since the prompt was added."""
        if (chain := self._announced_chains.pop((peer, number), None)) is not None:
            self._chains.remove(chain)

    def clear(self) -> None:
        for chain in self._announced_chains.values():
            self._chains.remove(chain)
        self._announced_chains.clear()

    def chains(self) -> list[Chain]:
        """Return the chains of all announced prompts, for the check of the radix tree."""
        return list(self._announced_chains.values())


def marks(keys: Keys) -> tuple[int, ...]:
    """Return the block keys of a prompt's marks (rule 2), in the order of the blocks."""
    total = len(keys)
    if total <= 16:
        return tuple(keys)
    count = bisect_right(_GRID, total)
    marked: tuple[int, ...] = _marked[count - 17](keys) if count > 16 else tuple(keys[:16])
    return marked if _GRID[count - 1] == total else (*marked, keys[-1])


def with_peer_prompts(booked: list[tuple[int, int]], peer_prompts: RadixTree, keys: Keys) -> list[tuple[int, int]]:
    """Return how many leading blocks of a prompt each worker has, including blocks of the prompts that peer routers have announced.

    The argument `booked` and the result have the form of `fleet.router.kv_index.prefix_index.runs`.

    Args:
        booked: The number of leading blocks that live requests of this router hold on each worker.
        peer_prompts: The radix tree with the marks of the announced prompts.
        keys: Block keys of all full blocks of the prompt.
    """
    marked = marks(keys)
    announced = [
        (len(keys) if depth == len(marked) else _GRID[depth - 1], mask) for depth, mask in peer_prompts.runs(marked)
    ]
    found: list[tuple[int, int]] = []
    seen = 0
    for depth, mask in sorted(booked + announced, reverse=True):
        if new := mask & ~seen:
            found.append((depth, new))
            seen |= new
    found.reverse()
    return found
