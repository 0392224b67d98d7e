"""Batch with real KV bytes: drives `fleet.batching.scheduler` step by step; the engine's loop times the steps.

Rules:

1. The scheduler decides which sequences are admitted and preempted, and what a step computes. This module computes the bytes and
   the tokens that follow from these decisions. A preempted sequence loses its bytes and computes them again.
2. After its admission, a sequence may have to wait for its LoRA adapter, or for blocks from the store or from another
   engine; `take_loads` returns such sequences.
3. A sequence has the slot of its LoRA adapter from its first admission until it is removed, also while it is preempted or its
   blocks are published.
4. A prefill keeps its blocks after its end, because they still have to be handed off. After that the caller calls `remove`.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many

from msgspec import Struct

from fleet.batching.attempts import BatchedAttempt, EngineLimits, Job
from fleet.batching.scheduler import BatchScheduler, StepPlan
from fleet.core.ids import RequestId
from fleet.core.requests import Source
from fleet.core.work import LoadReport
from kvstore.block import BlockHash
from workers.engines.simulated.lora_slots import LoraSlots
from workers.engines.simulated.memory import BlockMemory
from workers.engines.simulated.sequence import Sequence, SequenceSample


class StepOutcome(Struct, frozen=True, kw_only=True):
    """Holds what a step has done for one request: the blocks that became full, and the token that was sampled, if any."""

    sequence: Sequence
    filled: list[BlockHash]
    sampled: SequenceSample | None


class Batch:
    """Holds all requests of one engine, and computes their steps.

    Implements `fleet.batching.scheduler.BlockSupply`, by which the scheduler lets admitted sequences wait for blocks.
    """

    def __init__(
        self,
        limits: EngineLimits,
        *,
        adapters: LoraSlots | None = None,
        loads: Callable[[Sequence], bool] = lambda _: False,
    ) -> None:
        """Start without requests.

        `loads` returns True for a sequence that, once it is admitted, has to wait for blocks or a LoRA adapter (rule 2).
        """
        self._scheduler: BatchScheduler[BlockHash] = BatchScheduler(limits, self, self._has_slot)
        self._loads = loads
        self._loading: list[Sequence] = []
        self.adapters = adapters or LoraSlots(0)
        self.blocks = self._scheduler.blocks
        self.memory = BlockMemory(self.blocks)
        self.sequences: dict[RequestId, Sequence] = {}
        """Sequences that were added and not removed yet, by engine id; other classes only read this dict."""

    @property
    def load(self) -> LoadReport:
        return LoadReport(
            running=len(self._scheduler.attempts) - self._scheduler.waiting,
            waiting=self._scheduler.waiting,
            kv_blocks_used=self.blocks.used,
            adapters=self.adapters.loaded,
        )

    @property
    def preempted(self) -> int:
        return self._scheduler.preempted

    def add(self, sequence: Sequence) -> None:
        job = sequence.job
        self.sequences[job.attempt_id] = sequence
        self._scheduler.submit(job)

    def remove(self, request_id: RequestId) -> Sequence | None:
        """Remove a request, whatever it is doing, and free its blocks and its LoRA slot.

        Return its sequence; None if the request is unknown.
        """
        if (sequence := self.sequences.pop(request_id, None)) is None:
            return None
        if not self._scheduler.cancel(request_id):
            self._scheduler.release(request_id)
        if sequence.has_slot:
            self.adapters.release(sequence.start.adapter)
        return sequence

    # The methods for sequences that wait for blocks or for a LoRA adapter after their admission.

    def offer(self, job: Job[BlockHash], here: int) -> int:  # noqa: ARG002 - whether a sequence waits does not depend on the engine's own blocks
        """Return how many prompt tokens may be loaded for an admitted sequence; 0 if the sequence need not wait.

        Reserve the slot of the sequence's LoRA adapter.
        """
        sequence = self.sequences[job.attempt_id]
        if sequence.start.adapter:
            sequence.loads_adapter = self.adapters.hold(sequence.start.adapter)
            sequence.has_slot = True
        return job.prompt_tokens if self._loads(sequence) else 0

    def fetch(self, job: Job[BlockHash], here: int) -> None:
        """Note that the sequence of this job waits for its blocks or its LoRA adapter."""
        sequence = self.sequences[job.attempt_id]
        sequence.begin(self.memory.find(job.keys[:here]))
        self._loading.append(sequence)

    def take_loads(self) -> list[Sequence]:
        """Return the sequences that were admitted since the last call and that wait until the caller calls `accept`."""
        loading, self._loading = self._loading, []
        return loading

    def accept(
        self, sequence: Sequence, contents: Many[bytes], source: Source, origin: str, tiers: Mapping[str, int]
    ) -> bool:
        """Give a sequence the blocks that were loaded for it, so that it goes on.

        Return False if the sequence was removed meanwhile.
        """
        if self.sequences.get(sequence.start.request_id) is not sequence:
            return False
        attempt = self._scheduler.fetched(sequence.start.request_id)
        assert attempt is not None
        sequence.accept(contents, source, origin, tiers)
        attempt.computed = max(attempt.computed, sequence.computed)
        self._name(attempt, sequence)
        return True

    def name(self, sequence: Sequence) -> None:
        """Name all full blocks of an ended prefill, so that later requests can find the blocks while they are kept."""
        self._name(self._scheduler.kept[sequence.start.request_id], sequence)

    # The methods that compute steps.

    def plan(self) -> StepPlan[BlockHash] | None:
        """Return the plan of the next step; None if no admitted sequence has anything to compute now."""
        return self._scheduler.plan()

    def perform(self, plan: StepPlan[BlockHash]) -> Iterator[StepOutcome]:
        """Compute a planned step, and yield what it has done for each request; requests that were removed after the plan are skipped."""
        scheduler = self._scheduler
        self._grow()
        scheduler.advance(1)
        for attempt in list(scheduler.running):
            sequence = self.sequences[attempt.job.attempt_id]
            if filled := sequence.compute(1):
                self._name(attempt, sequence)
            drawn = sequence.sample()
            if drawn.finish is not None:
                self._end(attempt)
            yield StepOutcome(sequence=sequence, filled=filled, sampled=drawn)
        self._grow()
        for attempt, tokens in plan.chunks:
            if scheduler.attempts.get(attempt.job.attempt_id) is not attempt:
                continue  # the sequence was removed meanwhile
            sequence = self.sequences[attempt.job.attempt_id]
            if not sequence.computed:
                sequence.begin(self.memory.find(attempt.held))
            whole = scheduler.computed(attempt, tokens)
            if filled := sequence.compute(tokens):
                self._name(attempt, sequence)
            sampled = sequence.sample() if whole else None
            if sampled is not None and sampled.finish is None:
                scheduler.join(attempt)
            elif sampled is not None:
                self._end(attempt)
            yield StepOutcome(sequence=sequence, filled=filled, sampled=sampled)

    def _grow(self) -> None:
        for attempt in self._scheduler.grow():
            self.sequences[attempt.job.attempt_id].reset()

    def _end(self, attempt: BatchedAttempt[BlockHash]) -> None:
        self._scheduler.end(attempt)
        if not attempt.job.handed_off:
            self.remove(attempt.job.attempt_id)

    def _name(self, attempt: BatchedAttempt[BlockHash], sequence: Sequence) -> None:
        """Name the full blocks of a sequence, so that later requests can find them in the prefix cache."""
        known = len(attempt.held)
        self.blocks.name(attempt, list(sequence.blocks), sequence.computed)
        self.memory.publish(attempt.held[known:], sequence.blocks)

    def _has_slot(self, job: Job[BlockHash]) -> bool:
        """Return whether the job's attempt needs no LoRA slot, has a slot already, or could get one now."""
        sequence = self.sequences[job.attempt_id]
        return not sequence.start.adapter or sequence.has_slot or self.adapters.takes(sequence.start.adapter)

    def check(self) -> None:
        """Assert the invariants of the batch, which hold between two calls; for tests."""
        self._scheduler.check()
        self.memory.check()
        self.adapters.check()
        assert self.sequences.keys() == self._scheduler.attempts.keys() | self._scheduler.kept.keys()
