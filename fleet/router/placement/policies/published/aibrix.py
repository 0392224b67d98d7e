"""AIBrix's prefix-cache rule (vllm-project/aibrix v0.7), with the defaults of its code.

    if most requests - least > imbalance:  the worker with the fewest requests
    else: by match, then by requests, the first that has no more than mean + deviations × standard deviation of them

If no worker is below that bound, the worker with the fewest requests is taken. AIBrix's documentation says 16 requests and 2
deviations.
"""

from msgspec import Struct

from fleet.router.placement.policies.pipeline import Pipeline, lowest
from fleet.router.policy import Candidates, Floats, PlacementRequest, RandomSource


class PrefixMatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule above as a picker: costs of scorers are ignored."""

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
    """AIBrix's prefix-cache rule: the longest match among workers that have not many more requests than the others."""

    def policy(self) -> Pipeline:
        return Pipeline("aibrix", picker=self)
