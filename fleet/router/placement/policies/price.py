"""What a request costs its operator where it runs: joules or dollars, as a part of a policy.

    cost = (tokens to compute × a prompt token's price  +  tokens to generate × an answer token's)  /  the cheapest prompt token's  /  block

1. Prices are what a token takes on a kind of worker: joules (`joules_per_token` of a simulated pool, `fleet hardware estimate`) or
   dollars. They are given by the beginnings of workers' names, the longest that fits: names begin with those of their pools.
2. Costs are in blocks of prefill on the cheapest worker, as the other scorers' are: with a weight of 1, a worker where a request costs
   as much as ten blocks more has to be ten blocks less busy. So the cheap fill up first, and the dear ones serve what would wait.
3. Answers are taken to be as long as they may be, but no longer than `answer_tokens`: clients rarely say how long they will be.
4. A worker without a price costs as much as the dearest.

It chooses among workers that are on. What idle workers take is for those to save who can turn them off.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from fleet.core.ids import WorkerId, longest_prefix
from fleet.core.roles import Phase
from fleet.router.candidates import Candidates, Floats, PlacementRequest

Amount = Annotated[float, Meta(gt=0, le=1e12)]

REMEMBERED = 10_000
"""Workers whose prices are found by name at once."""


class PriceScorer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The formula above."""

    prompt: Annotated[dict[str, Amount], Meta(min_length=1)]
    """Of a prompt token, by the beginning of workers' names."""

    answer: Annotated[dict[str, Amount], Meta(min_length=1)]
    """Of an answer token, likewise."""

    answer_tokens: Annotated[int, Meta(ge=1)] = 256
    """As long as answers usually are."""

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        worker_ids = candidates.worker_ids
        spent = candidates.uncached_tokens(request.prompt_tokens) * _of_each(self.prompt, worker_ids)
        if phase is not Phase.PREFILL:
            spent += min(request.answer_tokens, self.answer_tokens) * _of_each(self.answer, worker_ids)
        costs: Floats = spent / (min(self.prompt.values()) * candidates.block_tokens)
        return costs


def _of_each(prices: Mapping[str, float], worker_ids: Sequence[WorkerId]) -> Floats:
    known = tuple(prices.items())
    return np.array([_named(known, worker_id) for worker_id in worker_ids])


@lru_cache(REMEMBERED)
def _named(prices: Sequence[tuple[str, float]], worker_id: WorkerId) -> float:
    known = dict(prices)
    name = longest_prefix(worker_id, known)
    return max(known.values()) if name is None else known[name]
