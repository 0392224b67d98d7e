"""Candidate tables for tests of placement and policies; a test gives the values of each worker."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, structs

from fleet.core.roles import Phase, Role
from fleet.core.work import WorkerDescription
from fleet.router import policy as quantity
from fleet.router.placement.candidate_table import CandidateTable, PoolTopology, ServingWorkers, max_requests
from fleet.router.placement.decision import CostTerms, Decision, DecisionExplanation
from fleet.router.placement.decision import decide as decide_in_table
from fleet.router.placement.policies.built_in import parameters, policy
from fleet.router.placement.wait_or_reject import Rejection, WaitForRoom
from fleet.router.policy import Candidates, PlacementRequest, RandomSource
from fleet.router.settings.router import RouterSettings
from kvstore.block import blocks_for
from tests.support.builders import BLOCK_TOKENS, a_description


class CandidateRow(Struct, frozen=True, kw_only=True):
    """Holds the values of one worker for one request; `fleet.router.policy` explains them."""

    description: WorkerDescription
    draining: bool = False
    failed: bool = False
    backlog_tokens: int = 0
    active_blocks: int = 0
    requests: int = 0
    token_seconds: float = 0.0
    new_blocks: int
    engine_blocks: int = 0
    coming_blocks: int = 0
    store_blocks: int = 0
    below_blocks: int = 0
    conversion: float = 0.0

    @property
    def worker_id(self) -> str:
        return self.description.worker_id


def a_candidate(worker_id: str = "d1", role: Role = Role.DECODE, *, prompt_tokens: int = 100, **fields) -> CandidateRow:
    own = {name: fields.pop(name) for name in tuple(fields) if name in CandidateRow.__struct_fields__}
    own.setdefault("new_blocks", blocks_for(prompt_tokens, fields.get("block_tokens", BLOCK_TOKENS)))
    seldom = {
        name: fields.pop(name)
        for name in ("prefill_speed", "decode_speed", "labels", "keeps_forms", "sampling_fields")
        if name in fields
    }
    description = structs.replace(a_description(worker_id=worker_id, role=role, **fields), **seldom)
    return CandidateRow(description=description, **own)


def table(rows: Sequence[CandidateRow], settings: RouterSettings) -> CandidateTable:
    """Return a candidate table of these workers, in order."""
    columns = np.zeros((quantity.QUANTITIES, len(rows)))
    for row, each in enumerate(rows):
        description = each.description
        columns[:, row] = [
            each.backlog_tokens,
            each.active_blocks,
            each.requests,
            max_requests(description, settings),
            description.max_running,
            description.kv_blocks,
            description.block_tokens,
            description.prefill_speed,
            description.decode_speed,
            each.token_seconds,
            each.engine_blocks + each.coming_blocks if each.coming_blocks else 0,
            each.new_blocks,
            each.engine_blocks,
            each.coming_blocks,
            each.store_blocks,
            each.below_blocks,
            each.conversion,
        ]
    topology = PoolTopology([each.description for each in rows], settings)
    draining = np.array([each.draining for each in rows], dtype=bool)
    failed = np.array([each.failed for each in rows], dtype=bool)
    return CandidateTable(topology, columns, ServingWorkers.of(topology, draining), failed if failed.any() else None)


def decide(
    request: PlacementRequest, rows: Sequence[CandidateRow], settings: RouterSettings, rng: RandomSource
) -> DecisionExplanation | WaitForRoom | Rejection:
    """Let the policy that the settings name decide; return the explained decision, or the outcome if no worker was chosen."""
    chosen = policy(settings.policy, parameters(settings))
    outcome = decide_in_table(request, table(rows, settings), chosen, settings, rng)
    return outcome.explained() if isinstance(outcome, Decision) else outcome


def score(
    standing: CandidateRow, prompt_tokens: int, settings: RouterSettings, *, phase: Phase = Phase.AGGREGATED, **request
) -> CostTerms:
    """Return the cost of one worker by the policy that the settings name, without other workers to compare with."""
    chosen = policy(settings.policy, parameters(settings))
    candidates = candidates_of([standing], settings)
    question = PlacementRequest(prompt_tokens=prompt_tokens, **request)
    parts = {name: float(costs[0]) for name, costs in chosen.costs(question, candidates, phase).items()}
    return CostTerms(worker_id=standing.worker_id, cost=sum(parts.values()), parts=parts)


def candidates_of(rows: Sequence[CandidateRow], settings: RouterSettings) -> Candidates:
    return table(rows, settings).candidates(np.arange(len(rows)))
