"""Policy pipeline: filters, then weighted scorers, then a picker; and Fleet's default policy, which has this form.

Most built-in policies are a `Pipeline`. The default policy (`Fleet`) consists of the filter `HeadroomFilter`, the scorer `FleetCost`, and the
picker `Lowest`, or `Softmax` if it has a temperature. The cost is the work that a request causes on a worker, in blocks of prefill.

    cost = max(0, prefill - credit)  +  work × its price  +  decode blocks × their weight  +  running requests × their weight
           -  session

`fleet/router/native/costs.c` computes it, or `fleet/router/native/twin.py` with equal results if the extension is missing. Items 1 to 8
explain the terms, and item 9 the filter:

1. *prefill* is (tokens of the backlog + tokens of the prompt) / tokens of a block. The backlog is what the worker has to compute already.
2. *credit* is for the prompt's leading blocks that need not be computed. A block counts 1 if it is in the engine, 0.75 if it is in the
   store's memory, and 0.5 if it is in a tier below. The difference to 1 is the cost of the transfer, in blocks of prefill. If blocks from
   the store have to be converted, the cost of the conversion is subtracted too.
3. Blocks that live requests hold on the worker or will soon compute there count like blocks in the engine, even before the worker reports
   them. So siblings that arrive together go to the same worker. For a request that needs these blocks, they are also left out of the
   backlog: on another worker, the request would have to compute them itself.
4. *work* is the number of blocks that the request has to compute on the worker: prompt minus credit. The terms up to here measure the
   request's own wait. Other requests wait for the work too, and the *price* of a block says for how long. Later requests are delayed by
   busy / (workers + 1 - busy) blocks, where busy is the number of workers that compute prompts now. Requests that run on the worker are
   delayed by the steps that compute the block. With this price, requests in an idle cluster do not wait for the worker that holds their
   prompt, but have it computed again elsewhere. In a busy cluster they wait for that worker. Without a price, every request would be placed
   where its own first token comes soonest, and together the requests would compute shared prefixes several times (ADR 0014).
5. *decode blocks* are the unique blocks that live requests hold on the worker, including those of this request. An answer near its expected
   end counts less.
6. On a worker with a full batch, the credit is multiplied by 1 - `spread` × waiting requests / batch size, or by 0 if this is negative. The
   waiting requests include the one that is being placed. So a hot prefix spreads to another worker before requests with this prefix have to
   wait for a place in the batch.
7. The terms of items 1 to 4 are divided by the worker's relative speed of prefill, and those for decode blocks and running requests by its
   relative speed of decoding. So a slow worker has higher costs. The credit of a fetched block is what the fetch saves compared with
   computing the block on this worker.
8. The cost of the worker that served this session's last request is lowered by `session_blocks`.
9. If there is a goal for the first token, workers that will probably keep it are preferred. The time of the first token is predicted from
   the recent time per prompt token on the worker.

Items 1, 2 and 5 are NVIDIA Dynamo's cost function (lib/kv-router, 1.6), except for the weight of decoding. The price comes from queueing
theory: work x that joins a queue with work u makes later requests wait λ / (1 - ρ) · x · (u + x / 2) in total, where λ is the rate of
arrivals and ρ the utilisation. If u + x / 2 is about the work of one request, this is x · ρ / (1 - ρ) (E. Hyytiä, A. Penttinen, S. Aalto,
"Size- and state-aware dispatching problem with queue-specific job sizes", EJOR 217, 2012). ρ is estimated from the table, with one idle
worker more than there is, so that it is never 1. The other items are Fleet's own.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.native import costs as native
from fleet.router.native.twin import credit_of, price_of
from fleet.router.policy import (
    ACTIVE_BLOCKS,
    BACKLOG_TOKENS,
    BLOCK_TOKENS,
    DECODE_SPEED,
    NEW_BLOCKS,
    PREFILL_SPEED,
    REQUESTS,
    Candidates,
    Filter,
    Flags,
    Floats,
    ItemizedScorer,
    Picker,
    PlacementPolicy,
    PlacementRequest,
    RandomSource,
    RankingScorer,
    Rows,
    Scorer,
)

_PREFILL = Phase.PREFILL  # reading a module variable is three to ten times as fast as reading the enum attribute
_STEPS = 1 << 53  # number of different random numbers from 0 to below 1 that `Softmax` can draw


class Pipeline:
    """Policy that applies filters, then weighted scorers, then a picker."""

    def __init__(
        self,
        name: str,
        *,
        filters: Sequence[Filter] = (),
        scorers: Sequence[tuple[str, float, Scorer]] = (),
        picker: Picker | None = None,
    ):
        """Combine the parts of a policy.

        Args:
            name: The policy's name in settings.
            filters: The filters in order. Each gets the candidates that the filter before it has kept.
            scorers: For each scorer its name, its weight and the scorer.
            picker: The picker; None: the lowest cost, where ties are drawn at random.
        """
        self.name = name
        self._filters = tuple(filters)
        self.scorers = tuple(scorers)
        self._picker: Picker = picker or Lowest()
        self._total = self._sum
        # The only scorer, if it has weight 1 and can find the lowest costs itself, and the picker is `Lowest`. None: `choose` computes all
        # costs.
        self._ranking: RankingScorer | None = None
        if len(self.scorers) == 1 and self.scorers[0][1] == 1:
            scorer = self.scorers[0][2]
            self._total = scorer.costs
            if isinstance(self._picker, Lowest) and isinstance(scorer, RankingScorer):
                self._ranking = scorer

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> tuple[int, PlacementPolicy]:
        rows: Rows | None = None
        for each in self._filters:
            if (flags := each.keep(request, candidates, phase)) is None:
                continue
            keep = flags.nonzero()[0]
            if 0 < len(keep) < len(candidates):
                rows, candidates = keep if rows is None else rows[keep], candidates.only(keep)
        if self._ranking is None:
            picked = self._picker.pick(self._total(request, candidates, phase), request, candidates, rng)
        else:
            picked = drawn(self._ranking.lowest(request, candidates, phase), rng)
        return picked if rows is None else int(rows[picked]), self

    def _sum(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        total = np.zeros(len(candidates))
        for _, weight, scorer in self.scorers:
            total += weight * scorer.costs(request, candidates, phase)
        return total

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        parts: dict[str, Floats] = {}
        for name, weight, scorer in self.scorers:
            if isinstance(scorer, ItemizedScorer):
                found = scorer.parts(request, candidates, phase)
            else:
                found = {name: scorer.costs(request, candidates, phase)}
            for part, costs in found.items():
                parts[part] = parts.get(part, 0.0) + weight * costs
        return parts


def lowest(costs: Floats, rng: RandomSource) -> int:
    """Return the position of the lowest cost. Exact ties are drawn with equal chances, so that equal workers get equal shares."""
    return drawn(native.lowest(costs), rng)


def drawn(places: list[int], rng: RandomSource) -> int:
    """Draw one of the positions; all have the same chance."""
    return places[0] if len(places) == 1 else places[rng.randrange(len(places))]


class Lowest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picker that takes the lowest cost. Ties are drawn at random."""

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        return lowest(costs, rng)


