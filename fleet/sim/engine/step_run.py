"""Step run: several steps of a simulated engine that are simulated as one event.

While no prompt is computed, steps differ only by the length of their contexts, so their durations lie on a straight line.
Closed forms then give the instant at which a number of steps is done, and the number of steps that are done at an instant.
"""

from collections.abc import Callable

from fleet.batching.scheduler import StepPlan
from fleet.core.clock import SECOND
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel


class StepRun:
    """Steps of which number n (from 0) lasts `first + n * slope` seconds. A step that computes prompts is a run of one."""

    __slots__ = ("began", "counted", "end", "first", "plan", "slope", "steps")

    def __init__(self, began: int, first: float, slope: float, steps: int, plan: StepPlan[int]):
        self.began, self.first, self.slope, self.steps, self.plan = began, first, slope, steps, plan
        self.counted = 0
        """Steps that the scheduler has counted already."""
        self.end: ScheduledEvent | None = None

    @property
    def left(self) -> int:
        """Steps that the scheduler has still to count."""
        return self.steps - self.counted

    def until(self, steps: int) -> int:
        """Return the instant at which the first `steps` steps are done."""
        seconds = steps * self.first + self.slope * (steps * (steps - 1) / 2)
        return self.began + max(1, round(seconds * SECOND))

    def done(self, now: int) -> int:
        """Return how many steps are done; the run must not be over."""
        running = self._running_at(now)
        return running if running < self.steps and self.until(running) == now else running - 1

    def count(self, now: int) -> int:
        """Return the steps that ended before `now` and are not counted yet, and count them; the step under way is never counted."""
        before, self.counted = self.counted, self._running_at(now) - 1
        return self.counted - before

    def cut(self, kernel: Kernel, ended: Callable[[], None]) -> None:
        """End the run with the step that is under way; a step that ends now still is."""
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
        """Return the smallest number of steps that is not done before `now`: the root of a parabola, corrected by whole steps."""
        elapsed = (now - self.began) / SECOND
        half, guess = 0.5 * self.slope, 1
        linear = self.first - half
        root = linear * linear + 4 * half * elapsed
        if linear > 0 and root >= 0:  # 2c / (b + sqrt(b² + 4ac)) also holds for a slope of 0
            guess = min(self.steps, max(1, int(2 * elapsed / (linear + root**0.5)) + 1))
        while guess < self.steps and self.until(guess) < now:
            guess += 1
        while guess > 1 and self.until(guess - 1) >= now:
            guess -= 1
        return guess
