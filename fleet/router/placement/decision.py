"""Placement decision: the best candidate of a request by the policy, or the best pair.

Rules:

1. The decode worker is chosen first, as if it also had to compute the prompt: the policy chooses among the eligible workers
   (`fleet.router.placement.candidate_table`). The default policy's cost is counted in blocks of prefill
   (`fleet.router.placement.policies.pipeline`).
2. The function `split` defines whether another worker computes the prompt. The client may demand one worker, or a pair. If it demands
   neither, another worker computes a prompt that has enough uncached tokens, provided that a compatible prefill worker has room. Enough is
   `remote_prefill_min_tokens`, or the number that the router has learned (`fleet.router.placement.break_even`).
3. The same policy chooses the prefill worker among those that pair with the decode worker. It leaves out the decode part of the cost,
   because a prefill worker holds blocks only while it computes. A prefill pool consists of workers with the role PREFILL. A worker with the
   role BOTH computes prompts for a worker with the role DECODE. It does so for another worker with the role BOTH only when the client
   demands a pair, because both workers can do the same work.
4. Two workers pair when their blocks hold the same values (equal fingerprints), they are of one generation, and they share a KV path. The
   path through a common store takes any layout and number of ranks. The direct path needs equal layouts and equal numbers of ranks. If both
   paths are possible, the store is used, unless the settings prefer the direct path.
5. A decision keeps the data that it was made on. When an explanation is requested, the same functions compute the cost terms of all
   candidates from this data.
6. If no worker can serve the request, it is rejected with a cause. If the workers that can serve it are at their limits, it waits
   (`fleet.router.placement.wait_or_reject`).
"""

from collections.abc import Mapping
from enum import StrEnum

import numpy as np
from msgspec import Struct

from fleet.core.ids import WorkerId
from fleet.core.roles import KvPath, Phase, Placement
from fleet.core.work import WorkerDescription
from fleet.router.placement.break_even import PrefillBreakEven
from fleet.router.placement.candidate_table import (
    CandidateTable,
    IneligibleReason,
    capable,
    common_path,
    eligible,
    ineligible_reasons,
    prefer_lora_workers,
    prefill_partners,
)
from fleet.router.placement.wait_or_reject import Rejection, WaitForRoom, explain_no_candidate, reject_without_pair
from fleet.router.policy import (
    BELOW_BLOCKS,
    ENGINE_BLOCKS,
    LIMIT,
    REQUESTS,
    Candidates,
    PlacementPolicy,
    PlacementRequest,
    RandomSource,
    Rows,
    token_seconds,
)
from fleet.router.settings.router import RouterSettings


class PlacementReason(StrEnum):
    """The reason why a request went to one worker or to a pair. It is recorded with each decision, and metrics count it."""

    # The request went to one worker:
    SHORT_UNCACHED_PROMPT = "short_uncached_prompt"
    NO_PREFILL_WORKER = "no_prefill_worker"
    NO_COMPATIBLE_PAIR = "no_compatible_pair"
    PREFILL_WORKERS_BUSY = "prefill_workers_busy"
    PREFILL_LOST = "prefill_lost"  # every prefill worker that is left has failed this request before
    # The request went to a pair:
    PROMPT_LONG_UNCACHED = "prompt_long_uncached"
    # The request went to one worker or to a pair:
    ASKED_BY_CLIENT = "asked_by_client"


# Every decision needs these names. Reading a module variable is three to ten times as fast as reading an enum attribute.
_WHOLE, _AUTO, _SHORT = Phase.AGGREGATED, Placement.AUTO, PlacementReason.SHORT_UNCACHED_PROMPT
_TOGETHER, _ALONE = Placement.AGGREGATED, PlacementReason.NO_PREFILL_WORKER


class CostTerms(Struct, frozen=True, kw_only=True):
    """The cost of one candidate, and the terms that add up to it."""

    worker_id: WorkerId
    cost: float
    parts: dict[str, float]


class DecisionExplanation(Struct, frozen=True, kw_only=True):
    """A decision with the costs that led to it. Without `prefill`, the decode worker also computes the prompt."""

    decode: WorkerId
    prefill: WorkerId | None = None
    kv_path: KvPath | None = None
    why: PlacementReason
    policy: str  # name of the policy that chose the decode worker
    prefill_policy: str = ""
    uncached_tokens: int  # prompt tokens that neither the decode worker nor its store holds
    min_tokens: int  # the number of uncached tokens from which on another worker would compute the prompt
    prefill_tokens: int  # prompt tokens that the chosen prefill or decode worker has to compute
    candidates: tuple[CostTerms, ...]
    prefill_candidates: tuple[CostTerms, ...] = ()
    unfit: tuple[tuple[WorkerId, IneligibleReason], ...] = ()