class Softmax(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picker that prefers low costs, like NVIDIA Dynamo: p ∝ exp(-(cost - lowest) / ((highest - lowest) · temperature)).

    The costs are divided by their range over the candidates, so that a temperature has the same meaning for any unit of cost. With
    temperature 0 this is the same as `Lowest`.
    """

    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError("temperature: must be 0 or more")

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        if self.temperature == 0:
            return lowest(costs, rng)
        values = costs.tolist()
        low, high = min(values), max(values)
        if low == high:
            return rng.randrange(len(values))
        if (scale := (high - low) * self.temperature) == 0:  # the product is too small for a float
            return lowest(costs, rng)
        sums = list(accumulate(math.exp((low - value) / scale) for value in values))
        drawn = sums[-1] * rng.randrange(_STEPS) / _STEPS
        return next(place for place, bound in enumerate(sums) if drawn < bound)


class InTurn:
    """Picker that takes workers in turn, whatever they cost: the worker that was not chosen for the longest time is next.

    It remembers the names of workers and not their positions, so that no worker is repeated or skipped when another one joins or leaves.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}  # for each worker, the number of the choice (`_turn`) that last took it
        self._turn = 0

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        turns = self._turns
        if len(turns) > 2 * len(candidates) + 64:  # forget workers that have left, but not at every choice
            known = set(candidates.worker_ids)
            self._turns = turns = {name: turn for name, turn in turns.items() if name in known}
        names = candidates.worker_ids
        place = min(range(len(names)), key=lambda row: turns.get(names[row], 0))
        self._turn += 1
        turns[names[place]] = self._turn
        return place


