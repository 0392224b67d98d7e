"""SMG's cache-aware rule (lightseekorg/smg v1.9, the former SGLang gateway), with its defaults.

    if most requests - least > balance_abs and most > balance_rel × least:  the worker with the fewest requests
    else, if the longest match is more than `match_threshold` of the prompt: the worker that has it
    else:                                                                     the worker with the smallest tree

The *tree* of a worker is what the router itself has sent to it. Here the size of a tree is the number of blocks that
were sent to the worker while the worker did not hold them. As in SMG, a worker that is no candidate for some requests,
for example because it is full, keeps its tree. Copies of the rule in SGLang and vllm-router have other
defaults: a threshold of 0.3, 64 requests and a factor of 1.5.
"""

from math import isfinite

import numpy as np
from msgspec import Struct

from fleet.router.placement.policies.pipeline import Pipeline, lowest
from fleet.router.policy import Candidates, Floats, PlacementRequest, RandomSource

MAX_TREE_BLOCKS = 10_000  # SMG limits the size of a tree; trees that would be larger count with this number of blocks
MAX_TREES = 10_000  # the size of the tree that was not changed for the longest time is forgotten if there are more


class CacheAware:
    """Picker that follows the rule of this module, and remembers the sizes of the trees."""

    def __init__(self, match_threshold: float, balance_abs: int, balance_rel: float):
        self._match_threshold = match_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._trees: dict[str, float] = {}

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        place = self._choice(request, candidates, rng)
        prompt = float(np.ceil(request.prompt_tokens / candidates.block_tokens[place]))
        worker_id = candidates.worker_ids[place]
        new = prompt - float(candidates.engine_blocks[place])
        # The tree that was changed last is moved to the end.
        self._trees[worker_id] = min(MAX_TREE_BLOCKS, self._trees.pop(worker_id, 0.0) + max(0.0, new))
        if len(self._trees) > MAX_TREES:
            del self._trees[next(iter(self._trees))]
        return place

    def _choice(self, request: PlacementRequest, candidates: Candidates, rng: RandomSource) -> int:
        requests = candidates.requests
        most, least = float(requests.max()), float(requests.min())
        if most - least > self._balance_abs and most > self._balance_rel * least:
            return lowest(requests.copy(), rng)
        matched = candidates.engine_blocks * candidates.block_tokens / request.prompt_tokens
        if matched.max() > self._match_threshold:
            return lowest(-matched, rng)
        return lowest(np.array([self._trees.get(worker_id, 0.0) for worker_id in candidates.worker_ids]), rng)


class Smg(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SMG's cache-aware policy: the longest match or the smallest tree if the workers' loads are balanced, or else the fewest requests."""

    match_threshold: float = 0.5
    balance_abs: int = 32
    balance_rel: float = 1.1

    def __post_init__(self) -> None:
        if not (isfinite(self.match_threshold) and 0 <= self.match_threshold <= 1):
            raise ValueError("match_threshold: must be between 0 and 1")

    def policy(self) -> Pipeline:
        return Pipeline("smg", picker=CacheAware(self.match_threshold, self.balance_abs, self.balance_rel))
