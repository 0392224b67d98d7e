"""The work of a simulated engine that generates, by decode steps.

Rules:

1. Every step gives a token to each of them. So what is due to one of them is due at a number of steps, which is known when it
   joins: its end, when it needs another block, and when its progress is to be told.
2. What is due lies in three heaps. Work that has left is still in them, and passed over when its turn comes; work that has left
   and joined again is another, by the order in which it was admitted.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from fleet.sim.engine.attempts import SimulatedAttempt

DueHeap = list[tuple[int, int, SimulatedAttempt]]
"""A heap: after how many decode steps, the order of admission, whose."""


class VirtualBatch:
    """The batch of one engine."""

    __slots__ = ("context", "ends", "grows", "running", "steps", "tells")

    def __init__(self) -> None:
        self.running = 0
        self.context = 0  # tokens of all of them
        self.steps = 0  # done
        self.ends: DueHeap = []
        self.grows: DueHeap = []
        self.tells: DueHeap = []

    def join(self, work: SimulatedAttempt) -> None:
        """From now on it gets tokens; `grow_at` and `tell_at` say what else is due to it."""
        generated = work.generated
        work.running = True
        work.begun_at = self.steps - generated
        self.running += 1
        self.context += work.job.prompt_tokens + generated
        heappush(self.ends, (work.begun_at + work.answer_tokens, work.admitted, work))

    def leave(self, work: SimulatedAttempt) -> None:
        """No more tokens; nothing happens if it gets none."""
        if work.running:
            generated = self.steps - work.begun_at
            self.running -= 1
            self.context -= work.job.prompt_tokens + generated
            work.generated = generated
            work.running = False

    def generated(self, work: SimulatedAttempt) -> int:
        """Tokens of its answer, whether it runs or not."""
        return self.steps - work.begun_at if work.running else work.generated

    def advance(self, steps: int) -> int:
        """So many steps are done; returns the tokens that they brought."""
        self.steps += steps
        tokens = self.running * steps
        self.context += tokens
        return tokens

    # What is due.

    def grow_at(self, work: SimulatedAttempt, generated: int) -> None:
        """It needs another block when its answer has so many tokens; what ends by then needs none."""
        if generated < work.answer_tokens:
            heappush(self.grows, (work.begun_at + generated, work.admitted, work))

    def tell_at(self, work: SimulatedAttempt, generated: int) -> None:
        """Its progress is to be told when its answer has so many tokens; the end is told anyway."""
        if generated < work.answer_tokens:
            heappush(self.tells, (work.begun_at + generated, work.admitted, work))

    def to_end(self) -> int:
        """Steps to the next end; there must be one who runs."""
        due = _next(self.ends)
        assert due is not None
        return due - self.steps

    def to_growth(self) -> int | None:
        """Steps to the next one that needs a block, which may be past; None: all end before they need one."""
        due = _next(self.grows)
        return None if due is None else due - self.steps

    def due(self, heap: DueHeap) -> Iterator[SimulatedAttempt]:
        """Those in one of the three heaps to whom something is due by now; they leave it."""
        while heap and heap[0][0] <= self.steps:
            _, admitted, work = heappop(heap)
            if work.running and work.admitted == admitted:
                yield work

    def check(self, works: list[SimulatedAttempt]) -> None:
        """Assert that sums are those of the work that runs."""
        running = [work for work in works if work.running]
        assert len(running) == self.running
        assert sum(work.job.prompt_tokens + self.generated(work) for work in running) == self.context


def _next(heap: DueHeap) -> int | None:
    """When the first of a heap is due; what is no longer meant leaves it."""
    while heap:
        due, admitted, work = heap[0]
        if work.running and work.admitted == admitted:
            return due
        heappop(heap)
    return None
