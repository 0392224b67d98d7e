"""Steps of a simulated engine that are taken together.

While no prompt is computed, steps differ only by the length of contexts, and their times lie on a straight line: so the instant
at which any number of them is done has a closed form, and so has the number that is done at an instant.
"""

from collections.abc import Callable, Sequence

from fleet.core.clock import SECOND
from fleet.sim.engine.attempts import SimulatedAttempt
from fleet.sim.kernel import Kernel, ScheduledEvent, cancel

PromptChunk = tuple[SimulatedAttempt, int]
"""Of whose prompt a step computes how many tokens."""


class StepRun:
    """Steps, the n-th of which lasts `first + n * slope` seconds; one that computes prompts is alone."""

    __slots__ = ("began", "chunks", "end", "first", "prompt_tokens", "slope", "steps")

    def __init__(
        self, began: int, first: float, slope: float, steps: int, chunks: Sequence[PromptChunk], prompt_tokens: int
    ):
        self.began, self.first, self.slope, self.steps, self.chunks = began, first, slope, steps, chunks
        self.prompt_tokens = prompt_tokens  # of the chunks
        self.end: ScheduledEvent | None = None

    def until(self, steps: int) -> int:
        """When so many of them are done."""
        seconds = steps * self.first + self.slope * (steps * (steps - 1) / 2)
        return self.began + max(1, round(seconds * SECOND))

    def done(self, now: int) -> int:
        """How many are over, if the last one is not."""
        running = self._running_at(now)
        return running if running < self.steps and self.until(running) == now else running - 1

    def cut(self, kernel: Kernel, ended: Callable[[], None]) -> None:
        """End with the step that runs now."""
        steps = self._running_at(kernel.instant)
        if steps < self.steps:
            self.forget()
            self.steps = steps
            self.end = kernel.at(self.until(steps), ended)

    def forget(self) -> None:
        """The end will not come."""
        if self.end is not None:
            cancel(self.end)

    def _running_at(self, now: int) -> int:
        """The first number of steps that is not done before an instant: the root of a parabola, and the whole numbers beside it."""
        elapsed = (now - self.began) / SECOND
        half, guess = 0.5 * self.slope, 1
        linear = self.first - half
        root = linear * linear + 4 * half * elapsed
        if linear > 0 and root >= 0:  # 2c / (b + sqrt(b² + 4ac)), which holds for slopes of 0 too
            guess = min(self.steps, max(1, int(2 * elapsed / (linear + root**0.5)) + 1))
        while guess < self.steps and self.until(guess) < now:
            guess += 1
        while guess > 1 and self.until(guess - 1) >= now:
            guess -= 1
        return guess
