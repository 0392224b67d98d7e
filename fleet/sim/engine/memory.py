"""The KV memory of one simulated engine, as its work takes it.

Rules:

1. A prompt is admitted into blocks for all of it and one token more: those that are in the cache are held, the others taken.
2. Blocks that are computed get their names, so that others find them; the blocks of an answer do when it ends, as far as they
   are whole and their names are known.
"""

from collections.abc import Sequence

from fleet.sim.engine.attempts import SimulatedAttempt
from fleet.sim.engine.kv_budget import KvBudget
from kvstore.block import blocks_for


class SimulatedKvMemory:
    """What work holds of one engine's blocks."""

    __slots__ = ("_block_tokens", "cache")

    def __init__(self, blocks: int, block_tokens: int):
        self.cache = KvBudget(blocks)
        self._block_tokens = block_tokens

    def admit(self, work: SimulatedAttempt) -> bool:
        """Take blocks for a prompt, if there are enough."""
        most = (work.prompt_tokens - 1) // self._block_tokens  # one token has to be computed for its logits
        return self.hold(work, min(self.cache.leading(work.job.keys), most))

    def hold(self, work: SimulatedAttempt, here: int) -> bool:
        """Take blocks for a prompt of which so many are here, if there are enough."""
        keys, cache = work.job.keys, self.cache
        wanted = work.prompt_tokens // self._block_tokens + 1 - here
        if wanted > cache.available - (cache.idle_among(keys[:here]) if here else 0):
            return False
        work.held = list(keys[:here])
        cache.hold(work.held)
        cache.take(wanted)
        work.own = wanted
        work.computed = here * self._block_tokens
        return True

    def room(self, work: SimulatedAttempt) -> int:
        """Tokens, of prompt and answer, that the blocks of a piece of work hold."""
        return (len(work.held) + work.own) * self._block_tokens

    def grow(self, work: SimulatedAttempt) -> None:
        """One block more, of which there must be one."""
        self.cache.take(1)
        work.own += 1

    def name_computed(self, work: SimulatedAttempt) -> None:
        """Blocks of a prompt that are whole now can be found by others."""
        keys = work.job.keys
        whole = min(work.computed // self._block_tokens, len(keys))
        if whole > len(work.held):
            self._name(work, keys, whole)

    def name_answer(self, work: SimulatedAttempt) -> None:
        """All tokens of an answer have come."""
        job = work.job
        if not job.answer_keys:
            return
        keys = [*job.keys, *job.answer_keys]
        computed = job.prompt_tokens + job.answer_tokens - 1  # the last token's KV is not there
        whole = min(computed // self._block_tokens, len(keys))
        if whole > len(work.held):
            self._name(work, keys, whole)

    def _name(self, work: SimulatedAttempt, keys: Sequence[int], whole: int) -> None:
        """Names for the first blocks of a piece of work, more than it holds."""
        known = len(work.held)
        if not known or keys[known - 1] == work.held[-1]:  # nobody else had a name first
            named = self.cache.name(keys[known:whole])
        else:
            held = set(work.held)
            named = self.cache.name([key for key in keys[:whole] if key not in held])
        work.held += named
        work.own -= len(named)

    def free(self, work: SimulatedAttempt) -> None:
        """It needs nothing any more, or has to begin again."""
        self.cache.release(work.held)
        self.cache.give(work.own)
        work.held, work.own, work.computed = [], 0, 0

    def missing(self, work: SimulatedAttempt) -> int:
        """Blocks that have to come for what is fetched, when it holds those that are here."""
        return max(0, blocks_for(work.coming, self._block_tokens) - len(work.held))
