"""Virtual engine: simulates the engine of a worker by running `fleet.batching.scheduler` in virtual time.

Rules:

1. While no prompt is being computed, consecutive steps differ only by the length of their contexts. So their durations
   grow by the same amount from step to step. Such steps are simulated as one step run, up to the step in which the first
   sequence ends. If free blocks may run out earlier, the run goes only up to the step before which a sequence needs its next
   block. The instant of every token is still exact.
2. If an attempt arrives during a step run, the run ends after the step that is under way. If the attempt arrives at the
   instant at which a step within the run ends, the attempt joins the next step. If it arrives at the instant at which the
   whole run ends, the kernel draws at random whether the arrival or the end happens first.
3. When a fetch begins or succeeds during a step run, the running attempts first get the blocks for the tokens of the steps that have
   ended. In two cases, the run then ends after the step that is under way: a fetch has succeeded or failed, or too few blocks may be
   left for the remaining steps.
4. When an answer ends, its full blocks get names, if the job states their names.
5. Progress is reported with the first token of an answer, when the answer begins a new block (because routers count blocks), and at its
   end. If blocks are smaller than `REPORT_TOKENS` tokens, there is no report for some blocks, so that about `REPORT_TOKENS` tokens lie
   between two reports; this saves events. The method `progress` returns the tokens that are not reported yet; it can be called at any
   time.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

from msgspec import Struct

from fleet.batching.attempts import BatchedAttempt, BlockSupply, EngineLimits, Job, StepTimes
from fleet.batching.scheduler import BatchScheduler, DueHeap, StepPlan
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import RequestId
from fleet.hardware.power import power_share
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel
from fleet.sim.results.quantiles import Quantiles

# about the number of generated tokens between two progress reports of an attempt, if a block has fewer tokens than this
REPORT_TOKENS = 64


_power_share = lru_cache(1 << 14)(power_share)


class StepProgress(Struct, frozen=True):
    """Reports the tokens that one attempt has generated since its previous report, and whether it has ended."""

    attempt_id: RequestId
    tokens: int  # tokens generated since the last report
    ended: bool
    cached_tokens: int | None = None  # number of cached prompt tokens; None except in an attempt's first report


class VirtualEngine:
    """Simulates the engine of one worker in virtual time.

    The engine calls `report` with the progress of attempts, and `cache_changed` with the names of stored and removed blocks.
    """

    def __init__(
        self,
        kernel: Kernel,
        times: StepTimes,
        limits: EngineLimits,
        report: Callable[[list[StepProgress]], None],
        cache_changed: Callable[[list[int], list[int]], None],
        supply: BlockSupply[int] | None = None,
    ):
        self._kernel = kernel
        self._seconds = times.seconds
        self._block_tokens = limits.block_tokens
        self._report = report
        self._cache_changed = cache_changed
        self._scheduler = BatchScheduler(limits, supply)
        self._blocks = self._scheduler.blocks
        self._ends: DueHeap[int] = []
        self._reports: DueHeap[int] = []
        self._step_run: StepRun | None = None
        self._slowed_by: list[float] = []
        self._slowness = 1.0
        self.busy = Nanos(0)
        # sum of the durations of all steps in nanoseconds, each multiplied by the relative power of a GPU during the
        # step (0: idle power, 1: power limit)
        self.weighted_busy = 0.0
        # number of prompt tokens that were computed so far; tokens that are computed again after a preemption count again
        self.computed_tokens = 0
        self.generated_tokens = 0
        # distribution of the time between two consecutive tokens of a sequence, in ms; all steps of a step run count with their mean
        self.gaps = Quantiles()

    @property
    def held(self) -> int:
        """Number of attempts that have not ended."""
        return len(self._scheduler.attempts)

    @property
    def waiting(self) -> int:
        """Number of attempts among `held` that are not in the batch yet: new ones, preempted ones, and those with a fetch."""
        return self._scheduler.waiting

    @property
    def preempted(self) -> int:
        """Number of preemptions: times that an attempt lost its blocks because a running attempt found no free block."""
        return self._scheduler.preempted

    @property
    def idle(self) -> bool:
        """True if the engine has no attempt, and keeps no block that a decode worker may fetch."""
        return not self._scheduler.attempts and not self._scheduler.kept

    @property
    def kv_blocks_used(self) -> int:
        return self._blocks.used

    def leading(self, keys: Sequence[int]) -> int:
        """Return the number of leading blocks of a chain that are in the cache."""
        return self._blocks.leading(keys)

    def names(self) -> list[int]:
        """Return the names of all blocks in the cache."""
        return self._blocks.names()

    # Attempts.

    def submit(self, job: Job[int]) -> None:
        """Queue an attempt. The attempt joins the batch in its turn, when a batch place and enough blocks are free."""
        self._scheduler.submit(job)
        self._interrupt()

    def fetch(self, job: Job[int]) -> int | None:
        """Take an attempt whose prompt blocks come from a prefill worker, and allocate blocks for its prompt.

        Returns:
            The number of blocks that the caller has to fetch; the caller later calls `fetched` or `not_fetched`. None if too
            few blocks are free: the attempt is then queued, and the engine calls its block supply when it admits the attempt.
        """
        self._count_steps()
        if (blocks := self._scheduler.fetch(job)) is None:
            self.submit(job)
        elif (step_run := self._step_run) is not None and self._may_need(step_run.left) > self._blocks.available:
            step_run.cut(self._kernel, self._end)
        return blocks

    def fetched(self, attempt_id: RequestId) -> None:
        """Continue an attempt after all blocks of its fetch have arrived."""
        self._count_steps()
        if (attempt := self._scheduler.fetched(attempt_id)) is not None:  # None: the attempt was cancelled meanwhile
            attempt.computed = max(attempt.computed, attempt.coming)
            self._blocks.name(attempt, attempt.job.keys, attempt.computed)
            self._interrupt()

    def not_fetched(self, attempt_id: RequestId) -> None:
        """Continue an attempt whose fetch has failed: the engine computes the part of the prompt after the cached prefix."""
        if self._scheduler.fetched(attempt_id) is not None:
            self._interrupt()

    def cancel(self, attempt_id: RequestId) -> None:
        """End an attempt without a report; do nothing if its id is unknown."""
        if self._scheduler.cancel(attempt_id):
            self._interrupt()

    def progress(self) -> list[StepProgress]:
        """Return for each running attempt the number of generated tokens that were not reported yet; mark them as reported."""
        done = 0 if (step_run := self._step_run) is None else step_run.done(self._kernel.instant) - step_run.counted
        scheduler, reports = self._scheduler, []
        for attempt in scheduler.attempts.values():
            if attempt in scheduler.running and (tokens := scheduler.generated(attempt) + done - attempt.reported):
                attempt.reported += tokens
                reports.append(StepProgress(attempt.job.attempt_id, tokens, ended=False))
        return reports

    def keeps(self, attempt_id: RequestId) -> bool:
        """Return True if the engine still keeps the blocks of a handed-off attempt."""
        return attempt_id in self._scheduler.kept

    def release(self, attempt_id: RequestId) -> None:
        """Free the blocks that are kept for a handed-off attempt. Do nothing if none are kept for it."""
        if self._scheduler.release(attempt_id) and self._scheduler.wanted:
            self._interrupt()

    def slow(self, factor: float) -> None:
        """Begin a slowdown: multiply the durations of later steps by `factor`, and by the factors of all slowdowns that have not ended."""
        assert factor > 0, factor
        self._slowed_by.append(factor)
        self._slowness = prod(self._slowed_by)
        self._interrupt()

    def recover(self, factor: float) -> None:
        """End one slowdown that began with the same `factor`."""
        self._slowed_by.remove(factor)
        self._slowness = prod(self._slowed_by, start=1.0)
        self._interrupt()

    def forget_all(self) -> list[RequestId]:
        """Cancel all attempts and return their ids; the cache and the blocks kept for decode workers remain."""
        attempt_ids = list(self._scheduler.attempts)
        for attempt_id in attempt_ids:
            self.cancel(attempt_id)
        return attempt_ids

    def stop(self) -> None:
        """Stop the engine as if its process died: drop all attempts and kept blocks, and report nothing any more."""
        if self._step_run is not None:
            self._step_run.forget()
        self._scheduler.clear()

    # Steps.

    def _interrupt(self) -> None:
        """End the step run after the step that is under way. If no step is under way, begin one, unless there is nothing to compute."""
        if (step_run := self._step_run) is None:
            self._begin()
        elif step_run.steps > 1:
            step_run.cut(self._kernel, self._end)

    def _count_steps(self) -> None:
        """Count the steps of the step run that have ended, and allocate blocks for the next tokens of the running attempts.

        Call this before another attempt takes blocks, so that the running attempts get theirs first.
        """
        if (step_run := self._step_run) is not None and (steps := step_run.count(self._kernel.instant)):
            self.generated_tokens += self._scheduler.advance(steps)
            self._scheduler.grow()

    def _begin(self) -> None:
        if (plan := self._scheduler.plan()) is None:
            return
        seconds, slowness, running, context = self._seconds, self._slowness, plan.decodes, plan.context
        steps, slope = 1, 0.0
        first = slowness * seconds(plan.prompt_tokens, plan.prompt_pairs, running, context)
        if not plan.chunks and (steps := self._steps_together()) > 1:
            last = slowness * seconds(0, 0.0, running, context + running * (steps - 1))
            slope = (last - first) / (steps - 1)
        self._step_run = step_run = StepRun(self._kernel.instant, first, slope, steps, plan)
        step_run.end = self._kernel.at(step_run.until(steps), self._end)

    def _steps_together(self) -> int:
        """Return the number of steps of the next step run (rule 1): up to the end of a sequence, or fewer if blocks may run out."""
        steps = self._scheduler.steps_to(self._ends)
        assert steps is not None
        if self._may_need(steps) > self._blocks.available and (growth := self._scheduler.steps_to_growth()) is not None:
            steps = min(steps, max(1, growth))
        return steps

    def _may_need(self, steps: int) -> int:
        """Return an upper bound of the number of further blocks that the running attempts need for the next `steps` steps."""
        return len(self._scheduler.running) * (1 + steps // self._block_tokens)

    def _end(self) -> None:
        step_run, scheduler = self._step_run, self._scheduler
        assert step_run is not None
        self._step_run = None
        lasted = self._kernel.instant - step_run.began
        running = len(scheduler.running)
        self.busy = Nanos(self.busy + lasted)
        self.weighted_busy += lasted * _power_share(running + step_run.plan.prompt_tokens)
        reports: list[StepProgress] = []
        if running:
            steps = step_run.steps
            self.gaps.add(lasted / steps / MILLISECOND, running * steps)
            if step_run.left > 1:
                self.generated_tokens += scheduler.advance(step_run.left - 1)
            # Allocate blocks for the run's last step before any sequence ends: during this step, all sequences still hold their blocks.
            scheduler.grow()
            self.generated_tokens += scheduler.advance(1)
            now = scheduler.steps
            if self._ends and self._ends[0][0] <= now:
                for attempt in scheduler.due(self._ends):
                    self._over(attempt, reports)
            if self._reports and self._reports[0][0] <= now:
                for attempt in scheduler.due(self._reports):
                    reports.append(self._progress_of(attempt, ended=False))
                    self._report_later(attempt)
            scheduler.grow()
        for attempt, tokens in step_run.plan.chunks:
            # skip an attempt that was cancelled during the step; its id may then belong to another attempt
            if scheduler.attempts.get(attempt.job.attempt_id) is attempt:
                self._computed(attempt, tokens, reports)
        self._begin()
        if self._blocks.changed:
            stored, removed = self._blocks.changes()
            if stored or removed:
                self._cache_changed(stored, removed)
        if reports:
            self._report(reports)

    def _computed(self, attempt: BatchedAttempt[int], tokens: int, reports: list[StepProgress]) -> None:
        whole = self._scheduler.computed(attempt, tokens)
        self.computed_tokens += tokens
        self._blocks.name(attempt, attempt.job.keys, attempt.computed)
        if not whole:
            return
        self.generated_tokens += 1
        if attempt.generated == attempt.job.answer_tokens:
            self._over(attempt, reports)
            return
        if attempt.generated == 1:
            reports.append(self._progress_of(attempt, ended=False))
        self._scheduler.join(attempt)
        self._scheduler.schedule(self._ends, attempt, attempt.job.answer_tokens)
        self._report_later(attempt)

    def _report_later(self, attempt: BatchedAttempt[int]) -> None:
        """Schedule the next progress report for a step at which the answer begins a new block.

        Schedule nothing if the answer has ended by then, because the end of an answer is always reported.
        """
        prompt, size = attempt.job.prompt_tokens, self._block_tokens
        tokens = prompt + self._scheduler.generated(attempt) + max(0, REPORT_TOKENS - size)
        if (due := -(-tokens // size) * size + 1 - prompt) < attempt.job.answer_tokens:
            self._scheduler.schedule(self._reports, attempt, due)

    def _progress_of(self, attempt: BatchedAttempt[int], *, ended: bool) -> StepProgress:
        generated = self._scheduler.generated(attempt)
        tokens, attempt.reported = generated - attempt.reported, generated
        return StepProgress(attempt.job.attempt_id, tokens, ended, attempt.cached if tokens == generated else None)

    def _over(self, attempt: BatchedAttempt[int], reports: list[StepProgress]) -> None:
        """End an attempt that has generated all its tokens, and append its last report to `reports`."""
        job = attempt.job
        assert self._scheduler.generated(attempt) == job.answer_tokens, job
        reports.append(self._progress_of(attempt, ended=True))
        if job.answer_keys:
            # minus 1, because the KV of the last token is never computed
            computed = job.prompt_tokens + job.answer_tokens - 1
            self._blocks.name(attempt, [*job.keys, *job.answer_keys], computed)
        self._scheduler.end(attempt)

    def check(self) -> None:
        """Assert that the scheduler's sums agree with its attempts, and that each running attempt has blocks for all its tokens."""
        self._scheduler.check()


