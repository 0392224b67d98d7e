"""Baseline policies that know little about the workers. Other policies are compared with them."""

from bisect import bisect_left
from math import ceil, isfinite

import numpy as np
import xxhash
from msgspec import Struct

from fleet.core.roles import Phase
from fleet.router.placement.policies.pipeline import InTurn, Pipeline, TwoChoices
from fleet.router.policy import Candidates, Flags, Floats, PlacementRequest, RandomSource

# Number of points of each worker on the hash ring. With 64 points, a worker's share of the keys differs from the mean share by about
# an eighth.
RING_POINTS = 64


class RequestsScorer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scorer whose cost is the number of requests that are reserved on a worker."""

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Floats:  # noqa: ARG002
        return candidates.requests.copy()


class RoundRobin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy that picks the workers in turn."""

    def policy(self) -> Pipeline:
        return Pipeline("round_robin", picker=InTurn())


class Uniform(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy that picks a random worker; all workers are equally likely."""

    def policy(self) -> Pipeline:
        return Pipeline("random")


class PowerOfTwo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy that draws two workers at random, and takes the one with fewer requests."""

    def policy(self) -> Pipeline:
        return Pipeline("p2c", scorers=[("requests", 1.0, RequestsScorer())], picker=TwoChoices())


class LeastLoaded(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy that picks the worker with the fewest requests."""

    def policy(self) -> Pipeline:
        return Pipeline("least_loaded", scorers=[("requests", 1.0, RequestsScorer())])


class BoundedRing:
    """Picker by consistent hashing with bounded loads (V. Mirrokni, M. Thorup, M. Zadimoghaddam, SODA 2018).

    The picker goes clockwise from the place of the key on the ring, and takes the first worker with fewer than `ceil(load_factor · (requests + 1) /
    workers)` requests. The key is the session; without a session, the prompt's first block; without a full block, a random number. In the
    formula, `requests` is the number of requests on all candidates, and `workers` the number of candidates.
    """

    def __init__(self, load_factor: float):
        self._load_factor = load_factor
        # The workers on the ring: all of the model, candidates or not, so that the ring is built again only when a worker joins or leaves.
        self._members: tuple[str, ...] = ()
        self._points: list[int] = []
        self._owners: list[int] = []  # the worker of each point of the ring, as an index in `_members`

    def pick(self, costs: Floats, request: PlacementRequest, candidates: Candidates, rng: RandomSource, /) -> int:  # noqa: ARG002
        members = tuple(candidates.everybody)
        if members != self._members:
            self._members = members
            points = sorted(
                (xxhash.xxh3_64_intdigest(f"{member}#{point}".encode()), place)
                for place, member in enumerate(members)
                for point in range(RING_POINTS)
            )
            self._points = [point for point, _ in points]
            self._owners = [place for _, place in points]
        bound = ceil(self._load_factor * (float(candidates.requests.sum()) + 1) / len(candidates))
        if request.session:
            key = xxhash.xxh3_64_intdigest(request.session.encode())
        else:
            key = request.first_key or rng.randrange(1 << 64)
        requests = candidates.requests.tolist()
        rows = range(len(requests)) if candidates.rows is None else candidates.rows.tolist()
        places = {row: place for place, row in enumerate(rows) if requests[place] < bound}
        start = bisect_left(self._points, key)
        count = len(self._points)
        for step in range(count):
            if (place := places.get(self._owners[(start + step) % count])) is not None:
                return place
        raise AssertionError("a worker with at most the average load must exist")


class ConsistentHash(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy that sends a session, or prompts with the same first block, to one worker until it has too many requests (`BoundedRing`)."""

    load_factor: float = 1.25

    def __post_init__(self) -> None:
        if not (isfinite(self.load_factor) and self.load_factor >= 1):
            raise ValueError("load_factor: must be 1 or more")

    def policy(self) -> Pipeline:
        return Pipeline("consistent_hash", picker=BoundedRing(self.load_factor))


class SessionFilter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter that keeps only the worker of the session's last request; if there is no such worker, the filter keeps all workers."""

    def keep(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Flags | None:  # noqa: ARG002
        if request.bound is None:
            return None
        return np.array([worker_id == request.bound for worker_id in candidates.worker_ids], dtype=np.bool_)


class Sticky(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy that leaves a session on its worker while this worker has room. Other requests go to the worker with the fewest requests."""

    def policy(self) -> Pipeline:
        return Pipeline("sticky", filters=[SessionFilter()], scorers=[("requests", 1.0, RequestsScorer())])
