"""Preble's E2 scheduling (V. Srivatsa, Z. He, R. Abhyankar, D. Li, Y. Zhang, "Preble", ICLR 2025, section 3.2, algorithms 1 and 2).

    exploit, if more than half of the prompt is cached:  the cheapest of the workers with the longest match
    explore, otherwise:                                  the cheapest of all workers

    cost    = load + evicted + prefill, for each worker and in seconds on it
    load    = sum over the worker's requests of the last `window_seconds`: prefill(uncached part) + decode(answer)
    evicted = sum over the prefixes that would be evicted: prefill(their tokens) × share of the worker's requests that have this prefix
    prefill = prefill(uncached tokens of this prompt)

If a request exploits, the paper then adjusts the choice by two rules, in this order:

1. Rebalancing. While the most loaded worker has more than `imbalance` times the load of the least loaded worker, requests that would
   exploit the most loaded worker go to the least loaded one. That worker computes the prefix and holds it from then on. This rule applies
   once there were 50 requests for each worker, on average.
2. Copies. Otherwise, if the queue of a prefix at its worker has doubled (its mean over the later half of the window is twice the mean over
   the earlier half), the least loaded worker without the prefix gets a copy: the request that is being placed computes the prefix there.
   From then on, requests with that prefix go to the cheapest worker that holds it, even if another worker has a longer match. This ends
   when the copy has had no request for a window.

The paper has a third rule, which is checked before exploring. If decoding is more than `decode_share` of a worker's load, the worker has
capacity for prefill, and the request goes to it. The paper gives neither a formula for this share nor a bound, and its code has no such
rule. So by default the rule never applies here.

The code (WukLab/preble, global_scheduler_with_time.py) gives the window, `imbalance`, the 50 requests and the halves of the window.

The interface of policies lacks some of the rule's inputs. They are replaced as follows:

- Queueing times: the code measures the queueing times of requests, but a policy gets no information about a request after its placement. So
  the prompt tokens that are reserved on the worker and not computed yet are counted instead, together with those of the request, at the
  time of placement. Prefill times are proportional to tokens, so the number of tokens doubles when the queueing time doubles.
- Lengths of answers: the paper takes the mean length of a worker's answers. Here each answer counts as if it had its maximum length.
  Preble's code also assumes this until it has measured answers.
- The tree of prompts: a policy knows only the key of the first block, and how many leading blocks each worker holds. So the worker "with the longest node"
  is the one with the longest match, and a subtree is all prompts with one first block, split between its copies request by request.
- Times: the paper fits them offline. Here they are seconds for each token, and `quadratic_seconds` for attention.
- Pairs: the cost of the decode worker also contains the prompt's time, because this worker is chosen as if it also computed the prompt.

The order of requests inside a worker (section 3.3) is outside a router's control.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from fleet.core.roles import Phase
from fleet.router.placement.policies.pipeline import lowest
from fleet.router.placement.policies.published.preble_window import RequestWindow
from fleet.router.policy import Candidates, Floats, PlacementPolicy, PlacementRequest, RandomSource, Rows

BALANCED_AFTER = 50  # average number of requests for each worker from which on rule 1 applies


class PrebleTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of Preble's rule: seconds for tokens, and the bounds."""

    window_seconds: Annotated[float, Meta(gt=0, le=1e6)] = 180.0
    imbalance: Annotated[float, Meta(ge=1)] = 1.5
    decode_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    prefill_seconds_per_token: Annotated[float, Meta(ge=0)] = 1e-4
    quadratic_seconds: Annotated[float, Meta(ge=0)] = 1e-9
    decode_seconds_per_token: Annotated[float, Meta(ge=0)] = 0.02