# Many decisions are kept for explanations. Decisions are in no reference cycles, so the garbage collector need not track them.
class Decision(Struct, frozen=True, kw_only=True, gc=False):
    """The chosen workers, and the data on which they were chosen. Without `prefill`, the decode worker also computes the prompt."""

    decode: WorkerId
    prefill: WorkerId | None = None
    kv_path: KvPath | None = None
    why: PlacementReason
    uncached_tokens: int
    min_tokens: int
    prefill_tokens: int
    request: PlacementRequest
    candidate_table: CandidateTable
    rows: Rows  # rows of the candidates for decoding, as positions in `candidate_table`
    policy: PlacementPolicy
    prefill_rows: Rows | None = None
    prefill_policy: PlacementPolicy | None = None

    def explained(self) -> DecisionExplanation:
        """Return the decision with the cost terms of all candidates."""
        candidates = self.candidate_table.candidates(self.rows)
        partners: tuple[CostTerms, ...] = ()
        if self.prefill_rows is not None and self.prefill_policy is not None:
            able = self.candidate_table.candidates(self.prefill_rows)
            partners = _terms(self.prefill_policy, self.request, able, Phase.PREFILL)
        return DecisionExplanation(
            decode=self.decode,
            prefill=self.prefill,
            kv_path=self.kv_path,
            why=self.why,
            policy=self.policy.name,
            prefill_policy="" if self.prefill_policy is None else self.prefill_policy.name,
            uncached_tokens=self.uncached_tokens,
            min_tokens=self.min_tokens,
            prefill_tokens=self.prefill_tokens,
            candidates=_terms(self.policy, self.request, candidates, Phase.AGGREGATED),
            prefill_candidates=partners,
            unfit=tuple(ineligible_reasons(self.request, self.candidate_table, set(candidates.worker_ids)).items()),
        )

    def next_best(self, most: int) -> tuple[WorkerId, ...]:
        """Return at most `most` other workers that could answer the request, the one with the lowest cost first."""
        terms = _terms(self.policy, self.request, self.candidate_table.candidates(self.rows), Phase.AGGREGATED)
        others = sorted((each for each in terms if each.worker_id != self.decode), key=lambda each: each.cost)
        return tuple(each.worker_id for each in others[:most])


def decide(
    request: PlacementRequest,
    candidate_table: CandidateTable,
    policy: PlacementPolicy,
    settings: RouterSettings,
    rng: RandomSource,
    break_even: PrefillBreakEven | None = None,
) -> Decision | WaitForRoom | Rejection:
    """Choose the workers for one request, or return why it has to wait or is rejected.

    Args:
        request: The properties of the request.
        candidate_table: All workers of the model, in any state.
        policy: Chooses among the candidates.
        settings: The router's settings.
        rng: The source of randomness for ties.
        break_even: The learned prefill break-even; None: the setting `remote_prefill_min_tokens` is used.
    """
    topology, columns = candidate_table.topology, candidate_table.columns
    rows = eligible(request, candidate_table)
    if len(rows) == 0:
        return explain_no_candidate(request, candidate_table)
    place, by = policy.choose(request, candidate_table.candidates(rows), _WHOLE, rng)
    row: int = rows.item(place)
    uncached, to_compute = _uncached(request, candidate_table, row)

    min_tokens = settings.remote_prefill_min_tokens
    if break_even is not None:
        min_tokens = break_even.min_tokens(token_seconds(columns, row), int(columns[REQUESTS, row]), min_tokens)
    if request.placement is _AUTO and uncached < min_tokens:
        splitting, why = False, _SHORT
    elif request.placement is _TOGETHER:
        splitting, why = False, PlacementReason.ASKED_BY_CLIENT
    else:
        partners = topology.partners(row, request.placement, request.kv_path)
        pairing = prefill_partners(request, candidate_table, row) if len(partners.pool) else partners.rows
        prefill_rows = pairing
        if len(pairing):
            prefill_rows = prefer_lora_workers(
                candidate_table, pairing[columns[REQUESTS, pairing] < columns[LIMIT, pairing]]
            )
        splitting, why = split(
            request.placement,
            uncached,
            min_tokens,
            pool=_pool(candidate_table, partners.pool) if len(partners.pool) else _EMPTY,
            paired=len(pairing) > 0,
            free=len(prefill_rows) > 0,
        )
        if why is PlacementReason.NO_COMPATIBLE_PAIR and request.kv_path is not None:
            return reject_without_pair(request)
        if splitting:
            place, prefill_by = policy.choose(request, candidate_table.candidates(prefill_rows), Phase.PREFILL, rng)
            prefill_row = int(prefill_rows[place])
            return Decision(
                decode=topology.worker_ids[row],
                prefill=topology.worker_ids[prefill_row],
                kv_path=partners.paths[prefill_row],
                why=why,
                uncached_tokens=uncached,
                min_tokens=min_tokens,
                prefill_tokens=_uncached(request, candidate_table, prefill_row)[1],
                request=request,
                candidate_table=candidate_table,
                rows=rows,
                policy=by,
                prefill_rows=prefill_rows,
                prefill_policy=prefill_by,
            )
    return Decision(
        decode=topology.worker_ids[row],
        why=why,
        uncached_tokens=uncached,
        min_tokens=min_tokens,
        prefill_tokens=to_compute,
        request=request,
        candidate_table=candidate_table,
        rows=rows,
        policy=by,
    )


