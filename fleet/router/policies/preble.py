"""Preble's E2 scheduling (V. Srivatsa, Z. He, R. Abhyankar, D. Li, Y. Zhang, "Preble", ICLR 2025, section 3), with its code's defaults.

    exploit, where more of the prompt is cached than is not: of the workers with the longest match, the one with the least load
    explore, elsewhere:                                      the least of load + evicted + prefill

    load    = over the requests that a worker got in the last `window_seconds`: prefill(what it had not) + decode(answer)
    evicted = over the prefixes that have to make room: prefill(their tokens) × the share of all these requests that had them
    prefill = prefill(tokens of this prompt that it has not)

Where exploiting would go to the most loaded worker, and that has more than `imbalance` times the load of the least loaded one, it
goes to that one, which then has the prefix too; not before there have been 50 requests a worker (WukLab/preble,
global_scheduler_with_time.py). The paper fits prefill and decode times offline; here they are a number of seconds a token
each, with `quadratic_seconds` for attention. An answer counts as long as it may become, as in its code; the paper takes the mean of
those that a worker gave lately. The decode worker of a pair is given the prompt's time as well: it is chosen as if it did everything.

Two rules need to hear how requests went, which no policy does: copies of a prefix whose requests wait twice as long as before, and
exploring where decoding prevails. Its tree of prompts is known here by their first blocks: the first prompt of a beginning that a worker
computes is the node that later ones share, and what each of those adds is a leaf of its own.
"""

from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from fleet.clock import SECOND, Nanos
from fleet.ids import WorkerId
from fleet.roles import Phase
from fleet.router.candidates import Asked, Candidates, Chance, Floats
from fleet.router.policies.pickers import lowest
from fleet.router.policies.ports import Policy

BALANCED_AFTER = 50  # requests a worker
MAX_REQUESTS = 100_000  # of the window: beyond, the oldest count no more; about 300 bytes each
MAX_EVICTED = 64  # nodes, in one estimate


class PrebleTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the rule goes by."""

    window_seconds: Annotated[float, Meta(gt=0, le=1e6)] = 180.0
    imbalance: Annotated[float, Meta(ge=1)] = 1.5
    prefill_seconds_per_token: Annotated[float, Meta(ge=0)] = 1e-4
    quadratic_seconds: Annotated[float, Meta(ge=0)] = 1e-9
    decode_seconds_per_token: Annotated[float, Meta(ge=0)] = 0.02


class Given(Struct, frozen=True):
    """One request of the window."""

    at: Nanos
    worker_id: WorkerId
    key: int  # of the prompt's first block
    seconds: float


class Recent:
    """What one worker got in the window, and what of it should be in its cache, the least recently used first."""

    __slots__ = ("held", "nodes", "requests", "seconds")

    def __init__(self) -> None:
        self.requests = 0
        self.seconds = 0.0
        self.nodes: dict[int, float] = {}  # tokens: by key where others may share them, below 0 where nobody does
        self.held = 0.0  # tokens of all nodes

    def shares(self, key: int) -> bool:
        """Whether the beginning of that key is there; then it has been used just now."""
        tokens = self.nodes.pop(key, None)
        if tokens is None:
            return False
        self.nodes[key] = tokens
        return True

    def keep(self, node: int, tokens: float, capacity: float) -> None:
        """Note what is computed now; what there is no room for goes."""
        self.held += tokens - self.nodes.pop(node, 0.0)
        self.nodes[node] = tokens
        while self.held > capacity and len(self.nodes) > 1:
            self.held -= self.nodes.pop(next(iter(self.nodes)))


class ExploitExplore:
    """The rule with its window. A policy of its own, since it changes with every choice."""

    name = "preble"

    def __init__(self, times: PrebleTimes):
        self._times = times
        self._window: deque[Given] = deque()
        self._shared: dict[int, int] = {}  # requests of the window by key
        self._recent: dict[WorkerId, Recent] = {}
        self._given = 0  # since start

    def choose(self, asked: Asked, candidates: Candidates, phase: Phase, chance: Chance, /) -> tuple[int, Policy]:
        self._fade(asked.now)
        matched = _matched(asked, candidates)
        if _exploits(asked, matched):
            place = self._exploited(candidates, matched, chance)
        else:
            parts = self.costs(asked, candidates, phase)
            place = lowest(sum(parts.values(), start=np.zeros(len(candidates))), chance)
        self._note(asked, candidates, place, float(matched[place]), phase)
        return place, self

    def costs(self, asked: Asked, candidates: Candidates, phase: Phase, /) -> Mapping[str, Floats]:  # noqa: ARG002
        """Of exploring; exploiting is a rule by cases, whose terms do not add up to anything."""
        matched = _matched(asked, candidates)
        if _exploits(asked, matched):
            return {}
        missed = asked.prompt_tokens - matched
        capacity = (candidates.kv_blocks * candidates.block_tokens).tolist()
        evicted = [
            self._evicted(worker_id, tokens, room)
            for worker_id, tokens, room in zip(candidates.worker_ids, missed.tolist(), capacity, strict=True)
        ]
        prefill: Floats = self._times.prefill_seconds_per_token * missed + self._times.quadratic_seconds * (
            asked.prompt_tokens**2 - matched**2
        )
        return {"load": self._loads(candidates), "evicted": np.array(evicted), "prefill": prefill}

    def _exploited(self, candidates: Candidates, matched: Floats, chance: Chance) -> int:
        loads = self._loads(candidates)
        longest = (matched == matched.max()).nonzero()[0]
        place = int(longest[lowest(loads[longest], chance)])
        least = float(loads.min())
        if (
            self._given >= BALANCED_AFTER * len(candidates)
            and loads[place] == loads.max()
            and loads[place] > self._times.imbalance * least
        ):
            return lowest(loads, chance)
        return place

    def _loads(self, candidates: Candidates) -> Floats:
        recent = self._recent
        return np.array([recent[name].seconds if name in recent else 0.0 for name in candidates.worker_ids])

    def _evicted(self, worker_id: WorkerId, tokens: float, capacity: float) -> float:
        """Seconds that requests of the window are expected to lose, when so many tokens are added."""
        recent = self._recent.get(worker_id)
        if recent is None:
            return 0.0
        short = recent.held + tokens - capacity
        lost = 0.0
        for node, held in islice(recent.nodes.items(), MAX_EVICTED):
            if short <= 0:
                break
            sharing = self._shared.get(node, 0) if node > 0 else 1
            lost += self._prefill(held, held) * sharing / len(self._window)
            short -= held
        return lost

    def _prefill(self, missed: float, prompt: float) -> float:
        times = self._times
        return times.prefill_seconds_per_token * missed + times.quadratic_seconds * (prompt**2 - (prompt - missed) ** 2)

    def _note(self, asked: Asked, candidates: Candidates, place: int, matched: float, phase: Phase) -> None:
        missed = asked.prompt_tokens - matched
        seconds = self._prefill(missed, asked.prompt_tokens)
        if phase is not Phase.PREFILL:
            seconds += self._times.decode_seconds_per_token * asked.answer_tokens
        worker_id, key = candidates.worker_ids[place], asked.first_key
        recent = self._recent.setdefault(worker_id, Recent())
        self._given += 1
        self._window.append(Given(asked.now, worker_id, key, seconds))
        self._shared[key] = self._shared.get(key, 0) + 1
        recent.requests += 1
        recent.seconds += seconds
        node = key if key and not recent.shares(key) else -self._given
        if missed > 0:
            capacity = float(candidates.kv_blocks[place] * candidates.block_tokens[place])
            recent.keep(node, missed, capacity)

    def _fade(self, now: Nanos) -> None:
        """Forget what is older than the window."""
        window = self._window
        oldest = now - self._times.window_seconds * SECOND
        while window and (window[0].at < oldest or len(window) > MAX_REQUESTS):
            given = window.popleft()
            self._shared[given.key] -= 1
            if not self._shared[given.key]:
                del self._shared[given.key]
            recent = self._recent[given.worker_id]
            recent.requests -= 1
            recent.seconds -= given.seconds
            if not recent.requests:  # nobody shared what it may still have, so nothing is lost with that
                del self._recent[given.worker_id]


def _matched(asked: Asked, candidates: Candidates) -> Floats:
    """Leading tokens of the prompt that each has."""
    matched: Floats = np.minimum(candidates.engine_blocks * candidates.block_tokens, asked.prompt_tokens)
    return matched


def _exploits(asked: Asked, matched: Floats) -> bool:
    return bool(2 * matched.max() > asked.prompt_tokens)


class Preble(PrebleTimes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Preble's E2: where most of the prompt is cached, else the least load, eviction and prefill, in seconds."""

    def policy(self) -> ExploitExplore:
        return ExploitExplore(self)
