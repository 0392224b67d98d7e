"""NVIDIA Dynamo's cost function in KV blocks, as release 1.6 ships it.

Source: lib/kv-router/src/scheduling/selector/default.rs.

    excess = (active prefill tokens - the lowest number of them on any candidate) / block
    credit = overlap_score_credit / (1 + overlap_score_credit_decay · excess / prompt blocks) · blocks on the device
           + host_cache_hit_weight · blocks in host memory + disk_cache_hit_weight · blocks on disk
    cost   = prefill_load_scale · max(0, (active prefill tokens + prompt) / block - credit)
           + unique decode blocks, with those that the prompt would add
           + decode_active_request_weight · active requests

`prompt` is a number of tokens, and `block` the number of tokens of a block. The choice is by temperature (`Softmax`). Dynamo's prefill
workers are scored the same without the decode term. The store's memory counts as host memory, and tiers below it as disk.

There are two differences. Here the decode worker of a pair is chosen as if it also computed the prompt; Dynamo chooses it by its load
alone. Here the blocks of an answer count as the answer grows; in Dynamo this is an option.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.placement.policies.pipeline import Pipeline, Softmax
from fleet.router.policy import Candidates, Floats, PlacementRequest


class DynamoCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scorer with the cost formula of this module and Dynamo's default parameters."""

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        parts = self.parts(request, candidates, phase)
        return sum(parts.values(), start=np.zeros(len(candidates)))

    def parts(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:
        block = candidates.block_tokens
        prefill = (candidates.backlog_tokens + request.prompt_tokens) / block
        excess = (candidates.backlog_tokens - candidates.backlog_tokens.min()) / block
        prompt_blocks = np.ceil(request.prompt_tokens / block)
        decay = 1 / (1 + self.overlap_score_credit_decay * excess / prompt_blocks)
        credit = (
            self.overlap_score_credit * decay * candidates.engine_blocks
            + self.host_cache_hit_weight * candidates.store_blocks
            + self.disk_cache_hit_weight * candidates.below_blocks
        )
        scaled = self.prefill_load_scale * prefill
        adjusted = self.prefill_load_scale * np.maximum(0.0, prefill - credit)
        parts = {"prefill": scaled, "credit": adjusted - scaled}
        if phase is not Phase.PREFILL:
            parts["decode"] = candidates.active_blocks + candidates.new_blocks
        parts["requests"] = self.decode_active_request_weight * candidates.requests
        return parts


class Dynamo(DynamoCost, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy with NVIDIA Dynamo's cost function and its choice by temperature, with Dynamo's defaults."""

    router_temperature: float = 0.0

    def policy(self) -> Pipeline:
        return Pipeline(
            "dynamo",
            scorers=[("dynamo", 1.0, self)],
            picker=Softmax(temperature=self.router_temperature),
        )
