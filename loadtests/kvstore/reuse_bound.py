"""Bound on predicting reuse: hit rates with a model that is too expensive for a store, compared with the store's eviction policies.

    python -m loadtests.kvstore.reuse_bound TRACE --capacity-blocks 3655,9140        # wants lightgbm 4.7

Rules:

1. Blocks that one request uses, and that were also last used by one request, form a run. The last block of a chain, which may be partly
filled, is a run of its own. At each use of a run, boosted trees estimate the probability of its next use in each future span of time.
Their input is everything that a store without limits of memory could know about the chain (`FEATURES`).
2. There are two ways to train. "First half": the trees learn from the first half of the trace, which shows what can be learned within
the trace. "Other conversations": for each third of the conversations, the trees learn from the other two thirds, past and future, which
shows what could be learned from an endless trace.
3. The run with the fewest expected uses per time in the cache is evicted first, as in `kvstore.eviction.reuse_times`. Within a chain,
the last blocks are evicted first.
4. Hit rates are shares of the prompts' tokens, for the whole trace and for its second half.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightgbm
import numpy as np
from numpy.typing import NDArray

from fleet.recording.traces import read_trace
from kvstore.clock import SECOND
from kvstore.eviction.policies import policy
from kvstore.eviction.reuse_times import EDGES, SUREST, prospects
from kvstore.eviction.trace_replay import TraceRequest, optimal, replay

FEATURES = (
    "uses",  # number of uses of the run's first block so far
    "gap",  # seconds since the last use of the run's blocks
    "rhythm",  # seconds since the last use of the longest known part of the chain; new runs have a rhythm, but no gap
    "mean_gap",  # mean seconds between the turns of the conversation so far
    "turn",  # number of the turn in the conversation
    "blocks",  # number of blocks of the chain
    "new",  # number of blocks of the chain that were never used before
    "start",  # index of the run's first block in the chain
    "behind",  # number of blocks from the start of the run to the end of the chain
    "length",  # number of blocks of the run
    "question",  # number of tokens of this prompt after the previous prompt and its answer
    "answer",  # number of tokens of the answer
)
SPANS = int(np.searchsorted(EDGES, 3600 * SECOND))
STARTS = np.array(EDGES[: SPANS + 1]) / SECOND
TREES = {"objective": "binary", "learning_rate": 0.1, "num_leaves": 8, "min_data_in_leaf": 200, "lambda_l2": 20.0}
ROUNDS = 60
SEED = 1
FOLDS = 3

Floats = NDArray[np.float64]


class ReuseRun:
    """Blocks of one chain that one request uses, and that were also last used by one request (rule 1)."""

    __slots__ = ("at", "blocks", "conversation", "features", "next_uses", "number")

    def __init__(self, number: int, at: float, blocks: list[int], conversation: int, features: tuple[float, ...]):
        self.number = number
        self.at = at
        self.blocks = blocks  # in the order of the chain
        self.conversation = conversation
        self.features = features
        self.next_uses: dict[float, int] = {}  # by seconds until the next use: the number of blocks that are used then


def runs_of(requests: Sequence[TraceRequest]) -> list[list[ReuseRun]]:
    """Return the runs of each request's chain."""
    last: dict[int, tuple[int, ReuseRun]] = {}  # by block: the index of the last request that used it, and the run
    uses: dict[int, int] = {}
    # For each request, the number of earlier turns of its conversation, and the mean seconds between them.
    turns, gaps = [0] * len(requests), [float("nan")] * len(requests)
    rows: list[list[ReuseRun]] = []
    count = 0
    for index, request in enumerate(requests):
        chain, now = request.chain, request.arrival / SECOND
        before = [last.get(name) for name in chain]
        known = sum(each is not None for each in before)
        parent, rhythm, question = None, float("nan"), float("nan")
        # The first block alone does not identify a conversation, because many chains may share it.
        if known > 1 and (found := before[known - 1]) is not None:
            parent = found[0]
            rhythm = now - requests[parent].arrival / SECOND
            turns[index] = turns[parent] + 1
            former = 0.0 if turns[parent] == 0 else gaps[parent] * turns[parent]
            gaps[index] = (former + rhythm) / turns[index]
            question = request.prompt_tokens - requests[parent].prompt_tokens - requests[parent].output_tokens
        row: list[ReuseRun] = []
        start = 0
        while start < len(chain):
            was = before[start]
            stop = start + 1
            while stop < len(chain) and before[stop] is was and stop < len(chain) - 1:
                stop += 1
            gap = now - was[1].at if was is not None else float("nan")
            conversation = (rhythm, gaps[index], turns[index], len(chain), len(chain) - known)
            place = (start, len(chain) - start, stop - start)
            features = (uses.get(chain[start], 0), gap, *conversation, *place, question, request.output_tokens)
            run = ReuseRun(count, now, list(chain[start:stop]), chain[min(1, len(chain) - 1)], features)
            if was is not None:
                was[1].next_uses[gap] = was[1].next_uses.get(gap, 0) + stop - start
            row.append(run)
            count += 1
            start = stop
        for run in row:
            noted = (index, run)
            for name in run.blocks:
                last[name] = noted
                uses[name] = uses.get(name, 0) + 1
        rows.append(row)
    return rows


