"""Continuous batching without time: which request gets a place, what the next step computes, and what it yields.

Rules:

1. Waiting requests are taken in order of priority, then arrival. A request is taken when the batch has a place and
   the pool has every block that the request may ever need, so that no request has to be preempted. While the first
   one cannot be taken, no other overtakes it.
2. A step decodes one token for each decoding request, and computes prompt tokens up to `max_batched_tokens`, in order
   of arrival in the batch (chunked prefill). A complete prompt yields its first token in that step.
3. A request holds its place, and the slot of its LoRA adapter, from admission to its end, loading and publishing
   included.
"""

from bisect import insort
from collections.abc import Iterator

from msgspec import Struct

from fleet.core.ids import RequestId
from fleet.core.work import LoadReport
from kvstore.block import BlockHash
from workers.engines.simulated.lora_slots import LoraSlots
from workers.engines.simulated.memory import BlockIndex, BlockMemory
from workers.engines.simulated.sequence import Sequence, SequenceSample, SequenceStage


class Chunk(Struct, frozen=True, kw_only=True):
    sequence: Sequence
    tokens: int


class StepPlan(Struct, frozen=True, kw_only=True):
    """The work of one step."""

    prefills: tuple[Chunk, ...]
    decodes: tuple[Sequence, ...]

    @property
    def empty(self) -> bool:
        return not self.prefills and not self.decodes


class StepOutcome(Struct, frozen=True, kw_only=True):
    """The result of a step for one request."""

    sequence: Sequence
    filled: list[tuple[BlockHash, BlockIndex]]
    sampled: SequenceSample | None


class Batch:
    """All requests of one engine."""

    def __init__(
        self, memory: BlockMemory, *, max_running: int, max_batched_tokens: int, adapters: LoraSlots | None = None
    ) -> None:
        self._memory = memory
        self.adapters = adapters or LoraSlots(0)
        self._max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        self._arrivals = 0
        self._waiting: list[tuple[int, int, Sequence]] = []  # (-priority, arrival, …), in order
        self._placed: dict[RequestId, Sequence] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._placed or any(
            queued.start.request_id == request_id for _, _, queued in self._waiting
        )

    @property
    def load(self) -> LoadReport:
        return LoadReport(
            running=len(self._placed),
            waiting=len(self._waiting),
            kv_blocks_used=self._memory.held,
            adapters=self.adapters.loaded,
        )

    def add(self, sequence: Sequence) -> None:
        insort(self._waiting, (-sequence.start.priority, self._arrivals, sequence))
        self._arrivals += 1

    def remove(self, request_id: RequestId) -> Sequence | None:
        """Remove a request in any stage and free what it holds; return None if it is unknown."""
        sequence = self._placed.pop(request_id, None)
        if sequence is not None:
            sequence.release()
            if sequence.start.adapter:
                self.adapters.release(sequence.start.adapter)
            return sequence
        for position, (_, _, queued) in enumerate(self._waiting):
            if queued.start.request_id == request_id:
                del self._waiting[position]
                queued.stage = SequenceStage.ENDED
                return queued
        return None

    def admit(self) -> Iterator[Sequence]:
        """Give places to the next requests; they hold the cached part of their prompt, and load next."""
        while self._waiting and len(self._placed) < self._max_running:
            _, _, sequence = self._waiting[0]
            adapter = sequence.start.adapter
            if adapter and not self.adapters.takes(adapter):
                return
            hits = self._memory.find(sequence.reusable_names)
            promised = sum(placed.reserve for placed in self._placed.values())
            room = self._memory.available - self._memory.idle_among(hits) - promised
            if sequence.most_blocks - len(hits) > room:
                return
            del self._waiting[0]
            self._memory.hold(hits)
            sequence.loads_adapter = bool(adapter) and self.adapters.hold(adapter)
            sequence.begin(hits)
            sequence.stage = SequenceStage.LOADING
            self._placed[sequence.start.request_id] = sequence
            yield sequence

    def plan(self) -> StepPlan:
        """Return the next step."""
        budget = self._max_batched_tokens
        prefills = []
        for sequence in self._placed.values():
            if sequence.stage is SequenceStage.PREFILLING and budget > 0:
                tokens = min(budget, sequence.missing_tokens)
                budget -= tokens
                prefills.append(Chunk(sequence=sequence, tokens=tokens))
        decodes = tuple(sequence for sequence in self._placed.values() if sequence.stage is SequenceStage.DECODING)
        return StepPlan(prefills=tuple(prefills), decodes=decodes)

    def perform(self, plan: StepPlan) -> Iterator[StepOutcome]:
        """Perform a planned step for the requests that have not been removed."""
        for sequence in plan.decodes:
            if sequence.stage is SequenceStage.DECODING:
                filled = sequence.compute(1)
                yield StepOutcome(sequence=sequence, filled=filled, sampled=sequence.sample())
        for chunk in plan.prefills:
            sequence = chunk.sequence
            if sequence.stage is SequenceStage.PREFILLING:
                filled = sequence.compute(chunk.tokens)
                done = not sequence.missing_tokens
                if done:
                    sequence.stage = SequenceStage.DECODING
                yield StepOutcome(sequence=sequence, filled=filled, sampled=sequence.sample() if done else None)

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        self._memory.check()
        self.adapters.check()
        assert len(self._placed) <= self._max_running
        assert sum(placed.reserve for placed in self._placed.values()) <= self._memory.available
        assert all(placed.stage not in (SequenceStage.WAITING, SequenceStage.ENDED) for placed in self._placed.values())
        assert all(queued.stage is SequenceStage.WAITING for _, _, queued in self._waiting)
