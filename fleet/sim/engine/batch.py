"""Batch of a simulated engine: the attempts that generate tokens, counted by decode steps.

Rules:

1. Each decode step gives one token to every attempt. So the step at which something is due to an attempt is known when the
   attempt joins: its end, its next block, and its next progress report.
2. Due steps lie in three heaps. An entry of an attempt that has left stays in its heap and is skipped later. An attempt that
   left and joined again is told apart by its number in the order of admission.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from fleet.sim.engine.attempts import SimulatedAttempt

DueHeap = list[tuple[int, int, SimulatedAttempt]]
"""Heap of (decode step, number in the order of admission, attempt)."""


class VirtualBatch:
    """The batch of one engine."""

    __slots__ = ("context", "ends", "grows", "reports", "running", "steps")

    def __init__(self) -> None:
        self.running = 0
        self.context = 0  # tokens of all running attempts
        self.steps = 0  # decode steps done
        self.ends: DueHeap = []
        self.grows: DueHeap = []
        self.reports: DueHeap = []

    def join(self, attempt: SimulatedAttempt) -> None:
        """Add an attempt; `grow_at` and `report_at` then register what else is due to it."""
        generated = attempt.generated
        attempt.running = True
        attempt.begun_at = self.steps - generated
        self.running += 1
        self.context += attempt.job.prompt_tokens + generated
        heappush(self.ends, (attempt.begun_at + attempt.answer_tokens, attempt.admitted, attempt))

    def leave(self, attempt: SimulatedAttempt) -> None:
        """Remove an attempt, if it is running."""
        if attempt.running:
            generated = self.steps - attempt.begun_at
            self.running -= 1
            self.context -= attempt.job.prompt_tokens + generated
            attempt.generated = generated
            attempt.running = False

    def generated(self, attempt: SimulatedAttempt) -> int:
        """Return the tokens of its answer so far, whether it is running or not."""
        return self.steps - attempt.begun_at if attempt.running else attempt.generated

    def advance(self, steps: int) -> int:
        """Count steps as done and return the tokens that they generated."""
        self.steps += steps
        tokens = self.running * steps
        self.context += tokens
        return tokens

    def grow_at(self, attempt: SimulatedAttempt, generated: int) -> None:
        """Register that the attempt needs another block at this answer length, unless it ends by then."""
        if generated < attempt.answer_tokens:
            heappush(self.grows, (attempt.begun_at + generated, attempt.admitted, attempt))

    def report_at(self, attempt: SimulatedAttempt, generated: int) -> None:
        """Register a progress report at this answer length; the end is reported anyway."""
        if generated < attempt.answer_tokens:
            heappush(self.reports, (attempt.begun_at + generated, attempt.admitted, attempt))

    def to_end(self) -> int:
        """Return the steps until the next attempt ends; at least one attempt must be running."""
        due = _next(self.ends)
        assert due is not None
        return due - self.steps

    def to_growth(self) -> int | None:
        """Return the steps until an attempt needs a block (0 or less if it does now), or None if all end before."""
        due = _next(self.grows)
        return None if due is None else due - self.steps

    def due(self, heap: DueHeap) -> Iterator[SimulatedAttempt]:
        """Remove and yield the running attempts of a heap whose step has come."""
        while heap and heap[0][0] <= self.steps:
            _, admitted, attempt = heappop(heap)
            if attempt.running and attempt.admitted == admitted:
                yield attempt

    def check(self, attempts: list[SimulatedAttempt]) -> None:
        """Assert that the sums are those of the running attempts."""
        running = [attempt for attempt in attempts if attempt.running]
        assert len(running) == self.running
        assert sum(attempt.job.prompt_tokens + self.generated(attempt) for attempt in running) == self.context


def _next(heap: DueHeap) -> int | None:
    """Return the first valid step of a heap and drop invalid entries before it."""
    while heap:
        due, admitted, attempt = heap[0]
        if attempt.running and attempt.admitted == admitted:
            return due
        heappop(heap)
    return None