class ExploitExplore:
    """Policy that follows Preble's rule on its window of requests. It is no scorer, because it has to remember each choice."""

    name = "preble"

    def __init__(self, times: PrebleTimes):
        self._times = times
        self.window = RequestWindow(times.window_seconds)

    def choose(
        self, request: PlacementRequest, candidates: Candidates, phase: Phase, rng: RandomSource, /
    ) -> tuple[int, PlacementPolicy]:
        self.window.fade(request.now)
        matched = _matched(request, candidates)
        if _exploits(request, matched):
            place = self._exploited(request, candidates, matched, rng)
        elif (decoding := self._decoding(candidates)) is not None:
            place = decoding
        else:
            place = lowest(self._cost(request, candidates, matched, range(len(candidates))), rng)
        self._note(request, candidates, place, float(matched[place]), phase)
        return place, self

    def costs(self, request: PlacementRequest, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:  # noqa: ARG002
        """Return the terms of the cost, in seconds, if the request explores.

        The result is empty if another rule chooses the worker, because then the sum of the terms does not decide.
        """
        matched = _matched(request, candidates)
        if _exploits(request, matched) or self._decoding(candidates) is not None:
            return {}
        return self._parts(request, candidates, matched, range(len(candidates)))

    def _exploited(self, request: PlacementRequest, candidates: Candidates, matched: Floats, rng: RandomSource) -> int:
        key, names = request.first_key, candidates.worker_ids
        owners = self._owners(key, candidates, matched)
        place = int(owners[lowest(self._cost(request, candidates, matched, owners.tolist()), rng)])
        loads = self._loads(candidates)
        if self._unbalanced(loads, place):
            return lowest(loads, rng)
        prefix = self.window.prefix(names[place], key)
        others = np.setdiff1d(np.arange(len(names)), owners)
        if prefix is None or not prefix.tokens.doubled() or not len(others):
            return place
        copy = int(others[lowest(loads[others], rng)])
        self.window.note_copy(key, names[place], names[copy])
        return copy

    def _owners(self, key: int, candidates: Candidates, matched: Floats) -> Rows:
        """Return the positions of the workers with the longest match, and those of the workers that hold a copy by rule 2."""
        owning = matched == matched.max()
        for place, worker_id in enumerate(candidates.worker_ids):
            prefix = self.window.prefix(worker_id, key)
            if prefix is not None and prefix.is_copy:
                owning[place] = True
        owners: Rows = owning.nonzero()[0]
        return owners

    def _unbalanced(self, loads: Floats, place: int) -> bool:
        """Return whether this worker is the most loaded one, and its load is too high by rule 1."""
        return bool(
            self.window.given >= BALANCED_AFTER * len(loads)
            and loads[place] == loads.max()
            and loads[place] > self._times.imbalance * loads.min()
        )

    def _decoding(self, candidates: Candidates) -> int | None:
        """Return the position of the worker with the largest share of decoding in its load; None if no share is above the bound."""
        if self._times.decode_share >= 1:
            return None
        recent = [self.window.recent.get(worker_id) for worker_id in candidates.worker_ids]
        shares = [each.decode / each.seconds if each is not None and each.seconds > 0 else 0.0 for each in recent]
        most = max(shares)
        return shares.index(most) if most > self._times.decode_share else None

    def _cost(
        self, request: PlacementRequest, candidates: Candidates, matched: Floats, places: Sequence[int]
    ) -> Floats:
        parts = self._parts(request, candidates, matched, places)
        return sum(parts.values(), start=np.zeros(len(places)))

    def _parts(
        self, request: PlacementRequest, candidates: Candidates, matched: Floats, places: Sequence[int]
    ) -> Mapping[str, Floats]:
        """Return the terms of algorithm 2 (load, evicted, prefill) for some of the candidates, in seconds."""
        names = candidates.worker_ids
        matched = matched[places]
        missed = request.prompt_tokens - matched
        capacity = (candidates.kv_blocks * candidates.block_tokens)[places]
        evicted = [
            sum(self._prefill(held, held) * share for held, share in self.window.evicted(names[place], tokens, room))
            for place, tokens, room in zip(places, missed.tolist(), capacity.tolist(), strict=True)
        ]
        prefill: Floats = self._times.prefill_seconds_per_token * missed + self._times.quadratic_seconds * (
            request.prompt_tokens**2 - matched**2
        )
        return {"load": self._loads(candidates)[places], "evicted": np.array(evicted, dtype=float), "prefill": prefill}

    def _loads(self, candidates: Candidates) -> Floats:
        recent = self.window.recent
        return np.array([recent[name].seconds if name in recent else 0.0 for name in candidates.worker_ids])

    def _prefill(self, missed: float, prompt: float) -> float:
        times = self._times
        return times.prefill_seconds_per_token * missed + times.quadratic_seconds * (prompt**2 - (prompt - missed) ** 2)

    def _note(
        self, request: PlacementRequest, candidates: Candidates, place: int, matched: float, phase: Phase
    ) -> None:
        missed = request.prompt_tokens - matched
        decoding = phase is not Phase.PREFILL
        self.window.note(
            request.now,
            candidates.worker_ids[place],
            request.first_key,
            missed=missed,
            ahead=float(candidates.backlog_tokens[place]),
            prefill=self._prefill(missed, request.prompt_tokens),
            decode=self._times.decode_seconds_per_token * request.answer_tokens if decoding else 0.0,
            capacity=float(candidates.kv_blocks[place] * candidates.block_tokens[place]),
        )


def _matched(request: PlacementRequest, candidates: Candidates) -> Floats:
    """Return how many leading tokens of the prompt each worker holds."""
    matched: Floats = np.minimum(candidates.engine_blocks * candidates.block_tokens, request.prompt_tokens)
    return matched


def _exploits(request: PlacementRequest, matched: Floats) -> bool:
    return bool(2 * matched.max() > request.prompt_tokens)


class Preble(PrebleTimes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Preble's policy (E2): the worker that holds most of the prompt, or else the worker with the lowest sum of load, evicted and prefill."""

    def policy(self) -> ExploitExplore:
        return ExploitExplore(self)
