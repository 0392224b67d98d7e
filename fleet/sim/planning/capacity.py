"""Replica capacity: computes the rates and batch sizes that one replica of a simulated pool reaches, as a profiling run would measure them.

Most scaling rules need a profile: throughput per replica, tokens per second within a goal, or KV tokens. Fleet's own rule computes its
numbers in `fleet.planner.sizing.capacity`, and all other rules take them from this module. Both use the same step times, so all rules know
the hardware equally well.
"""

from functools import cached_property

from msgspec import Struct

from fleet.batching.attempts import EngineLimits, StepTimes
from fleet.core.roles import Role
from fleet.sim.cluster.pools import PoolProfile

HALVINGS = 24


class TrafficShape(Struct, frozen=True, kw_only=True):
    """Mean lengths of prompts and answers in tokens, and the share of prompt tokens that are found in caches."""

    prompt_tokens: float
    answer_tokens: float
    cached_share: float = 0.0
    """Share of prompt tokens that need not be computed, because a cache has them."""

    @property
    def new_tokens(self) -> float:
        return max(1.0, self.prompt_tokens * (1.0 - self.cached_share))

    @property
    def context(self) -> float:
        """Mean context length of a running sequence in tokens: the prompt and half the answer."""
        return self.prompt_tokens + 0.5 * self.answer_tokens


class ReplicaCapacity(Struct, frozen=True, kw_only=True, dict=True):
    """Computes what one replica can serve, from its step times and limits."""

    role: Role
    times: StepTimes
    limits: EngineLimits

    @cached_property
    def kv_tokens(self) -> int:
        return self.limits.kv_blocks * self.limits.block_tokens

    def prefill_seconds(self, shape: TrafficShape) -> float:
        """Return the seconds of engine steps that one prompt takes.

        If the prompt, or its last chunk, fills only a part of a step, only this part of the step's time counts.
        """
        tokens, step = shape.new_tokens, self.limits.step_tokens
        cached = shape.prompt_tokens - tokens
        seconds = 0.0
        done = 0.0
        while done < tokens:
            chunk = min(float(step), tokens - done)
            pairs = chunk * (cached + done + 0.5 * chunk)
            filled = chunk / step  # share of a full step that this chunk uses
            seconds += filled * self.times.seconds(step, pairs / filled, 0, 0)
            done += chunk
        return seconds

    def most_running(self, shape: TrafficShape) -> int:
        """Return the maximum number of sequences for which one replica has batch places and KV blocks; at least 1."""
        return max(1, min(self.limits.max_running, int(self.kv_tokens / (shape.prompt_tokens + shape.answer_tokens))))

    def running_within(self, shape: TrafficShape, tpot_seconds: float) -> int:
        """Return the maximum number of sequences with which a decode step takes at most `tpot_seconds`: from 1 to `most_running`."""
        low, high = 1, self.most_running(shape)
        while low < high:
            middle = (low + high + 1) // 2
            if self.step_seconds(shape, middle) <= tpot_seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def step_seconds(self, shape: TrafficShape, running: float) -> float:
        """Return the duration of a decode step with this number of running sequences, in seconds."""
        return self.times.seconds(0, 0, running, running * shape.context)

    def decode_tokens(self, shape: TrafficShape, tpot_seconds: float) -> float:
        """Return the tokens per second that one replica generates while each token takes at most `tpot_seconds`."""
        running = self.running_within(shape, tpot_seconds)
        return running / self.step_seconds(shape, running)

    def rate(self, shape: TrafficShape, tpot_seconds: float) -> float:
        """Return the requests per second that one replica can serve while the time per token is at most `tpot_seconds`.

        For a replica that only prefills, the result does not depend on `tpot_seconds`.
        """
        prefill = 0.0 if self.role is Role.DECODE else self.prefill_seconds(shape)
        if self.role is Role.PREFILL:
            return 1.0 / prefill
        if self.role is Role.DECODE:
            return self.decode_tokens(shape, tpot_seconds) / max(1.0, shape.answer_tokens)
        return self._mixed_rate(shape, tpot_seconds, prefill)

    def _mixed_rate(self, shape: TrafficShape, tpot_seconds: float, prefill: float) -> float:
        """Return the result of `rate` for a replica that prefills and decodes.

        `prefill` is the seconds to compute one prompt. In this time, no running sequence gets a token, so prefills
        increase the time per token.
        """

        def tpot(running: float) -> float:
            step = self.step_seconds(shape, running)
            return step + running * prefill / max(1.0, shape.answer_tokens)

        low, high = 1.0, float(self.most_running(shape))
        if tpot(high) > tpot_seconds:
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if tpot(middle) <= tpot_seconds else (low, middle)
        else:
            low = high
        return low / (max(1.0, shape.answer_tokens) * tpot(low))


def capacity_of(profile: PoolProfile) -> ReplicaCapacity:
    """Return the object that computes what one replica of a pool can serve."""
    return ReplicaCapacity(role=profile.role, times=profile.times, limits=profile.limits)
