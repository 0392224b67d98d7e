"""Benchmark of the router's prefix index: a public trace is replayed against it and against a simple reference.

    python -m loadtests.router.index_figures --trace tests/data/conversation_1500.jsonl.gz

Rules:

1. A request asks how many leading blocks of its prompt each worker holds. The chosen worker then stores the missing blocks, and
   evicts the least recently used ones when it is full. The beginning of the prompt chooses the worker, so requests with the same prefix
   go to the same worker; one request in eight goes to a random worker, so several workers hold some of the prefixes.
   2. The reference is the most obvious index: a set of workers for each block, and a walk along the prompt. Its code never
   changes. So the ratio of the times of the two indexes shows changes of the prefix index, independent of the machine. Both return the
   same result.
   3. Times are CPU time of this thread. The two indexes are measured in turn, and the median of the ratios counts.
"""

import argparse
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from fleet.recording.traces import read_trace
from fleet.router.kv_index.prefix_index import Holder, PrefixIndex

BLOCK_TOKENS = 16
PIECES = 512 // BLOCK_TOKENS  # index blocks in one block of the trace
GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio (Knuth): keys look like hashes and stay distinct


class IndexOperation(Struct, frozen=True):
    """One request: the block keys that it looks up, and the blocks that its worker then stores and removes."""

    asked: tuple[int, ...]
    holder: Holder
    stored: tuple[int, ...]
    removed: tuple[int, ...]


class MeasuredIndex(Protocol):
    """Interface that the prefix index and the reference index have in common."""

    def add(self, holder: Holder, capacity: int) -> None: ...

    def stored(self, holder: Holder, keys: Sequence[int]) -> None: ...

    def removed(self, holder: Holder, keys: Sequence[int]) -> None: ...

    def longest(self, keys: Sequence[int]) -> dict[Holder, int]: ...


class ReferenceIndex:
    """Reference index (rule 2)."""

    def __init__(self) -> None:
        self._holders: dict[int, set[Holder]] = {}

    def add(self, holder: Holder, capacity: int) -> None:
        """Do nothing: this index needs no list of holders."""

    def stored(self, holder: Holder, keys: Sequence[int]) -> None:
        for key in keys:
            self._holders.setdefault(key, set()).add(holder)

    def removed(self, holder: Holder, keys: Sequence[int]) -> None:
        for key in keys:
            holders = self._holders.get(key)
            if holders is not None:
                holders.discard(holder)
                if not holders:
                    del self._holders[key]

    def longest(self, keys: Sequence[int]) -> dict[Holder, int]:
        depths: dict[Holder, int] = {}
        running: set[Holder] | None = None
        for depth, key in enumerate(keys, start=1):
            holders = self._holders.get(key, set())
            running = set(holders) if running is None else running & holders
            if not running:
                break
            for holder in running:
                depths[holder] = depth
        return depths


def operations(trace: Path, *, requests: int, workers: int, capacity: int) -> list[IndexOperation]:
    """Return the operations of rule 1; `capacity` is the number of 16-token blocks of each worker."""
    rng = random.Random(0)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]
    found = []
    for request in read_trace(trace).requests[:requests]:
        asked = tuple(_keys(request.chain))
        place = request.chain[min(1, len(request.chain) - 1)] % workers if request.chain else 0
        if rng.randrange(8) == 0:
            place = rng.randrange(workers)
        cache = caches[place]
        stored = tuple(key for key in asked[:capacity] if key not in cache)
        for key in reversed(asked[:capacity]):  # the end of a prompt is evicted before its beginning
            cache[key] = None
            cache.move_to_end(key)
        removed = tuple(cache.popitem(last=False)[0] for _ in range(max(0, len(cache) - capacity)))
        found.append(IndexOperation(asked, Holder(f"worker/{place}"), stored, removed))
    return found


def _keys(chain: Sequence[int]) -> Iterator[int]:
    for name in chain:
        for piece in range(PIECES):
            yield ((name * PIECES + piece + 1) * GOLDEN) % 2**64


def replay(index: MeasuredIndex, work: Sequence[IndexOperation], workers: int, capacity: int) -> tuple[list[int], int]:
    """Perform the operations; return the nanoseconds of each query, and of all changes together."""
    for number in range(workers):
        index.add(Holder(f"worker/{number}"), capacity)
    clock = time.thread_time_ns
    questions, changes = [], 0
    for each in work:
        began = clock()
        index.longest(each.asked)
        answered = clock()
        index.removed(each.holder, each.removed)
        index.stored(each.holder, each.stored)
        changes += clock() - answered
        questions.append(answered - began)
    return questions, changes


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="of a format of `fleet kv replay`")
    parser.add_argument("--requests", type=int, default=1500, help="from its beginning")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--capacity", type=int, default=20_000, help="blocks of 16 tokens, of each worker")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turn")
    asked = parser.parse_args()
    done = operations(asked.trace, requests=asked.requests, workers=asked.workers, capacity=asked.capacity)
    blocks = sum(len(each.stored) + len(each.removed) for each in done)
    rounds = []
    for _ in range(asked.rounds):
        ours = replay(PrefixIndex(), done, asked.workers, asked.capacity)
        plain = replay(ReferenceIndex(), done, asked.workers, asked.capacity)
        rounds.append((ours, plain))
    questions = sorted(statistics.median(times) for times in zip(*(ours[0] for ours, _ in rounds), strict=True))
    figures = {
        "requests": len(done),
        "blocks_asked": sum(len(each.asked) for each in done),
        "blocks_changed": blocks,
        "questions_per_second": round(len(done) / (sum(questions) / 1e9)),
        "question_us_p50": round(statistics.median(questions) / 1e3, 2),
        "question_us_p99": round(questions[int(0.99 * len(questions))] / 1e3, 2),
        "blocks_changed_per_second": round(blocks / (statistics.median(ours[1] for ours, _ in rounds) / 1e9)),
        "of_reference_questions": round(statistics.median(sum(o[0]) / sum(p[0]) for o, p in rounds), 4),
        "of_reference_changes": round(statistics.median(o[1] / p[1] for o, p in rounds), 4),
        "rounds": asked.rounds,
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