class TwoChoices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picker that draws two candidates at random and takes the cheaper one (Mitzenmacher, "The Power of Two Choices", IEEE TPDS 2001)."""

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        count = len(costs)
        if count == 1:
            return 0
        first = rng.randrange(count)
        second = rng.randrange(count - 1)
        second += second >= first
        return first if costs[first] <= costs[second] else second


class FleetCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scorer that computes the cost formula of the default policy (items 1 to 8).

    In the default policy, the fields that `RouterSettings` also has get their values from there
    (`fleet.router.placement.policies.built_in.parameters`). Their defaults below apply to `composed` policies that name this scorer.
    """

    engine_hit_credit: float = 1.0
    """Hit credit (item 2) of a block in the engine's own cache, in blocks of prefill."""

    store_hit_credit: float = 0.75
    """Hit credit of a block that has to be loaded from the store's memory, in blocks of prefill (NVIDIA Dynamo's weight of a host cache
    hit)."""

    lower_tier_hit_credit: float = 0.5
    """Hit credit of a block that the store first has to fetch from a tier below its memory, in blocks of prefill."""

    running_request_blocks: float = 1.0
    """Cost of each request on a worker, in blocks of prefill. It stands for the time that a request adds to decode steps, apart from the
    time to read its blocks."""

    decode_weight: float = 0.3
    """Cost of a block that live requests hold, in blocks of prefill. Each decode step reads the block once. For an answer of
    some hundred tokens, these reads together take a tenth to a third of the time of computing the block. With Dynamo's weight
    of 1, a held chain raises the cost of its worker by as much as a hit on this chain lowers it. So requests with a shared
    prefix would be spread over several workers."""

    spread: float = 2.0
    """How fast the credit for a cached block falls on a worker with a full batch (item 6). With 2, the credit is 0 when as many requests
    wait as half of the batch."""

    others_weight: float = 1.0
    """Weight of the delay of later requests, against the request's own wait; 0: each request is placed where its own first token
    comes soonest."""

    stall_weight: float = 0.3
    """Weight of the delay of a running request, compared with the same delay of a request that waits for its first token. It is below
    1, because an answer takes about ten times as long as the wait for its first token. It is above 0.1, because a single long prompt
    makes a short answer late (ADR 17)."""

    session_blocks: float = 1.0
    """Number of blocks of prefill by which the cost of the worker of the session's last request is lowered. It is small, because the
    credit for the cached blocks of the session already prefers this worker."""

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        columns = candidates.columns
        costs = np.empty(columns.shape[1])
        native.fleet_costs(columns, costs, *self._weights(request, candidates, phase))
        if request.bound is not None:
            costs -= self._session(request, candidates)
        return costs

    def lowest(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> list[int]:
        if request.bound is not None:
            return native.lowest(self.costs(request, candidates, phase))
        return native.fleet_lowest(candidates.columns, *self._weights(request, candidates, phase))

    def _weights(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase
    ) -> tuple[int, float, float, float, float, float, float, float, float, bool, bool, bool]:
        """Return the arguments of `fleet.router.native.twin.fleet_costs` after the table, in their order."""
        return (
            request.prompt_tokens,
            self.engine_hit_credit,
            self.store_hit_credit,
            self.lower_tier_hit_credit,
            self.running_request_blocks,
            self.decode_weight,
            self.spread,
            self.others_weight,
            self.stall_weight,
            candidates.warm,
            candidates.even,
            phase is _PREFILL,
        )

    def parts(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        columns = candidates.columns
        credit, shared = credit_of(
            columns,
            self.engine_hit_credit,
            self.store_hit_credit,
            self.lower_tier_hit_credit,
            self.spread,
            candidates.even,
        )
        prefill = (columns[BACKLOG_TOKENS] + request.prompt_tokens) / columns[BLOCK_TOKENS]
        left = np.maximum(0.0, (prefill - credit - shared) / columns[PREFILL_SPEED])
        work = np.maximum(0.0, request.prompt_tokens / columns[BLOCK_TOKENS] - credit) / columns[PREFILL_SPEED]
        prefill = prefill / columns[PREFILL_SPEED]
        speed = columns[DECODE_SPEED]
        parts = {"prefill": prefill, "credit": left - prefill}
        parts["others"] = work * price_of(columns, self.others_weight, self.stall_weight, phase is Phase.PREFILL)
        if phase is not Phase.PREFILL:
            parts["decode"] = self.decode_weight * (columns[ACTIVE_BLOCKS] + columns[NEW_BLOCKS]) / speed
        parts["requests"] = self.running_request_blocks * columns[REQUESTS] / speed
        if request.bound is not None:
            parts["session"] = -self._session(request, candidates)
        return parts

    def _session(self, request: PlacementRequest, candidates: Candidates) -> Floats:
        preferred = np.zeros(len(candidates))
        if request.bound in candidates.worker_ids:
            preferred[candidates.worker_ids.index(request.bound)] = self.session_blocks
        return preferred


class HeadroomFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter that keeps the workers from which the first token is expected in time. A worker without measurements counts as fast enough."""

    # Seconds within which the first token shall come, besides the request's deadline; 0: only the deadline counts.
    ttft_goal_seconds: float = 0.0

    def keep(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Flags | None:  # noqa: ARG002
        if self.ttft_goal_seconds == 0 and request.seconds_left is None:
            return None
        goals = [self.ttft_goal_seconds] if self.ttft_goal_seconds else []
        if request.seconds_left is not None:
            goals.append(request.seconds_left)
        tokens = candidates.backlog_tokens + candidates.uncached_tokens(request.prompt_tokens)
        in_time: Flags = tokens * candidates.token_seconds <= min(goals)
        return in_time


class Fleet(FleetCost, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default policy: the lowest `FleetCost` among the workers that will probably keep the goal for the first token."""

    ttft_goal_seconds: float = 0.0
    """Goal for the time to the first token, in seconds (item 9); 0: only a request's own deadline counts."""

    temperature: float = 0.0
    """Temperature of the random choice among the candidates (`Softmax`); 0: the candidate with the lowest cost is taken."""

    def policy(self) -> Pipeline:
        return Pipeline(
            "fleet",
            filters=[HeadroomFilter(ttft_goal_seconds=self.ttft_goal_seconds)],
            scorers=[("fleet", 1.0, self)],
            picker=Softmax(temperature=self.temperature) if self.temperature else Lowest(),
        )
