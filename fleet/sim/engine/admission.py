"""Admission of a simulated engine: attempts that wait for room, fetch blocks, or have their prompt computed.

Rules:

1. Attempts are admitted in the order of arrival, if there is room for the prompt and one more token. Preempted ones go first.
2. The block supply is asked once, when there is room. Fetched blocks come into blocks that are taken for them, and meanwhile
   others are admitted. After the fetch, whether it succeeded or not, the attempt goes before all that wait for room.
3. Prompts are computed in the order of admission. At least one token of each is computed, for its logits.
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
        self._ready: deque[SimulatedAttempt] = deque()  # fetched; these hold blocks, so they must not wait for blocks
        self._fetching: dict[RequestId, SimulatedAttempt] = {}
        self._admitted = 0
        self.computing: deque[SimulatedAttempt] = deque()
        """Attempts whose prompts are computed; read-only for others."""

    @property
    def waiting(self) -> int:
        """Attempts that are not admitted yet."""
        return len(self._waiting) + len(self._ready) + len(self._fetching)

    @property
    def wanted(self) -> bool:
        """True if an attempt waits for room."""
        return bool(self._waiting)

    def wait(self, attempt: SimulatedAttempt) -> None:
        """Queue an attempt that has arrived."""
        self._waiting.append(attempt)

    def wait_again(self, attempt: SimulatedAttempt) -> None:
        """Queue a preempted attempt."""
        self._waiting.appendleft(attempt)

    def fetch(self, attempt: SimulatedAttempt) -> None:
        """Note that the attempt has room and that its blocks are being fetched."""
        self._fetching[attempt.job.attempt_id] = attempt

    def fetched(self, attempt_id: RequestId) -> SimulatedAttempt | None:
        """Note that a fetch has ended and return its attempt; None if the attempt was cancelled."""
        if (attempt := self._fetching.pop(attempt_id, None)) is not None:
            self._ready.append(attempt)
        return attempt

    def leave(self, attempt: SimulatedAttempt) -> None:
        """Remove an attempt from the queues, if it is in one."""
        self._fetching.pop(attempt.job.attempt_id, None)
        for queue in (self._waiting, self._ready, self.computing):
            if attempt in queue:
                queue.remove(attempt)

    def clear(self) -> None:
        self._fetching.clear()
        for queue in (self._waiting, self._ready, self.computing):
            queue.clear()

    def admit(self, running: int) -> None:
        """Admit all attempts that there is room for beside `running` generating ones."""
        waiting, ready, computing = self._waiting, self._ready, self.computing
        if not waiting and not ready:
            return
        most = self._limits.max_running - running
        while ready and len(computing) < most:
            self._begin(ready.popleft())
        while waiting and len(computing) < most:
            if not self._memory.admit(waiting[0]):
                return
            attempt = waiting.popleft()
            if self._supply is None or attempt.asked or not self._ask(attempt, self._supply):
                self._begin(attempt)

    def _begin(self, attempt: SimulatedAttempt) -> None:
        attempt.computed = min(attempt.computed, attempt.prompt_tokens - 1)
        if attempt.cached is None:
            attempt.cached = attempt.computed
        self._admitted += 1
        attempt.admitted = self._admitted
        self.computing.append(attempt)

    def _ask(self, attempt: SimulatedAttempt, supply: BlockSupply) -> bool:
        """Ask the block supply and begin a fetch; return False if there is nothing worth fetching."""
        attempt.asked = True
        here = len(attempt.held)
        coming = supply.offer(attempt.job, here)
        if coming <= here * self._limits.block_tokens:
            return False
        attempt.coming = coming
        self.fetch(attempt)
        supply.fetch(attempt.job, here)
        return True

    def chunks(self, running: int) -> list[PromptChunk]:
        """Return the prompt chunks of the next step, oldest prompt first, beside `running` generating attempts."""
        room = self._limits.step_tokens - running
        chunks = []
        for attempt in self.computing:
            if room <= 0:
                break
            count = min(room, attempt.prompt_tokens - attempt.computed)
            chunks.append((attempt, count))
            room -= count
        return chunks
