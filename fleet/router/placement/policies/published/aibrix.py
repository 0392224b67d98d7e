"""AIBrix's prefix-cache rule (vllm-project/aibrix v0.7), with the defaults of its code.

1. If the largest and the smallest number of requests of a worker differ by more than `imbalance`, the worker with the
   fewest requests is taken.
2. Otherwise, workers with more requests than mean + `deviations` × standard deviation are left out. Of the others, the one
   with the longest cached prefix is taken; among equal ones, that with the fewest requests.
3. If no worker is left, the worker with the fewest requests is taken.

AIBrix's documentation states other defaults than its code: 16 requests and 2 deviations.
"""

from msgspec import Struct

from fleet.router.placement.policies.pipeline import Pipeline, lowest
from fleet.router.policy import Candidates, Floats, PlacementRequest, RandomSource


class PrefixMatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Picker that follows the rules of this module and ignores the costs of scorers."""

    imbalance: int = 8
    deviations: float = 1.0

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        requests = candidates.requests
        if float(requests.max() - requests.min()) <= self.imbalance:
            bound = float(requests.mean()) + self.deviations * float(requests.std())
            matched = candidates.engine_blocks * candidates.block_tokens
            calm = [place for place, count in enumerate(requests.tolist()) if count <= bound]
            if calm:
                best = max((matched[place], -requests[place]) for place in calm)
                among = [place for place in calm if (matched[place], -requests[place]) == best]
                return among[0] if len(among) == 1 else among[rng.randrange(len(among))]
        return lowest(requests.copy(), rng)


class Aibrix(PrefixMatch, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AIBrix's prefix-cache policy: the longest match among workers that do not have many more requests than the others."""

    def policy(self) -> Pipeline:
        return Pipeline("aibrix", picker=self)