class StepRun:
    """One or several consecutive steps that are simulated as one event. The end of each step is computed by a formula (`until`).

    Step n (counted from 0) lasts `first + n * slope` seconds. A step that computes prompts has a step run of its own.
    """

    __slots__ = ("began", "counted", "end", "first", "plan", "slope", "steps")

    def __init__(self, began: int, first: float, slope: float, steps: int, plan: StepPlan[int]):
        self.began, self.first, self.slope, self.steps, self.plan = began, first, slope, steps, plan
        self.counted = 0
        """Number of steps that the scheduler has already counted."""
        self.end: ScheduledEvent | None = None

    @property
    def left(self) -> int:
        """Number of steps that the scheduler has not counted yet."""
        return self.steps - self.counted

    def until(self, steps: int) -> int:
        """Return the instant at which the first `steps` steps are done."""
        seconds = steps * self.first + self.slope * (steps * (steps - 1) / 2)
        return self.began + max(1, round(seconds * SECOND))

    def done(self, now: int) -> int:
        """Return the number of steps that end before `now` or exactly at `now`. Call this only before the whole run has ended."""
        running = self._running_at(now)
        return running if running < self.steps and self.until(running) == now else running - 1

    def count(self, now: int) -> int:
        """Return the number of steps that ended before `now` and were not counted yet, and mark them as counted.

        The step that is under way is never counted.
        """
        before, self.counted = self.counted, self._running_at(now) - 1
        return self.counted - before

    def cut(self, kernel: Kernel, ended: Callable[[], None]) -> None:
        """Shorten the run so that it ends after the step that is under way. A step that ends exactly now is the last one."""
        steps = self._running_at(kernel.instant)
        if steps < self.steps:
            self.forget()
            self.steps = steps
            self.end = kernel.at(self.until(steps), ended)

    def forget(self) -> None:
        """Cancel the event that ends the run."""
        if self.end is not None:
            cancel(self.end)

    def _running_at(self, now: int) -> int:
        """Return the number of the step that runs at `now`, counted from 1. A step that ends exactly at `now` still runs."""
        elapsed = (now - self.began) / SECOND
        half, guess = 0.5 * self.slope, 1
        linear = self.first - half
        root = linear * linear + 4 * half * elapsed
        # Solve the equation a n² + b n = c for the number of steps n. Here a is `half`, b is `linear`, and c is `elapsed`.
        # The form n = 2c / (b + sqrt(b² + 4ac)) also works for a slope of 0.
        if linear > 0 and root >= 0:
            guess = min(self.steps, max(1, int(2 * elapsed / (linear + root**0.5)) + 1))
        while guess < self.steps and self.until(guess) < now:
            guess += 1
        while guess > 1 and self.until(guess - 1) >= now:
            guess -= 1
        return guess
