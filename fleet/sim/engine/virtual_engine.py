"""Virtual engine: continuous batching with chunked prefill over a budget of KV blocks, in virtual time.

Rules:

1. A step gives one token to each running sequence, and the rest of `step_tokens` to prompts, oldest first. A prompt may take
   several steps; its last step brings its first token.
2. While no prompt is being computed, steps differ only by the length of their contexts. Such steps are simulated as one step
   run, up to the next end of a sequence; the instant of every token is still exact.
3. An attempt that arrives during a step run ends the run with the step that is under way.
4. `fleet.sim.engine.admission` decides what is admitted. If a sequence needs a block and none is left, the attempt that was
   admitted last is preempted. It starts again from its prompt and the tokens that it has generated (vLLM's recomputation).
5. An attempt that is handed off keeps its blocks until they have been fetched (`release`).
6. Progress is reported when an answer begins a new block, and at most every `REPORT_TOKENS` tokens: routers count blocks.
   `progress` reports the rest at any time.
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
from fleet.sim.results.quantiles import Quantiles

REPORT_TOKENS = 64  # generated tokens, at least, between two progress reports of an attempt


_power_share = lru_cache(1 << 14)(power_share)


class VirtualEngine:
    """Engine of one worker. It calls `report` with the progress of each step, and `cache_changed` with stored and removed blocks."""

    def __init__(
        self,
        kernel: Kernel,
        times: StepTimes,
        limits: EngineLimits,
        report: Callable[[list[StepProgress]], None],
        cache_changed: Callable[[list[int], list[int]], None],
        supply: BlockSupply | None = None,
    ):
        self._kernel = kernel
        self._seconds = times.seconds
        self._limits = limits
        self._block_tokens = limits.block_tokens
        self._report = report
        self._cache_changed = cache_changed
        self._memory = SimulatedKvMemory(limits.kv_blocks, limits.block_tokens)
        self._cache = self._memory.cache
        self._admission = EngineAdmission(limits, self._memory, supply)
        self._batch = VirtualBatch()
        self._attempts: dict[RequestId, SimulatedAttempt] = {}
        self._kept: dict[RequestId, SimulatedAttempt] = {}  # ended prefills whose blocks are not fetched yet
        self._step_run: StepRun | None = None
        self._slowed_by: list[float] = []
        self._slowness = 1.0
        self.busy = Nanos(0)
        self.weighted_busy = 0.0  # busy time, weighted by the share of its power range that a GPU drew
        self.computed_tokens = 0  # prompt tokens
        self.generated_tokens = 0
        self.gaps = Quantiles()  # ms between two tokens of a sequence
        self.preempted = 0

    @property
    def held(self) -> int:
        """Attempts that have not ended."""
        return len(self._attempts)

    @property
    def waiting(self) -> int:
        """Attempts among `held` that are not admitted yet."""
        return self._admission.waiting

    @property
    def idle(self) -> bool:
        """True if there is no attempt, and no block that a decode worker will fetch."""
        return not self._attempts and not self._kept

    @property
    def kv_blocks_used(self) -> int:
        return self._cache.used

    def leading(self, keys: Sequence[int]) -> int:
        """Return the number of leading blocks of a chain that are in the cache."""
        return self._cache.leading(keys)

    def names(self) -> list[int]:
        """Return the names of all blocks in the cache."""
        return self._cache.names()

    # Attempts.

    def submit(self, job: Job) -> None:
        """Queue an attempt; it is admitted as soon as there is room."""
        self._attempts[job.attempt_id] = attempt = SimulatedAttempt(job)
        self._admission.wait(attempt)
        self._interrupt()

    def fetch(self, job: Job) -> int | None:
        """Take an attempt whose prompt blocks come from a prefill worker, and make room for them.

        Returns:
            The number of blocks to fetch; `fetched` or `not_fetched` has to follow. None if there is no room now: the attempt is then
            queued, and asks the block supply when it is admitted.
        """
        attempt = SimulatedAttempt(job, job.fetched_tokens, asked=True)
        if not self._memory.hold(attempt, self._cache.leading(job.keys)):
            self.submit(job)
            return None
        self._attempts[job.attempt_id] = attempt
        self._admission.fetch(attempt)
        return self._memory.missing(attempt)

    def fetched(self, attempt_id: RequestId) -> None:
        """Note that all blocks of a fetch have come."""
        if (attempt := self._admission.fetched(attempt_id)) is None:
            return  # cancelled
        attempt.computed = max(attempt.computed, attempt.coming)
        self._memory.name_computed(attempt)
        self._interrupt()

    def not_fetched(self, attempt_id: RequestId) -> None:
        """Note that a fetch has failed; the prompt is computed from where the cache ends."""
        if self._admission.fetched(attempt_id) is not None:
            self._interrupt()

    def cancel(self, attempt_id: RequestId) -> None:
        """Forget an attempt, if it is known."""
        if (attempt := self._attempts.pop(attempt_id, None)) is None:
            return
        self._stop(attempt)
        self._admission.leave(attempt)
        self._interrupt()

    def progress(self) -> list[StepProgress]:
        """Return, once, the generated tokens that were not reported yet."""
        done = 0 if self._step_run is None else self._step_run.done(self._kernel.instant)
        reports = []
        for attempt in self._attempts.values():
            if attempt.running and (tokens := self._batch.generated(attempt) + done - attempt.reported):
                attempt.reported += tokens
                reports.append(StepProgress(attempt.job.attempt_id, tokens, ended=False))
        return reports

    def keeps(self, attempt_id: RequestId) -> bool:
        """Return whether the blocks of a handed-off attempt are still here."""
        return attempt_id in self._kept

    def release(self, attempt_id: RequestId) -> None:
        """Free the blocks of a handed-off attempt."""
        if (attempt := self._kept.pop(attempt_id, None)) is not None:
            self._stop(attempt)
            if self._admission.wanted:
                self._interrupt()

    def slow(self, factor: float) -> None:
        """Multiply the duration of later steps by `factor`, on top of other slowdowns."""
        assert factor > 0, factor
        self._slowed_by.append(factor)
        self._slowness = prod(self._slowed_by)
        self._interrupt()

    def recover(self, factor: float) -> None:
        """End one slowdown by `factor`."""
        self._slowed_by.remove(factor)
        self._slowness = prod(self._slowed_by, start=1.0)
        self._interrupt()

    def forget_all(self) -> list[RequestId]:
        """Cancel all attempts and return their ids; the cache and the kept blocks stay."""
        attempt_ids = list(self._attempts)
        for attempt_id in attempt_ids:
            self.cancel(attempt_id)
        return attempt_ids

    def stop(self) -> None:
        """Lose all attempts and kept blocks and report nothing any more, as when the process dies."""
        if self._step_run is not None:
            self._step_run.forget()
        self._attempts.clear()
        self._kept.clear()
        self._admission.clear()

    # Steps.

    def _interrupt(self) -> None:
        """End the step run with the step that is under way, or begin a step."""
        if (step_run := self._step_run) is None:
            self._begin()
        elif step_run.steps > 1:
            step_run.cut(self._kernel, self._end)

    def _begin(self) -> None:
        admission, batch, seconds, slowness = self._admission, self._batch, self._seconds, self._slowness
        admission.admit(batch.running)
        running, context = batch.running, batch.context
        steps, slope, tokens = 1, 0.0, 0
        chunks: Sequence[PromptChunk] = ()
        if admission.computing and (chunks := admission.chunks(running)):
            pairs = 0.0
            for attempt, count in chunks:
                tokens += count
                pairs += count * (attempt.computed + 0.5 * count)
            first = slowness * seconds(tokens, pairs, running, context)
        elif running:
            first = slowness * seconds(0, 0, running, context)
            if (steps := self._steps_together()) > 1:
                last = slowness * seconds(0, 0.0, running, context + running * (steps - 1))
                slope = (last - first) / (steps - 1)
        else:
            return
        self._step_run = step_run = StepRun(self._kernel.instant, first, slope, steps, chunks, tokens)
        step_run.end = self._kernel.at(step_run.until(steps), self._end)

    def _steps_together(self) -> int:
        """Return the steps until a sequence ends or blocks may run out."""
        batch = self._batch
        steps = batch.to_end()
        worst = batch.running * (1 + steps // self._block_tokens)
        if worst > self._cache.available and (growth := batch.to_growth()) is not None:
            steps = min(steps, max(1, growth))
        return steps

    def _end(self) -> None:
        step_run, batch = self._step_run, self._batch
        assert step_run is not None
        self._step_run = None
        lasted = self._kernel.instant - step_run.began
        running = batch.running
        self.busy = Nanos(self.busy + lasted)
        self.weighted_busy += lasted * _power_share(running + step_run.prompt_tokens)
        reports: list[StepProgress] = []
        if running:
            steps = step_run.steps
            self.gaps.add(lasted / steps / MILLISECOND, running * steps)
            if steps > 1:
                self.generated_tokens += batch.advance(steps - 1)
            if batch.grows and batch.grows[0][0] <= batch.steps:
                self._grow()  # before the last step, because sequences that end with it hold their blocks until then
            self.generated_tokens += batch.advance(1)
            now = batch.steps
            if batch.ends and batch.ends[0][0] <= now:
                self._end_due(reports)
            if batch.reports and batch.reports[0][0] <= now:
                self._report_due(reports)
            if batch.grows and batch.grows[0][0] <= now:
                self._grow()
        for attempt, tokens in step_run.chunks:
            self._computed(attempt, tokens, reports)
        self._begin()
        if self._cache.changed:
            stored, removed = self._cache.changes()
            if stored or removed:
                self._cache_changed(stored, removed)
        if reports:
            self._report(reports)

    def _computed(self, attempt: SimulatedAttempt, tokens: int, reports: list[StepProgress]) -> None:
        if attempt.job.attempt_id not in self._attempts:
            return  # cancelled meanwhile
        attempt.computed += tokens
        self.computed_tokens += tokens
        self._memory.name_computed(attempt)
        if attempt.computed < attempt.prompt_tokens:
            return
        self._admission.computing.remove(attempt)
        attempt.generated += 1
        self.generated_tokens += 1
        ended = attempt.generated == attempt.answer_tokens
        if ended or attempt.generated == 1:
            reports.append(self._progress_of(attempt, ended=ended))
        if ended:
            self._over(attempt)
        else:
            self._batch.join(attempt)
            self._report_later(attempt)
            self._grow_later(attempt)

    def _end_due(self, reports: list[StepProgress]) -> None:
        for attempt in self._batch.due(self._batch.ends):
            assert self._batch.generated(attempt) == attempt.answer_tokens, attempt.job
            reports.append(self._progress_of(attempt, ended=True))
            self._over(attempt)

    def _report_due(self, reports: list[StepProgress]) -> None:
        for attempt in self._batch.due(self._batch.reports):
            reports.append(self._progress_of(attempt, ended=False))
            self._report_later(attempt)

    def _report_later(self, attempt: SimulatedAttempt) -> None:
        """Schedule the next progress report: when the answer begins a new block."""
        prompt, size = attempt.job.prompt_tokens, self._block_tokens
        tokens = prompt + self._batch.generated(attempt) + max(0, REPORT_TOKENS - size)
        self._batch.report_at(attempt, -(-tokens // size) * size + 1 - prompt)

    def _grow(self) -> None:
        """Take blocks for the generated tokens."""
        for attempt in self._batch.due(self._batch.grows):
            while not self._cache.available:
                if self._preempt() is attempt:
                    break
            else:
                self._memory.grow(attempt)
                self._grow_later(attempt)

    def _grow_later(self, attempt: SimulatedAttempt) -> None:
        """Schedule the next growth: when the next token has no room in the attempt's blocks."""
        self._batch.grow_at(attempt, self._memory.room(attempt) - attempt.job.prompt_tokens)

    def _preempt(self) -> SimulatedAttempt:
        """Preempt the running attempt that was admitted last, and return it."""
        running = (attempt for attempt in self._attempts.values() if attempt.running)
        attempt = max(running, key=lambda each: each.admitted)
        self._stop(attempt)
        attempt.prompt_tokens = attempt.job.prompt_tokens + attempt.generated
        self._admission.wait_again(attempt)
        self.preempted += 1
        return attempt

    # Ends.

    def _progress_of(self, attempt: SimulatedAttempt, *, ended: bool) -> StepProgress:
        generated = self._batch.generated(attempt)
        tokens, attempt.reported = generated - attempt.reported, generated
        return StepProgress(attempt.job.attempt_id, tokens, ended, attempt.cached if tokens == generated else None)

    def _over(self, attempt: SimulatedAttempt) -> None:
        """End an attempt that has generated all its tokens."""
        job = attempt.job
        self._memory.name_answer(attempt)
        del self._attempts[job.attempt_id]
        if job.handed_off:
            self._kept[job.attempt_id] = attempt
            self._batch.leave(attempt)
        else:
            self._stop(attempt)

    def _stop(self, attempt: SimulatedAttempt) -> None:
        """Remove an attempt from the batch and free its blocks."""
        self._batch.leave(attempt)
        self._memory.free(attempt)

    def check(self) -> None:
        """Assert that the sums are those of the attempts, and that all tokens have room."""
        self._cache.check()
        attempts = list(self._attempts.values())
        self._batch.check(attempts)
        assert self.waiting + len(self._admission.computing) + self._batch.running == len(attempts)
        assert not self._kept.keys() & self._attempts.keys()
        for attempt in attempts:
            if attempt.running:
                tokens = attempt.job.prompt_tokens + self._batch.generated(attempt)
                assert self._memory.room(attempt) >= tokens, attempt.job
