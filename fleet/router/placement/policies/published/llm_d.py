"""llm-d's default scorers (llm-d-router v0.10, pkg/plugins/scorer). Each score is between 0 and 1, and higher is better in llm-d.

    queue   (most waiting - waiting) / (most - least), over the candidates; weight 2
    kv      1 - share of the KV cache in use; weight 2
    prefix  leading blocks of the prompt in the engine / blocks of the prompt; weight 3

llm-d takes the worker with the highest weighted sum of scores, and draws ties. Here each score becomes a cost, weight × (1 - score), which
orders the candidates in the same way. Requests beyond the batch count as waiting.
"""

import numpy as np
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.placement.policies.pipeline import Pipeline
from fleet.router.policy import Candidates, Floats, PlacementRequest, Scorer


class LlmDQueue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """llm-d's queue scorer: the shortest queue costs 0, the longest 1."""

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:  # noqa: ARG002
        waiting = np.maximum(0.0, candidates.requests - candidates.max_running)
        low, high = waiting.min(), waiting.max()
        return np.zeros(len(candidates)) if low == high else (waiting - low) / (high - low)


class LlmDKvUse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """llm-d's KV utilisation scorer: the share of the KV cache in use."""

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:  # noqa: ARG002
        used: Floats = np.minimum(1.0, candidates.active_blocks / candidates.kv_blocks)
        return used


class LlmDPrefix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """llm-d's prefix scorer: the share of the prompt that the engine does not hold."""

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:  # noqa: ARG002
        blocks = np.ceil(request.prompt_tokens / candidates.block_tokens)
        missing: Floats = 1 - np.minimum(1.0, candidates.engine_blocks / blocks)
        return missing


class LlmD(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """llm-d's default policy: the scorers for queue, KV utilisation and prefix, with its default weights."""

    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0

    def policy(self) -> Pipeline:
        scorers: list[tuple[str, float, Scorer]] = [
            ("queue", self.queue, LlmDQueue()),
            ("kv", self.kv, LlmDKvUse()),
            ("prefix", self.prefix, LlmDPrefix()),
        ]
        return Pipeline("llm_d", scorers=scorers)