def observed(runs: Sequence[ReuseRun], until: float) -> tuple[Floats, NDArray[np.bool_], Floats]:
    """Return training samples (features with span, used or not, weight): one per run and span that ends before `until`."""
    asked, answers, weights = [], [], []
    for run in runs:
        unused = len(run.blocks)
        reached = 0
        for gap, blocks in sorted([*run.next_uses.items(), (float("inf"), 0)]):
            if run.at + gap > until:
                gap = float("inf")  # noqa: PLW2901 - a use after `until` is not known yet
            while reached < SPANS and STARTS[reached + 1] <= min(gap, until - run.at):
                asked.append((*run.features, reached))
                answers.append(False)
                weights.append(unused**0.7)  # less than `unused`: blocks of one run are no independent samples
                reached += 1
            if gap == float("inf") or reached == SPANS:
                break
            asked.append((*run.features, reached))
            answers.append(True)
            weights.append(blocks**0.7)
            unused -= blocks
            if not unused:
                break
    return np.array(asked), np.array(answers), np.array(weights)


def predicted_values(taught: Sequence[ReuseRun], until: float, asked: Sequence[ReuseRun]) -> Floats:
    """Train the trees on the runs `taught`, and return for each run of `asked` the predicted value at each age (`EDGES`)."""
    questions, answers, weights = observed(taught, until)
    parameters = TREES | {"seed": SEED, "verbose": -1, "num_threads": 1}
    model = lightgbm.train(parameters, lightgbm.Dataset(questions, answers, weight=weights), ROUNDS)
    features = np.repeat([run.features for run in asked], SPANS, axis=0)
    spans = np.tile(np.arange(SPANS), len(asked))
    hazards = np.full((len(asked), len(EDGES)), 1e-6)
    hazards[:, :SPANS] = model.predict(np.column_stack([features, spans])).reshape(-1, SPANS)
    return np.concatenate([prospects(np.minimum(part, SUREST))[1] for part in np.array_split(hazards, 64)])


def hits(
    requests: Sequence[TraceRequest], rows: Sequence[Sequence[ReuseRun]], values: Floats, capacity: int, block: int
) -> list[int]:
    """Return the cached tokens of each request."""
    ages = np.array(EDGES) / SECOND
    where: dict[int, ReuseRun] = {}  # by cached block: the run of its last use
    children: dict[int, int] = {}  # by cached block: the number of cached blocks that directly follow it
    parents: dict[int, int] = {}
    live: list[ReuseRun] = []
    found = []
    for request, row in zip(requests, rows, strict=True):
        chain = request.chain
        held = next((place for place, name in enumerate(chain) if name not in where), len(chain))
        found.append(min(held * block, request.prompt_tokens))
        above = None
        for run in row:
            for name in run.blocks:
                if name not in where and above is not None:
                    parents[name] = above
                    children[above] = children.get(above, 0) + 1
                where[name] = run
                above = name
        while len(where) > capacity:
            kept = [run for run in live if any(where.get(name) is run for name in run.blocks)]
            now = request.arrival / SECOND
            buckets = np.searchsorted(ages, [now - run.at for run in kept], side="right") - 1
            worth = values[[run.number for run in kept], buckets] if kept else []
            live = kept
            before = len(where)
            for place in np.lexsort(([-run.number for run in kept], [run.at for run in kept], worth)):
                if len(where) <= capacity:
                    break
                _shorten(kept[place], where, children, parents, len(where) - capacity)
            if len(where) == before:  # only blocks of this request are cached, so shorten its own runs
                for run in reversed(row):
                    _shorten(run, where, children, parents, len(where) - capacity)
        live += row
    return found


def _shorten(
    run: ReuseRun, where: dict[int, ReuseRun], children: dict[int, int], parents: dict[int, int], most: int
) -> None:
    while most > 0 and run.blocks:
        name = run.blocks[-1]
        if where.get(name) is run:
            if children.get(name):
                return
            del where[name]
            if (above := parents.pop(name, None)) is not None:
                children[above] -= 1
            most -= 1
        run.blocks.pop()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="How much of a trace's reuse can be foreseen.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity-blocks", default="1827,3655,9140,18279", metavar="N[,N...]")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace)
    requests, block = trace.requests, trace.block_tokens
    half = next(index for index, each in enumerate(requests) if 2 * each.arrival >= requests[-1].arrival)
    tokens = sum(each.prompt_tokens for each in requests)
    later = sum(each.prompt_tokens for each in requests[half:])
    rows = runs_of(requests)
    runs = [run for row in rows for run in row]
    end = requests[-1].arrival / SECOND

    early = [run for row in rows[:half] for run in row]
    by_first_half = predicted_values(early, requests[half].arrival / SECOND, runs)
    by_others = np.empty_like(by_first_half)
    for fold in range(FOLDS):
        asked = [run for run in runs if run.conversation * 2_654_435_761 % 2**32 % FOLDS == fold]
        taught = [run for run in runs if run.conversation * 2_654_435_761 % 2**32 % FOLDS != fold]
        by_others[[run.number for run in asked]] = predicted_values(taught, end, asked)

    for capacity in map(int, arguments.capacity_blocks.split(",")):
        print(f"{capacity} blocks: whole trace, second half")
        for name in ("lru", "hazard"):
            whole, first = (
                replay(part, policy(name), capacity_blocks=capacity, block_tokens=block).hit_tokens
                for part in (requests, requests[:half])
            )
            print(f"  {name:20}  {whole / tokens:.4f}  {(whole - first) / later:.4f}")
        for name, values in (("first half", by_first_half), ("other conversations", by_others)):
            found = hits(requests, runs_of(requests), values, capacity, block)
            print(f"  {name:20}  {sum(found) / tokens:.4f}  {sum(found[half:]) / later:.4f}")
        best = optimal(requests, capacity_blocks=capacity, block_tokens=block)
        print(f"  {'belady':20}  {best.hit_rate:.4f}", flush=True)


if __name__ == "__main__":
    main()
