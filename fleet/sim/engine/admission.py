"""Work of a simulated engine until it generates: what waits for room, what is fetched, and whose prompt is computed.

Rules:

1. Work is admitted in the order of its arrival, when there is room for its prompt and one token more. What was pushed out is first.
2. Blocks that come from elsewhere (`BlockSupply`) are asked for once, when there is room, and fetched into blocks taken for that;
   meanwhile others are admitted. When they have come, or will not come, the work goes before all that waits for room.
3. Prompts are computed in the order of admission, and of each at least one token, for its logits.
"""

from collections import deque

from fleet.core.ids import RequestId
from fleet.sim.engine.attempts import BlockSupply, EngineLimits, SimulatedAttempt
from fleet.sim.engine.memory import SimulatedKvMemory
from fleet.sim.engine.step_run import PromptChunk


class EngineAdmission:
    """The queues of one engine."""

    __slots__ = ("_admitted", "_fetching", "_limits", "_memory", "_ready", "_supply", "_waiting", "computing")

    def __init__(self, limits: EngineLimits, memory: SimulatedKvMemory, supply: BlockSupply | None):
        self._limits = limits
        self._memory = memory
        self._supply = supply
        self._waiting: deque[SimulatedAttempt] = deque()
        self._ready: deque[SimulatedAttempt] = (
            deque()
        )  # have their blocks: behind who waits for blocks, neither would go on
        self._fetching: dict[RequestId, SimulatedAttempt] = {}
        self._admitted = 0
        self.computing: deque[SimulatedAttempt] = deque()
        """Those whose prompts are computed; to be read."""

    @property
    def waiting(self) -> int:
        """Work that was not admitted yet."""
        return len(self._waiting) + len(self._ready) + len(self._fetching)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for room."""
        return bool(self._waiting)

    # Coming and going.

    def wait(self, work: SimulatedAttempt) -> None:
        """It has arrived."""
        self._waiting.append(work)

    def wait_again(self, work: SimulatedAttempt) -> None:
        """It was pushed out."""
        self._waiting.appendleft(work)

    def fetch(self, work: SimulatedAttempt) -> None:
        """What it needs has been asked for, and it has room."""
        self._fetching[work.job.attempt_id] = work

    def fetched(self, attempt_id: RequestId) -> SimulatedAttempt | None:
        """What was asked for has come, or will not; None: nobody waits for it any more."""
        if (work := self._fetching.pop(attempt_id, None)) is not None:
            self._ready.append(work)
        return work

    def leave(self, work: SimulatedAttempt) -> None:
        """It is in no queue any more, if it was in one."""
        self._fetching.pop(work.job.attempt_id, None)
        for queue in (self._waiting, self._ready, self.computing):
            if work in queue:
                queue.remove(work)

    def clear(self) -> None:
        self._fetching.clear()
        for queue in (self._waiting, self._ready, self.computing):
            queue.clear()

    # Turns.

    def admit(self, running: int) -> None:
        """Begin all prompts that there is room for, beside so many sequences that generate."""
        waiting, ready, computing = self._waiting, self._ready, self.computing
        if not waiting and not ready:
            return
        most = self._limits.max_running - running
        while ready and len(computing) < most:
            self._begin(ready.popleft())
        while waiting and len(computing) < most:
            if not self._memory.admit(waiting[0]):
                return
            work = waiting.popleft()
            if self._supply is None or work.asked or not self._ask(work, self._supply):
                self._begin(work)

    def _begin(self, work: SimulatedAttempt) -> None:
        work.computed = min(work.computed, work.prompt_tokens - 1)
        if work.cached is None:
            work.cached = work.computed
        self._admitted += 1
        work.admitted = self._admitted
        self.computing.append(work)

    def _ask(self, work: SimulatedAttempt, supply: BlockSupply) -> bool:
        """Whether blocks of a prompt that is about to be admitted come from elsewhere."""
        work.asked = True
        here = len(work.held)
        coming = supply.offer(work.job, here)
        if coming <= here * self._limits.block_tokens:
            return False
        work.coming = coming
        self.fetch(work)
        supply.fetch(work.job, here)
        return True

    def chunks(self, running: int) -> list[PromptChunk]:
        """What the next step computes of prompts, oldest first, beside so many sequences that generate."""
        room = self._limits.step_tokens - running
        chunks = []
        for work in self.computing:
            if room <= 0:
                break
            count = min(room, work.prompt_tokens - work.computed)
            chunks.append((work, count))
            room -= count
        return chunks
