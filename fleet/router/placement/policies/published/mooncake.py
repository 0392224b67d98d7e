"""Mooncake's conductor rule (R. Qin et al., "Mooncake", FAST '25, Algorithm 1): the least time to the first token.

For each prefill instance, `own` is its longest match with the prompt, and `longest` is the longest match of all instances:

    if longest / own < balancing_threshold:  TTFT = queue + prefill(prompt, own)
    else:                                    the missing blocks are fetched, TTFT = transfer + queue + prefill(prompt, longest)

*prefill(prompt, match)* is the time to compute the prompt after a match. *queue* is the sum of the queued prefills. The paper fits prefill
and transfer times offline; here they are seconds for each token (`prefill_seconds_per_token`, `quadratic_seconds` for attention, and
`transfer_seconds_per_token`). Mooncake's decode instance is the least loaded one that keeps the target for the time between tokens. Here
the worker that computes the prompt also decodes, and its decoding load is ignored.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.placement.policies.pipeline import Pipeline
from fleet.router.policy import Candidates, Floats, PlacementRequest


class MooncakeTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scorer whose cost is the TTFT of the algorithm, in seconds."""

    balancing_threshold: float = 4.0
    prefill_seconds_per_token: float = 1e-4
    quadratic_seconds: float = 1e-9
    transfer_seconds_per_token: float = 1.3e-5

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:
        parts = self.parts(request, candidates, phase)
        return sum(parts.values(), start=np.zeros(len(candidates)))

    def parts(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:  # noqa: ARG002
        own = np.minimum(candidates.engine_blocks * candidates.block_tokens, request.prompt_tokens)
        longest = own.max()
        fetching = (longest > own) & (longest >= self.balancing_threshold * own)
        prefix = np.where(fetching, longest, own)
        uncached = request.prompt_tokens - prefix
        return {
            "transfer": np.where(fetching, (longest - own) * self.transfer_seconds_per_token, 0.0),
            "queue": candidates.backlog_tokens * self.prefill_seconds_per_token,
            "prefill": uncached * self.prefill_seconds_per_token
            + self.quadratic_seconds * (request.prompt_tokens**2 - prefix**2),
        }


class Mooncake(MooncakeTime, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mooncake's policy: the lowest predicted time to the first token. Blocks are fetched from a worker with a much longer match."""

    def policy(self) -> Pipeline:
        return Pipeline("mooncake", scorers=[("ttft", 1.0, self)])
