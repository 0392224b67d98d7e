"""Batch scheduler of a modelled engine (`fleet.batching.attempts`): continuous batching with chunked prefill and limited KV blocks.

The scheduler knows neither time nor bytes. `fleet.sim.virtual_engine` drives it in virtual time, and
`workers.engines.simulated.engine` in real time with real KV bytes.

Rules:

1. Attempts are admitted in the order of priority, then of arrival, if the batch has a free place, and if there are blocks for the
   prompt and one more token. Within a priority, preempted attempts come first. While the first attempt in this order cannot be
   admitted, no attempt after it is admitted.
2. A block supply (`fleet.batching.attempts.BlockSupply`) says which blocks of a prompt can be fetched from a store or a
   prefill worker. The scheduler calls the supply once for each attempt, when there is room for the attempt's prompt. The
   blocks for the prompt are reserved before a fetch begins. The attempt then leaves the queue of rule 1, so other attempts
   are admitted during the fetch. After the fetch, even if it has failed, the attempt is admitted before all attempts that
   wait for room.
3. A step gives one token to each running attempt, and the other tokens of `step_tokens` to prompts, in the order of admission. A
   prompt may take several steps. Even if the whole prompt is in the cache, its last token is computed, because the logits of this
   token are needed. The last step of a prompt produces the first token of the answer.
4. Each decode step gives one token to every running attempt. So the steps at which an attempt needs its next block, or ends, are
   known when it joins the batch, and are kept in heaps. If an attempt leaves the batch, its entry stays in the heap and is skipped
   later. If the attempt has joined again, the entry is recognised as old by its number in the order of admission.
5. If a running attempt needs a block and none is left, the running attempt that was admitted last is preempted: it loses its blocks
   and waits again. Then its prompt and the tokens that it had generated are computed again (vLLM's recomputation).
6. An attempt that is handed off keeps its blocks after its end, until `release`.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Generic

from msgspec import Struct

from fleet.batching.attempts import BatchedAttempt, BlockSupply, EngineLimits, Job, Name
from fleet.batching.kv_blocks import KvBlocks
from fleet.core.ids import RequestId

PromptChunk = tuple[BatchedAttempt[Name], int]
"""An attempt, and the number of its prompt tokens that one step computes."""

DueHeap = list[tuple[int, int, BatchedAttempt[Name]]]
"""Heap of attempts by the decode step at which something is due, such as a new block or the end (rule 4).

