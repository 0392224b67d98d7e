"""Price scorer: the joules or dollars that a request costs on each worker, converted to blocks of prefill.

    cost = (tokens to compute × a prompt token's price  +  tokens to generate × an answer token's price)  /  the cheapest prompt token's price  /  tokens of a block

1. Prices are for one token on a kind of worker: joules (`joules_per_token` of a simulated pool, `fleet hardware estimate`) or dollars.
   Prices are given for beginnings of worker names, because a worker's name begins with the name of its pool. The longest beginning that
   matches counts.
2. Like the costs of other scorers, these costs are in blocks of prefill: 1 is the price of computing one block of a prompt on the cheapest
   worker. With weight 1, a worker on which a request costs ten blocks more is chosen only if it is ten blocks less busy. So the cheap
   workers fill up first, and the expensive workers serve the requests that would otherwise wait.
3. An answer counts with its length limit, but at most with `answer_tokens` tokens, because clients rarely say how long an answer will be.
4. A worker without a price costs as much as the most expensive one.

The scorer only compares workers that are switched on. Only a component that can switch workers off can save their idle power.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from fleet.core.ids import WorkerId, longest_prefix
from fleet.core.roles import Phase
from fleet.router.policy import Candidates, Floats, PlacementRequest

Amount = Annotated[float, Meta(gt=0, le=1e12)]

REMEMBERED = 10_000
"""Maximum number of workers whose prices are cached, so that they are not looked up by the worker's name for each request."""


class PriceScorer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scorer that computes the cost formula of this module."""

    prompt: Annotated[dict[str, Amount], Meta(min_length=1)]
    """Price of a prompt token, in joules or dollars, on the workers whose names begin with the key (item 1)."""

    answer: Annotated[dict[str, Amount], Meta(min_length=1)]
    """Price of an answer token, in the unit of `prompt`, on the workers whose names begin with the key (item 1)."""

    answer_tokens: Annotated[int, Meta(ge=1)] = 256
    """The usual length of an answer in tokens. Longer length limits of requests count as this length."""

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
