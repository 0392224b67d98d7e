"""KV memory of a simulated engine, as its attempts use it.

Rules:

1. A prompt is admitted with blocks for all its tokens and one more. Blocks that are in the cache are held, the others are taken.
2. Blocks get their names when they are computed, so that other prompts find them. An answer's full blocks get theirs when the
   answer ends, as far as their names are known.
"""

from collections.abc import Sequence

from fleet.sim.engine.attempts import SimulatedAttempt
from fleet.sim.engine.kv_budget import KvBudget
from kvstore.block import blocks_for


class SimulatedKvMemory:
    """The blocks that attempts hold in one engine."""

    __slots__ = ("_block_tokens", "cache")

    def __init__(self, blocks: int, block_tokens: int):
        self.cache = KvBudget(blocks)
        self._block_tokens = block_tokens

    def admit(self, attempt: SimulatedAttempt) -> bool:
        """Take the blocks of a prompt; return False if there are not enough."""
        most = (attempt.prompt_tokens - 1) // self._block_tokens  # one token has to be computed for its logits
        return self.hold(attempt, min(self.cache.leading(attempt.job.keys), most))

    def hold(self, attempt: SimulatedAttempt, here: int) -> bool:
        """Take the blocks of a prompt whose first `here` blocks are in the cache; return False if there are not enough."""
        keys, cache = attempt.job.keys, self.cache
        wanted = attempt.prompt_tokens // self._block_tokens + 1 - here
        if wanted > cache.available - (cache.idle_among(keys[:here]) if here else 0):
            return False
        attempt.held = list(keys[:here])
        cache.hold(attempt.held)
        cache.take(wanted)
        attempt.own = wanted
        attempt.computed = here * self._block_tokens
        return True

    def room(self, attempt: SimulatedAttempt) -> int:
        """Return the tokens of prompt and answer that the attempt's blocks can hold."""
        return (len(attempt.held) + attempt.own) * self._block_tokens

    def grow(self, attempt: SimulatedAttempt) -> None:
        """Take one more block, which must be available."""
        self.cache.take(1)
        attempt.own += 1

    def name_computed(self, attempt: SimulatedAttempt) -> None:
        """Name the prompt blocks that are full now."""
        self._name(attempt, attempt.job.keys, attempt.computed)

    def name_answer(self, attempt: SimulatedAttempt) -> None:
        """Name the blocks of a complete answer."""
        job = attempt.job
        if job.answer_keys:
            computed = job.prompt_tokens + job.answer_tokens - 1  # the last token has no KV
            self._name(attempt, [*job.keys, *job.answer_keys], computed)

    def _name(self, attempt: SimulatedAttempt, keys: Sequence[int], computed: int) -> None:
        """Name the blocks that `computed` tokens fill, beyond those that have names."""
        full, known = min(computed // self._block_tokens, len(keys)), len(attempt.held)
        if full <= known:
            return
        if not known or keys[known - 1] == attempt.held[-1]:  # no other attempt named one of these blocks first
            named = self.cache.name(keys[known:full])
        else:
            held = set(attempt.held)
            named = self.cache.name([key for key in keys[:full] if key not in held])
        attempt.held += named
        attempt.own -= len(named)

    def free(self, attempt: SimulatedAttempt) -> None:
        """Release all blocks of an attempt that has ended or was preempted."""
        self.cache.release(attempt.held)
        self.cache.give(attempt.own)
        attempt.held, attempt.own, attempt.computed = [], 0, 0

    def missing(self, attempt: SimulatedAttempt) -> int:
        """Return the blocks that have to be fetched, beyond those that the attempt holds."""
        return max(0, blocks_for(attempt.coming, self._block_tokens) - len(attempt.held))
