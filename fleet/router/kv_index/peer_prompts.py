"""Prompts that other routers of the cluster have sent to workers, as far as these tell nothing of them, or not yet.

Rules:

1. A router tells the others of each prompt of which a worker has to compute `MIN_ANNOUNCED_TOKENS` or more, and tells them again when that
   request is over. Until then what they have of a prompt like it is coming there, as if it were their own: so requests that begin
   alike find each other by whichever routers they come. For less the others would be told too often, and computing it twice is little.
2. Of such a prompt the keys of some blocks are told, its *marks*: of the first 16 each, then of eight to each doubling of the length,
   and of the last. That is less than 160 however long it is, and less than 60 up to 512 blocks. What two prompts have in common is then
   known to eight parts in nine, and to the block where one of them is told whole and the other is the same.
3. A worker that tells nothing of its prefix cache is believed to hold what any router has sent there (`fleet.router.kv_index.assumed_cache`).
   So of these all prompts are told, block by block (of 64 tokens or more) up to `MAX_ANNOUNCED_KEYS`. Nothing ends that belief but time and
   room: not even the end of the router that told of it, since the worker has its cache still. Keys of prompts for foreign servers
   follow from a secret (`fleet.frontend.openai.prompt_keys`): between routers that have none in common nothing of them is told.
4. Of either kind there are so many at most: `MAX_ANNOUNCED_PROMPTS` of a router at once, first come, and of those sent the latest `MAX_SENT_PROMPTS`
   each time that news are asked for. What is left out is known to the router alone that placed it, and nothing else comes of that.
5. A router that leaves takes with it what it has told by rule 1. A router that is reached later is told that too.
6. Where there is one router, nothing of this happens.
"""

from bisect import bisect_right
from collections import deque
from operator import itemgetter

from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.router.kv_index.radix_tree import Chain, ChainHolder, Keys, RadixTree

MIN_ANNOUNCED_TOKENS = 512  # some 30 ms of a large GPU; telling, and being told by three others, takes some 10 us
MAX_ANNOUNCED_KEYS = 512  # 4 KB, of 32,768 tokens or more
MAX_ANNOUNCED_PROMPTS = 10_000  # of one router: with marks some 2 KB each where they are heard
MAX_SENT_PROMPTS = 1000

_GRID = (*range(1, 17), *((8 + part) << octave for octave in range(1, 17) for part in range(1, 9)))
"""Numbers of blocks after which there is a mark."""

_marked = [itemgetter(*(number - 1 for number in _GRID[:count])) for count in range(17, len(_GRID) + 1)]


class PlacedPrompt(Struct, frozen=True, kw_only=True):
    """A prompt that a worker was sent."""

    worker_id: WorkerId
    number: int = 0
    """Of the router's, while it is not over (rule 1). 0: it is believed to be cached from now on (rule 3)."""

    keys: tuple[int, ...]  # its marks; if it is believed to be cached, of all blocks


class PromptAnnouncements:
    """What a router has to tell the others."""

    def __init__(self) -> None:
        """Nothing was placed."""
        self._numbers = 0
        self._placed: dict[int, tuple[WorkerId, Keys]] = {}  # and not over
        self._untold: dict[int, None] = {}  # of those
        self._over: list[int] = []
        self._sent: deque[tuple[WorkerId, Keys]] = deque(maxlen=MAX_SENT_PROMPTS)

    def placed(self, worker_id: WorkerId, keys: Keys) -> int | None:
        """A worker has to compute a prompt; returns its number, for `over`. None: there are too many."""
        if len(self._placed) >= MAX_ANNOUNCED_PROMPTS:
            return None
        self._numbers = number = self._numbers + 1
        self._placed[number] = worker_id, keys
        self._untold[number] = None
        return number

    def over(self, number: int) -> None:
        del self._placed[number]
        if number in self._untold:
            del self._untold[number]
        else:
            self._over.append(number)

    def sent(self, worker_id: WorkerId, keys: Keys) -> None:
        """A worker that tells nothing was sent a prompt."""
        self._sent.append((worker_id, keys))

    def news(self) -> tuple[list[PlacedPrompt], list[int]]:
        """What was placed since it was asked for, and the numbers of what is over."""
        news = [self._told(number) for number in self._untold]
        news += [
            PlacedPrompt(worker_id=worker_id, keys=tuple(keys[:MAX_ANNOUNCED_KEYS])) for worker_id, keys in self._sent
        ]
        over, self._over = self._over, []
        self._untold.clear()
        self._sent.clear()
        return news, over

    def latest(self) -> list[PlacedPrompt]:
        """All that was placed and is not over, but for what is still news: if that is over before it is told, nothing is said of it."""
        return [self._told(number) for number in self._placed if number not in self._untold]

    def _told(self, number: int) -> PlacedPrompt:
        worker_id, keys = self._placed[number]
        return PlacedPrompt(worker_id=worker_id, number=number, keys=marks(keys))


class PeerPrompts:
    """Of one worker, by who told and by number."""

    def __init__(self, chains: RadixTree, bit: int) -> None:
        """Nothing was told.

        Args:
            chains: Of marks, those of all workers of the pool.
            bit: This worker's there.
        """
        self._chains = chains
        self._holder = ChainHolder(bit)
        self._told: dict[tuple[str, int], Chain] = {}

    def add(self, replica: str, number: int, keys: Keys) -> None:
        assert (replica, number) not in self._told, number
        self._told[replica, number] = self._chains.add(self._holder, keys)

    def remove(self, replica: str, number: int) -> None:
        """If it is there: the worker may have left and come again."""
        if (chain := self._told.pop((replica, number), None)) is not None:
            self._chains.remove(chain)

    def clear(self) -> None:
        for chain in self._told.values():
            self._chains.remove(chain)
        self._told.clear()

    def chains(self) -> list[Chain]:
        """All that is kept."""
        return list(self._told.values())


def marks(keys: Keys) -> tuple[int, ...]:
    """Some keys of a prompt, so that two prompts have as many first marks in common as they have marked blocks."""
    total = len(keys)
    if total <= 16:
        return tuple(keys)
    count = bisect_right(_GRID, total)
    marked: tuple[int, ...] = _marked[count - 17](keys) if count > 16 else tuple(keys[:16])
    return marked if _GRID[count - 1] == total else (*marked, keys[-1])


def deeper(booked: list[tuple[int, int]], peer_prompts: RadixTree, keys: Keys) -> list[tuple[int, int]]:
    """Whose leading blocks of a prompt end where, with what was foretold.

    Args:
        booked: The same without, as `fleet.router.kv_index.prefix_index.runs` has it.
        peer_prompts: Chains of marks.
        keys: Of all full blocks of the prompt.
    """
    marked = marks(keys)
    told = [
        (len(keys) if depth == len(marked) else _GRID[depth - 1], mask) for depth, mask in peer_prompts.runs(marked)
    ]
    found: list[tuple[int, int]] = []
    seen = 0
    for depth, mask in sorted(booked + told, reverse=True):
        if new := mask & ~seen:
            found.append((depth, new))
            seen |= new
    found.reverse()
    return found