An entry has the decode step, the attempt's number in the order of admission, and the attempt.
"""


class StepPlan(Struct, Generic[Name], frozen=True):
    """The work of one step: chunks of prompts, and one token for each running attempt."""

    chunks: Sequence[PromptChunk[Name]]
    prompt_tokens: int  # number of prompt tokens in all chunks
    prompt_pairs: float  # number of pairs of a prompt token and an earlier token that it attends to, in all chunks
    decodes: int  # number of running attempts, each of which gets one token
    context: int  # number of prompt and answer tokens of all running attempts together


class BatchScheduler(Generic[Name]):
    """Schedules the attempts of one engine: its queues, its batch and its KV blocks."""

    def __init__(
        self,
        limits: EngineLimits,
        supply: BlockSupply[Name] | None = None,
        may_admit: Callable[[Job[Name]], bool] | None = None,
    ):
        """Begin without attempts.

        Args:
            limits: Limits of the engine.
            supply: Says which blocks can be fetched (rule 2); None: no blocks are fetched, except for attempts that `fetch` adds.
            may_admit: Function that is called for the first waiting attempt. While it returns False, no waiting attempt is admitted.
                None: only rule 1 decides.
        """
        self._limits = limits
        self._supply = supply
        self._may_admit = may_admit
        # Attempts that wait for room, as a sorted list of (-priority, order of arrival, attempt).
        self._waiting: list[tuple[int, int, BatchedAttempt[Name]]] = []
        # Attempts whose fetch has ended. They are admitted first, because they hold blocks that other attempts may wait for.
        self._ready: deque[BatchedAttempt[Name]] = deque()
        self._fetching: dict[RequestId, BatchedAttempt[Name]] = {}
        # Attempts whose prompts are being computed, in the order of admission.
        self._computing: deque[BatchedAttempt[Name]] = deque()
        self._grows: DueHeap[Name] = []
        self._arrivals = 0
        self._admitted = 0
        self.blocks: KvBlocks[Name] = KvBlocks(limits.kv_blocks, limits.block_tokens)
        self.attempts: dict[RequestId, BatchedAttempt[Name]] = {}
        """Attempts that have not ended, in the order of arrival. Other classes only read this dict."""
        self.running: dict[BatchedAttempt[Name], None] = {}
        """Attempts that generate tokens. Other classes only read this dict."""
        self.kept: dict[RequestId, BatchedAttempt[Name]] = {}
        """Handed-off attempts that have ended and whose blocks are not released yet (rule 6). Other classes only read this dict."""
        self.context = 0  # number of prompt and answer tokens of all running attempts together
        self.steps = 0  # number of decode steps that were computed
        self.preempted = 0

    @property
    def waiting(self) -> int:
        """Number of attempts that wait for their admission: new ones, preempted ones, and those whose blocks are being fetched."""
        return len(self._waiting) + len(self._ready) + len(self._fetching)

    @property
    def wanted(self) -> bool:
        """True if an attempt waits for blocks or a batch place. Attempts whose blocks are reserved for a fetch do not count."""
        return bool(self._waiting)

    # Methods that add and end attempts:

    def submit(self, job: Job[Name]) -> None:
        """Add an attempt to the waiting ones; `plan` admits it in its turn (rule 1)."""
        self.attempts[job.attempt_id] = attempt = BatchedAttempt(job)
        self._arrivals += 1
        insort(self._waiting, (-job.priority, self._arrivals, attempt))

    def fetch(self, job: Job[Name]) -> int | None:
        """Add an attempt whose prompt blocks come from a prefill worker, and take blocks for its prompt.

        Returns:
            The number of blocks to fetch; the caller has to call `fetched` at the end of the fetch. Or None, if there is no room now
            and the attempt was not added.
        """
        attempt = BatchedAttempt(job, job.fetched_tokens, asked=True)
        if not self.blocks.reserve(attempt, self.blocks.leading(job.keys)):
            return None
        self.attempts[job.attempt_id] = self._fetching[job.attempt_id] = attempt
        return self.blocks.missing(attempt)

    def fetched(self, attempt_id: RequestId) -> BatchedAttempt[Name] | None:
        """Record the end of an attempt's fetch, and return the attempt, or None if the attempt was cancelled.

        The caller then sets `computed` in the attempt, and names the blocks that have arrived. The engine computes the other prompt tokens.
        """
        if (attempt := self._fetching.pop(attempt_id, None)) is not None:
            self._ready.append(attempt)
        return attempt

    def end(self, attempt: BatchedAttempt[Name]) -> None:
        """End an attempt that has generated all its tokens. Free its blocks, unless the attempt is handed off (rule 6)."""
        attempt_id = attempt.job.attempt_id
        del self.attempts[attempt_id]
        if attempt.job.handed_off:
            self.kept[attempt_id] = attempt
            self._leave_batch(attempt)
        else:
            self._stop(attempt)

    def release(self, attempt_id: RequestId) -> bool:
        """Free the blocks of a handed-off attempt that has ended. Return False if no blocks are kept for it."""
        if (attempt := self.kept.pop(attempt_id, None)) is None:
            return False
        self.blocks.free(attempt)
        return True

    def cancel(self, attempt_id: RequestId) -> bool:
        """Remove an attempt before its end, and free its blocks. Return False if the attempt is unknown or has ended."""
        if (attempt := self.attempts.pop(attempt_id, None)) is None:
            return False
        self._stop(attempt)
        self._fetching.pop(attempt_id, None)
        for queue in (self._ready, self._computing):
            if attempt in queue:
                queue.remove(attempt)
        self._waiting = [queued for queued in self._waiting if queued[2] is not attempt]
        return True

    def clear(self) -> None:
        """Forget all attempts and kept blocks, as if the process had died. The scheduler must not be used afterwards."""
        for queue in (self.attempts, self.kept, self._fetching, self._waiting, self._ready, self._computing):
            queue.clear()

    # Methods for the steps of the engine:

    def plan(self) -> StepPlan[Name] | None:
        """Admit waiting attempts (rules 1 and 2). Return the work of the next step, or None if there is nothing to compute."""
        self._admit()
        decodes = len(self.running)
        chunks: list[PromptChunk[Name]] = []
        tokens, pairs = 0, 0.0
        if self._computing:
            room = self._limits.step_tokens - decodes
            for attempt in self._computing:
                if room <= 0:
                    break
                count = min(room, attempt.prompt_tokens - attempt.computed)
                chunks.append((attempt, count))
                room -= count
                tokens += count
                pairs += count * (attempt.computed + 0.5 * count)
        return StepPlan(chunks, tokens, pairs, decodes, self.context) if chunks or decodes else None

    def advance(self, steps: int) -> int:
        """Record that `steps` decode steps were computed. Return the number of tokens that all running attempts have generated in them."""
        self.steps += steps
        tokens = len(self.running) * steps
        self.context += tokens
        return tokens

    def grow(self) -> Sequence[BatchedAttempt[Name]]:
        """Take blocks for the tokens of the next decode step. Return the attempts that were preempted to get blocks."""
        if not self._grows or self._grows[0][0] > self.steps:
            return ()
        preempted = []
        for attempt in self.due(self._grows):
            while not self.blocks.available:
                preempted.append(self._preempt())
                if preempted[-1] is attempt:
                    break
            else:
                self.blocks.grow(attempt)
                self._grow_later(attempt)
        return preempted

    def computed(self, attempt: BatchedAttempt[Name], tokens: int) -> bool:
        """Record that `tokens` prompt tokens of an attempt were computed. Return True if all its prompt tokens are computed now.

        The computation of the last prompt token also generates the next token of the answer. After a preemption, this token is not the
        first one of the answer. If the result is True, the caller has to call `join` or `end`.
        """
        attempt.computed += tokens
        if attempt.computed < attempt.prompt_tokens:
            return False
        self._computing.remove(attempt)
        attempt.generated += 1
        return True

    def join(self, attempt: BatchedAttempt[Name]) -> None:
        """Add an attempt whose prompt is complete to the running attempts."""
        self.running[attempt] = None
        attempt.begun_at = self.steps - attempt.generated
        self.context += attempt.job.prompt_tokens + attempt.generated
        self._grow_later(attempt)

    def generated(self, attempt: BatchedAttempt[Name]) -> int:
        """Return the number of tokens of an attempt's answer so far, whether the attempt is running or not."""
        return self.steps - attempt.begun_at if attempt in self.running else attempt.generated

    def schedule(self, heap: DueHeap[Name], attempt: BatchedAttempt[Name], generated: int) -> None:
        """Add a running attempt to a heap. The attempt is due at the decode step at which its answer has `generated` tokens."""
        heappush(heap, (attempt.begun_at + generated, attempt.admitted, attempt))

    def due(self, heap: DueHeap[Name]) -> Iterator[BatchedAttempt[Name]]:
        """Remove from a heap all entries that are due now, and yield their attempts. Skip attempts that have left the batch since (rule 4)."""
        while heap and heap[0][0] <= self.steps:
            _, admitted, attempt = heappop(heap)
            if attempt in self.running and attempt.admitted == admitted:
                yield attempt

    def steps_to(self, heap: DueHeap[Name]) -> int | None:
        """Return the number of steps until the first attempt of a heap is due; 0 or less if it is due now.

        Return None if no attempt of the heap is running.
        """
        while heap:
            due, admitted, attempt = heap[0]
            if attempt in self.running and attempt.admitted == admitted:
                return due - self.steps
            heappop(heap)
        return None

    def steps_to_growth(self) -> int | None:
        """Return the number of steps until a running attempt needs one more block.

        Return None if all running attempts end before they need another block.
        """
        return self.steps_to(self._grows)

    def _admit(self) -> None:
        """Admit the attempts whose fetch has ended, then the waiting ones in the order of rule 1, until there is no room for the next."""
        waiting, ready, computing = self._waiting, self._ready, self._computing
        if not waiting and not ready:
            return
        most = self._limits.max_running - len(self.running)
        while ready and len(computing) < most:
            self._begin(ready.popleft())
        while waiting and len(computing) < most:
            attempt = waiting[0][2]
            if self._may_admit is not None and not self._may_admit(attempt.job):
                return
            # The last token of the prompt has to be computed (rule 3), so the block that contains it is not taken from the cache.
            reusable = (attempt.prompt_tokens - 1) // self._limits.block_tokens
            if not self.blocks.reserve(attempt, min(self.blocks.leading(attempt.job.keys), reusable)):
                return
            del waiting[0]
            if self._supply is None or attempt.asked or not self._ask(attempt, self._supply):
                self._begin(attempt)

    def _begin(self, attempt: BatchedAttempt[Name]) -> None:
        attempt.computed = min(attempt.computed, attempt.prompt_tokens - 1)
        if attempt.cached is None:
            attempt.cached = attempt.computed
        self._admitted += 1
        attempt.admitted = self._admitted
        self._computing.append(attempt)

    def _ask(self, attempt: BatchedAttempt[Name], supply: BlockSupply[Name]) -> bool:
        """Ask the block supply how many tokens a fetch would bring, and begin the fetch. Return False if no block is worth fetching."""
        attempt.asked = True
        here = len(attempt.held)
        coming = supply.offer(attempt.job, here)
        if coming <= here * self._limits.block_tokens:
            return False
        attempt.coming = coming
        self._fetching[attempt.job.attempt_id] = attempt
        supply.fetch(attempt.job, here)
        return True

    def _grow_later(self, attempt: BatchedAttempt[Name]) -> None:
        """Schedule the step at which the attempt needs its next block, unless the attempt ends before that step."""
        generated = self.blocks.room(attempt) - attempt.job.prompt_tokens
        if generated < attempt.job.answer_tokens:
            self.schedule(self._grows, attempt, generated)

    def _preempt(self) -> BatchedAttempt[Name]:
        """Preempt the running attempt that was admitted last, and return it."""
        attempt = max(self.running, key=lambda each: each.admitted)
        self._stop(attempt)
        attempt.prompt_tokens = attempt.job.prompt_tokens + attempt.generated
        self.preempted += 1
        insort(self._waiting, (-attempt.job.priority, -self.preempted, attempt))
        return attempt

    def _leave_batch(self, attempt: BatchedAttempt[Name]) -> None:
        if attempt in self.running:
            attempt.generated = self.steps - attempt.begun_at
            del self.running[attempt]
            self.context -= attempt.job.prompt_tokens + attempt.generated

    def _stop(self, attempt: BatchedAttempt[Name]) -> None:
        """Remove an attempt from the batch and free its blocks."""
        self._leave_batch(attempt)
        self.blocks.free(attempt)

    def check(self) -> None:
        """Assert that counts and sums agree with the attempts, and that each running attempt has blocks for all its tokens."""
        self.blocks.check(sum(attempt.own for attempt in (*self.attempts.values(), *self.kept.values())))
        assert self.waiting + len(self._computing) + len(self.running) == len(self.attempts)
        assert len(self._computing) + len(self.running) <= self._limits.max_running
        assert not self.kept.keys() & self.attempts.keys()
        assert sum(attempt.job.prompt_tokens + self.generated(attempt) for attempt in self.running) == self.context
        for attempt in self.running:
            assert self.blocks.room(attempt) >= attempt.job.prompt_tokens + self.generated(attempt), attempt.job
