"""One engine of the simulation: continuous batching with chunked prefill over a budget of KV blocks.

Rules:

1. A step gives one token to every running sequence, and what is left of `step_tokens` to prompts, oldest first. A prompt may
   take several steps; its last one brings its first token.
2. While no prompt waits to be computed, steps differ only by the length of contexts, and their times lie on a straight line. So
   they are taken together, up to the next end of a sequence: one event, and every token's instant is still exact.
3. Work that comes in the middle of such a stretch ends it with the step that runs.
4. What is admitted when is `fleet.sim.engine.admission`'s. A sequence that needs a block when there is none left pushes out the one
   admitted last, which starts again from its prompt and what it had generated (vLLM's pre-emption by recomputation).
5. Work that is handed off keeps its blocks until they have been fetched (`release`).
6. How far an answer has come is told when it begins another block (and no more often than `REPORT_TOKENS` tokens), which is all that a
   router counts; and with `progress`, whenever somebody wants to know.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.ids import RequestId
from fleet.hardware.power import power_share
from fleet.sim.engine.admission import EngineAdmission
from fleet.sim.engine.attempts import BlockSupply, EngineLimits, Job, SimulatedAttempt, StepProgress, StepTimes
from fleet.sim.engine.batch import VirtualBatch
from fleet.sim.engine.memory import SimulatedKvMemory
from fleet.sim.engine.step_run import PromptChunk, StepRun
from fleet.sim.kernel import Kernel
from fleet.sim.results.outcomes import Quantiles

REPORT_TOKENS = 64  # generated tokens, at least, between two reports of a sequence's progress


_load = lru_cache(1 << 14)(power_share)


class VirtualEngine:
    """Prompts and answers of one worker. Tells `tell` what each step brought, and `cache_changed` what came and went."""

    def __init__(
        self,
        kernel: Kernel,
        times: StepTimes,
        limits: EngineLimits,
        tell: Callable[[list[StepProgress]], None],
        cache_changed: Callable[[list[int], list[int]], None],
        supply: BlockSupply | None = None,
    ):
        self._kernel = kernel
        self._seconds = times.seconds
        self._limits = limits
        self._block_tokens = limits.block_tokens
        self._tell = tell
        self._cache_changed = cache_changed
        self._memory = SimulatedKvMemory(limits.kv_blocks, limits.block_tokens)
        self._cache = self._memory.cache
        self._admission = EngineAdmission(limits, self._memory, supply)
        self._batch = VirtualBatch()
        self._works: dict[RequestId, SimulatedAttempt] = {}
        self._kept: dict[RequestId, SimulatedAttempt] = {}  # until somebody has fetched their blocks
        self._step_run: StepRun | None = None
        self._slowed_by: list[float] = []
        self._slowness = 1.0
        self.busy = Nanos(0)  # so far
        self.weighted_busy = 0.0  # the same, each counted as the share of its power that a GPU drew in it
        self.computed_tokens = 0  # of prompts
        self.generated_tokens = 0
        self.gaps = Quantiles()  # between tokens of a sequence, ms
        self.preempted = 0

    @property
    def held(self) -> int:
        """Pieces of work that have not ended."""
        return len(self._works)

    @property
    def waiting(self) -> int:
        """Of these, what was not admitted yet."""
        return self._admission.waiting

    @property
    def idle(self) -> bool:
        """Whether there is no work, and nobody will fetch anything."""
        return not self._works and not self._kept

    @property
    def kv_blocks_used(self) -> int:
        return self._cache.used

    def leading(self, keys: Sequence[int]) -> int:
        """Blocks of a chain that are in the cache, from its first on."""
        return self._cache.leading(keys)

    def names(self) -> list[int]:
        """Of all blocks in the cache."""
        return self._cache.names()

    # Work.

    def submit(self, job: Job) -> None:
        """Take work; it is admitted as soon as there is room."""
        self._works[job.attempt_id] = work = SimulatedAttempt(job)
        self._admission.wait(work)
        self._interrupt()

    def fetch(self, job: Job) -> int | None:
        """Take work whose prompt comes from elsewhere, and make room for it.

        Returns:
            Blocks that have to come (`fetched` says when they did); None when there is no room now: the work then waits as any other,
            and what it needs is asked for again.
        """
        work = SimulatedAttempt(job, job.fetched_tokens, asked=True)
        if not self._memory.hold(work, self._cache.leading(job.keys)):
            self.submit(job)
            return None
        self._works[job.attempt_id] = work
        self._admission.fetch(work)
        return self._memory.missing(work)

    def fetched(self, attempt_id: RequestId) -> None:
        """All blocks have come."""
        if (work := self._admission.fetched(attempt_id)) is None:
            return  # cancelled
        work.computed = max(work.computed, work.coming)
        self._memory.name_computed(work)
        self._interrupt()

    def not_fetched(self, attempt_id: RequestId) -> None:
        """They will not come: the prompt is computed from where the cache ends."""
        if self._admission.fetched(attempt_id) is not None:
            self._interrupt()

    def cancel(self, attempt_id: RequestId) -> None:
        """Forget a piece of work, if it is known."""
        if (work := self._works.pop(attempt_id, None)) is None:
            return
        self._stop(work)
        self._admission.leave(work)
        self._interrupt()

    def progress(self) -> list[StepProgress]:
        """What running work has generated by now, and was not told; from here on it counts as told."""
        done = 0 if self._step_run is None else self._step_run.done(self._kernel.instant)
        told = []
        for work in self._works.values():
            if work.running and (tokens := self._batch.generated(work) + done - work.told):
                work.told += tokens
                told.append(StepProgress(work.job.attempt_id, tokens, ended=False))
        return told

    def keeps(self, attempt_id: RequestId) -> bool:
        """Whether the blocks of work that was handed off are still here."""
        return attempt_id in self._kept

    def release(self, attempt_id: RequestId) -> None:
        """The blocks of work that was handed off are needed no longer."""
        if (work := self._kept.pop(attempt_id, None)) is not None:
            self._stop(work)
            if self._admission.wanted:
                self._interrupt()

    def slow(self, factor: float) -> None:
        """Take so many times as long for each step, from the next one on; once more than already, if something else lasts."""
        assert factor > 0, factor
        self._slowed_by.append(factor)
        self._slowness = prod(self._slowed_by)
        self._interrupt()

    def recover(self, factor: float) -> None:
        """What slowed it so much is over."""
        self._slowed_by.remove(factor)
        self._slowness = prod(self._slowed_by, start=1.0)
        self._interrupt()

    def forget_all(self) -> list[RequestId]:
        """Cancel all work; the cache stays, and what is kept for others. Returns what work there was."""
        works = list(self._works)
        for attempt_id in works:
            self.cancel(attempt_id)
        return works

    def stop(self) -> None:
        """Die, with all that is here; nothing is told any more."""
        if self._step_run is not None:
            self._step_run.forget()
        self._works.clear()
        self._kept.clear()
        self._admission.clear()

    # Steps.

    def _interrupt(self) -> None:
        """End a stretch with the step that runs, or begin one."""
        if (stretch := self._step_run) is None:
            self._begin()
        elif stretch.steps > 1:
            stretch.cut(self._kernel, self._end)

    def _begin(self) -> None:
        admission, batch, seconds, slowness = self._admission, self._batch, self._seconds, self._slowness
        admission.admit(batch.running)
        running, context = batch.running, batch.context
        steps, slope, tokens = 1, 0.0, 0
        chunks: Sequence[PromptChunk] = ()
        if admission.computing and (chunks := admission.chunks(running)):
            pairs = 0.0
            for work, count in chunks:
                tokens += count
                pairs += count * (work.computed + 0.5 * count)
            first = slowness * seconds(tokens, pairs, running, context)
        elif running:
            first = slowness * seconds(0, 0, running, context)
            if (steps := self._steps_together()) > 1:
                last = slowness * seconds(0, 0.0, running, context + running * (steps - 1))
                slope = (last - first) / (steps - 1)
        else:
            return
        self._step_run = stretch = StepRun(self._kernel.instant, first, slope, steps, chunks, tokens)
        stretch.end = self._kernel.at(stretch.until(steps), self._end)

    def _steps_together(self) -> int:
        """Steps up to the next end of a sequence, or to where blocks may run out."""
        batch = self._batch
        steps = batch.to_end()
        worst = batch.running * (1 + steps // self._block_tokens)
        if worst > self._cache.available and (growth := batch.to_growth()) is not None:
            steps = min(steps, max(1, growth))
        return steps

    def _end(self) -> None:
        stretch, batch = self._step_run, self._batch
        assert stretch is not None
        self._step_run = None
        lasted = self._kernel.instant - stretch.began
        running = batch.running
        self.busy = Nanos(self.busy + lasted)
        self.weighted_busy += lasted * _load(running + stretch.prompt_tokens)
        told: list[StepProgress] = []
        if running:
            steps = stretch.steps
            self.gaps.add(lasted / steps / MILLISECOND, running * steps)
            if steps > 1:
                self.generated_tokens += batch.advance(steps - 1)
            if batch.grows and batch.grows[0][0] <= batch.steps:
                self._grow()  # before the last step: what ends with it had its blocks until then
            self.generated_tokens += batch.advance(1)
            now = batch.steps
            if batch.ends and batch.ends[0][0] <= now:
                self._end_due(told)
            if batch.tells and batch.tells[0][0] <= now:
                self._tell_due(told)
            if batch.grows and batch.grows[0][0] <= now:
                self._grow()
        for work, tokens in stretch.chunks:
            self._computed(work, tokens, told)
        self._begin()
        if self._cache.changed:
            stored, removed = self._cache.changes()
            if stored or removed:
                self._cache_changed(stored, removed)
        if told:
            self._tell(told)

    def _computed(self, work: SimulatedAttempt, tokens: int, told: list[StepProgress]) -> None:
        if work.job.attempt_id not in self._works:
            return  # cancelled meanwhile
        work.computed += tokens
        self.computed_tokens += tokens
        self._memory.name_computed(work)
        if work.computed < work.prompt_tokens:
            return
        self._admission.computing.remove(work)
        work.generated += 1
        self.generated_tokens += 1
        ended = work.generated == work.answer_tokens
        if ended or work.generated == 1:
            told.append(self._told(work, ended=ended))
        if ended:
            self._over(work)
        else:
            self._batch.join(work)
            self._tell_later(work)
            self._grow_later(work)

    def _end_due(self, told: list[StepProgress]) -> None:
        for work in self._batch.due(self._batch.ends):
            assert self._batch.generated(work) == work.answer_tokens, work.job
            told.append(self._told(work, ended=True))
            self._over(work)

    def _tell_due(self, told: list[StepProgress]) -> None:
        for work in self._batch.due(self._batch.tells):
            told.append(self._told(work, ended=False))
            self._tell_later(work)

    def _tell_later(self, work: SimulatedAttempt) -> None:
        """When its next block begins."""
        prompt, size = work.job.prompt_tokens, self._block_tokens
        tokens = prompt + self._batch.generated(work) + max(0, REPORT_TOKENS - size)
        self._batch.tell_at(work, -(-tokens // size) * size + 1 - prompt)

    def _grow(self) -> None:
        """Blocks for what has been generated."""
        for work in self._batch.due(self._batch.grows):
            while not self._cache.available:
                if self._preempt() is work:
                    break
            else:
                self._memory.grow(work)
                self._grow_later(work)

    def _grow_later(self, work: SimulatedAttempt) -> None:
        """When the next token has no room in the blocks that it has."""
        self._batch.grow_at(work, self._memory.room(work) - work.job.prompt_tokens)

    def _preempt(self) -> SimulatedAttempt:
        """Push out what was admitted last; returns it."""
        running = (work for work in self._works.values() if work.running)
        work = max(running, key=lambda each: each.admitted)
        self._stop(work)
        work.prompt_tokens = work.job.prompt_tokens + work.generated
        self._admission.wait_again(work)
        self.preempted += 1
        return work

    # Ends.

    def _told(self, work: SimulatedAttempt, *, ended: bool) -> StepProgress:
        generated = self._batch.generated(work)
        tokens, work.told = generated - work.told, generated
        return StepProgress(work.job.attempt_id, tokens, ended, work.cached if tokens == generated else None)

    def _over(self, work: SimulatedAttempt) -> None:
        """All its tokens have come."""
        job = work.job
        self._memory.name_answer(work)
        del self._works[job.attempt_id]
        if job.handed_off:
            self._kept[job.attempt_id] = work
            self._batch.leave(work)
        else:
            self._stop(work)

    def _stop(self, work: SimulatedAttempt) -> None:
        """Out of the batch, and its blocks with it."""
        self._batch.leave(work)
        self._memory.free(work)

    def check(self) -> None:
        """Assert that sums are those of the work, and that all tokens have room."""
        self._cache.check()
        works = list(self._works.values())
        self._batch.check(works)
        assert self.waiting + len(self._admission.computing) + self._batch.running == len(works)
        assert not self._kept.keys() & self._works.keys()
        for work in works:
            if work.running:
                tokens = work.job.prompt_tokens + self._batch.generated(work)
                assert self._memory.room(work) >= tokens, work.job