def decide_decode(
    prefill: WorkerDescription,
    kv_path: KvPath,
    request: PlacementRequest,
    candidate_table: CandidateTable,
    policy: PlacementPolicy,
    settings: RouterSettings,
    rng: RandomSource,
) -> WorkerId | None:
    """Return another decode worker for blocks that `prefill` has computed; None if no worker can fetch them.

    The decode worker that was chosen first has left or drains. If no worker has room, a worker at its limit is chosen: the prompt is
    already computed, and waiting would only keep the prompt's blocks occupied.
    """
    topology, columns = candidate_table.topology, candidate_table.columns
    able = capable(request, topology, candidate_table.answering, request.answer_tokens)
    reads = [
        row
        for row in able.nonzero()[0].tolist()
        if topology.worker_ids[row] != prefill.worker_id
        and common_path(prefill, topology.descriptions[row], kv_path, settings) is not None
    ]
    if not reads:
        return None
    rows = np.array(reads, dtype=np.intp)
    roomy = rows[columns[REQUESTS, rows] < columns[LIMIT, rows]]
    if len(roomy) > 0:
        rows = roomy
    rows = prefer_lora_workers(candidate_table, rows)
    place, _ = policy.choose(request, candidate_table.candidates(rows), Phase.AGGREGATED, rng)
    return topology.worker_ids[int(rows[place])]


class PrefillPoolState(StrEnum):
    """State of the prefill workers that could compute prompts for a decode worker, if they were compatible and had room."""

    ALIVE = "alive"
    ALL_FAILED = "all_failed"  # all prefill workers have failed this request before
    EMPTY = "empty"


_EMPTY = PrefillPoolState.EMPTY


def split(
    placement: Placement, uncached: int, min_tokens: int, *, pool: PrefillPoolState, paired: bool, free: bool
) -> tuple[bool, PlacementReason]:
    """Return whether another worker computes the prompt, and the reason. The first condition that applies decides.

    Args:
        placement: The placement that the client demands; AUTO: none.
        uncached: Prompt tokens that the decode worker would compute; blocks in its store count as cached.
        min_tokens: The number of uncached tokens from which on a handoff is worthwhile.
        pool: State of the prefill workers for the decode worker, compatible with it or not.
        paired: Whether at least one prefill worker is compatible with the decode worker.
        free: Whether at least one compatible prefill worker has room.
    """
    if placement is not _AUTO:
        return placement is Placement.DISAGGREGATED, PlacementReason.ASKED_BY_CLIENT
    if uncached < min_tokens:
        return False, _SHORT
    if pool is _EMPTY:
        return False, _ALONE
    if pool is PrefillPoolState.ALL_FAILED:
        return False, PlacementReason.PREFILL_LOST
    if not paired:
        return False, PlacementReason.NO_COMPATIBLE_PAIR
    if not free:
        return False, PlacementReason.PREFILL_WORKERS_BUSY
    return True, PlacementReason.PROMPT_LONG_UNCACHED


def _pool(candidate_table: CandidateTable, rows: Rows) -> PrefillPoolState:
    alive = rows[~candidate_table.draining[rows]]
    if len(alive) == 0:
        return PrefillPoolState.EMPTY
    if candidate_table.failed is not None and bool(candidate_table.failed[alive].all()):
        return PrefillPoolState.ALL_FAILED
    return PrefillPoolState.ALIVE


def _uncached(request: PlacementRequest, candidate_table: CandidateTable, row: int) -> tuple[int, int]:
    """Return how many prompt tokens neither a worker (at `row`) nor its store holds, and how many of these the worker would compute.

    Both numbers are at least one, because engines always compute the last prompt token. Blocks that live requests will soon compute on the
    worker are not held yet, but need not be computed again. So the first number includes their tokens, and the second one does not.
    """
    tokens = request.prompt_tokens
    if not candidate_table.warm:
        return tokens, tokens
    engine, coming, store, below = candidate_table.columns[ENGINE_BLOCKS : BELOW_BLOCKS + 1, row].tolist()
    block_tokens, held = candidate_table.topology.descriptions[row].block_tokens, engine + store + below
    return max(1, tokens - int(held * block_tokens)), max(1, tokens - int((held + coming) * block_tokens))


def _terms(
    policy: PlacementPolicy, request: PlacementRequest, candidates: Candidates, phase: Phase
) -> tuple[CostTerms, ...]:
    parts: Mapping[str, list[float]] = {
        name: costs.tolist() for name, costs in policy.costs(request, candidates, phase).items()
    }
    return tuple(
        CostTerms(
            worker_id=worker_id,
            cost=sum(costs[place] for costs in parts.values()),
            parts={name: costs[place] for name, costs in parts.items()},
        )
        for place, worker_id in enumerate(candidates.worker_ids)
    )
