"""Simulated engine: the loop that runs its steps, and the methods of the engine port.

A request passes these stages: `submit` -> waiting -> admission, with a place in the batch and blocks -> load from the store or
the prefill engine -> prefill -> decode -> end. One loop drives the batch in real time. Loads and publications are separate
tasks, so that no other request waits for them. `batch` computes the steps, and a step takes as long as the latency model of the
settings says (`fleet.hardware.latency.linear`). The tokens come from `model`, or from `scripts`.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Never, assert_never

import msgspec
import numpy as np

from fleet.batching.attempts import EngineLimits
from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import TOKEN_BYTES, Finish, Source
from fleet.core.roles import KvPath, Phase
from fleet.core.system_clock import SystemClock
from fleet.core.work import AttemptTimes, Handoff, KvEvent, LoadReport, Progress, Rejected, Start
from kvstore.block import BlockHash
from kvstore.tracing.context import call_trace
from workers.acceptance import field_beyond_vocabulary
from workers.engines.debugger import is_traced
from workers.engines.simulated.batch import Batch, StepOutcome
from workers.engines.simulated.direct_transfer import BlockLending, DirectParams, borrow
from workers.engines.simulated.layout import EngineLayout
from workers.engines.simulated.lora_slots import LoraSlots
from workers.engines.simulated.model import SimulatedModel
from workers.engines.simulated.scripts import ScriptWriter
from workers.engines.simulated.sequence import Sequence as Running
from workers.engines.simulated.sequence import SequenceContext
from workers.engines.simulated.store import SimulatedStore
from workers.ports import EngineDied, EngineFacts, EngineOutput, Pulse, facts_with_store
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

OUTPUTS = 64  # maximum number of steps whose outputs wait for the server; with more, the engine's loop waits
HANG_SECONDS = 0.05  # seconds between two checks whether the file `hang_file` still exists
CATCH_UP_SECONDS = 0.02  # after steps that end late, later steps are shorter, to make up for at most this delay
NO_WORKER = WorkerId("")  # placeholder, which the server replaces by the worker's id


class SimulatedEngine:
    """Runs requests with the simulated model. Implements `workers.ports.Engine`; made by `workers.engines.simulated.launch`."""

    def __init__(
        self,
        settings: WorkerSettings,
        facts: EngineFacts,
        model: SimulatedModel,
        layout: EngineLayout,
        *,
        store: SimulatedStore | None = None,
        writer: ScriptWriter | None = None,
    ) -> None:
        simulated = settings.simulated
        self._settings = simulated
        self._facts = facts if store is None else facts_with_store(facts, settings.kv_paths, store.store_id)
        self._kv_paths = settings.kv_paths
        self.store = store
        self._wake = asyncio.Event()
        self._shape = SequenceContext(
            model=model,
            layout=layout,
            block_tokens=facts.block_tokens,
            max_model_len=facts.max_model_len,
            adapters={adapter.name: adapter.identity for adapter in facts.adapters},
            writer=writer,
        )
        limits = EngineLimits(
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            max_running=facts.max_running,
            step_tokens=simulated.max_batched_tokens,
        )
        self.batch = Batch(limits, adapters=LoraSlots(facts.adapter_slots), loads=self._loads)
        self.memory = self.batch.memory
        lease = Nanos(simulated.direct_lease_ms * MILLISECOND)
        self.lending = BlockLending(self.batch.blocks, lease, on_end=self._wake.set)
        # Limits the loads at a time to the maximum number of running requests. A further load waits here, and its time limit begins
        # only after this wait.
        self._transfers = asyncio.Semaphore(facts.max_running)
        self._adapters_loading: dict[str, asyncio.Event] = {}
        # Outputs that the loop still has to put into `_outputs`: tokens of the latest step, and ends of requests.
        self._ended: list[Progress | Rejected] = []
        self._outputs: asyncio.Queue[EngineOutput | EngineDied] = asyncio.Queue(OUTPUTS)
        self._cache_changed = asyncio.Event()
        self._due = 0.0  # time at which the latest step should end by the latency model
        self._steps = 0  # number of steps that the engine has begun since its start
        self._step_tokens = 0  # number of prompt and answer tokens that the latest step computes
        self._waits = True  # True while the loop waits for requests or for blocks
        self._unscheduled: set[RequestId] = set()  # traced attempts that wait for their first step

    # The methods of the engine port.

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's description. It has the store's id from the first answer of the store node on."""
        if self.store is not None and self.store.store_id != self._facts.store_id:
            self._facts = facts_with_store(self._facts, self._kv_paths, self.store.store_id)
        return self._facts

    def submit(self, start: Start) -> None:
        if (field_and_fault := self._fault(start)) is not None:
            self._reject(start, Reason.INVALID_ARGUMENT, *field_and_fault)
            return
        try:
            sequence = Running(start, self._shape)
        except ValueError as error:
            of_tools = start.parsing is not None and start.parsing.tools
            self._reject(start, Reason.INVALID_ARGUMENT, "chat.tools" if of_tools else "sampling.form", str(error))
            return
        if sequence.has_ended and not _draws_anew(start):
            self._ended.append(Progress(request_id=start.request_id, finish=Finish.STOP))
            self._wake.set()
            return
        if (needed := sequence.most_blocks) > self._facts.kv_blocks:
            fault = f"needs {needed} blocks of KV, this engine has {self._facts.kv_blocks}"
            self._reject(start, Reason.TOO_LARGE, "tokens", fault)
            return
        self.batch.add(sequence)
        if start.trace is not None:
            self._unscheduled.add(start.request_id)
        self._wake.set()

    def cancel(self, request_id: RequestId) -> None:
        self._unscheduled.discard(request_id)
        if self.batch.remove(request_id) is not None:
            self._ended.append(Progress(request_id=request_id, finish=Finish.CANCELLED))
            self._wake.set()

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        while True:
            output = await self._outputs.get()
            if isinstance(output, EngineDied):
                raise output
            yield output

    async def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        while True:
            await self._cache_changed.wait()
            self._cache_changed.clear()
            if events := self.memory.take_events():
                yield events

    def load(self) -> LoadReport:
        return self.batch.load

    def pulses(self) -> Sequence[Pulse]:
        return (Pulse(steps=self._steps, tokens=self._step_tokens, working=not self._waits),)

    def traced(self) -> bool:
        return is_traced([os.getpid()])

    def kill(self) -> None:
        """Do nothing: the engine has no processes to kill, and its task ends when its context is left."""

    @property
    def lent(self) -> int:
        return self.lending.leases

    async def save(self, names: Sequence[BlockHash], within: Nanos) -> int:
        """Write those of the named blocks that are in the engine's cache to the store. Return how many of them it did not have.

        Return 0 if there is no store, or if the write takes longer than `within`.

        Implements `workers.ports.BlockSaver.save`.
        """
        if self.store is None:
            return 0
        blocks = {name: bytes(found[0]) for name in names if (found := self.memory.find([name]))}
        return await self.store.publish(blocks, within)

    def check(self) -> None:
        """Assert the invariants of the batch and its memory; for tests."""
        self.batch.check()

    # The loop that runs the steps.

    async def run(self) -> None:
        """Run steps until cancelled. If anything fails, `outputs` raises `EngineDied`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.store is not None:
                    deadline = Nanos(self._settings.publish_timeout_ms * MILLISECOND)
                    tasks.create_task(self.store.run(deadline), name="store writer")
                await self._loop(tasks)
        except Exception as error:  # supervisor: any failure ends the engine, and `outputs` raises it as `EngineDied`
            log.exception("simulated engine failed")
            while self._outputs.full():
                self._outputs.get_nowait()
            self._outputs.put_nowait(EngineDied(str(error)))

    async def _loop(self, tasks: asyncio.TaskGroup) -> Never:
        clock = asyncio.get_running_loop()
        self._due, self._waits = clock.time(), False
        while True:
            plan = self.batch.plan()
            for sequence in self.batch.take_loads():
                tasks.create_task(self._fetch(sequence), name=f"fetch {sequence.start.request_id}")
            if plan is not None:
                if self._unscheduled:
                    for attempt, _ in plan.chunks:
                        self._note_scheduled(self.batch.sequences[attempt.job.attempt_id])
                self._steps += 1
                self._step_tokens = plan.prompt_tokens + plan.decodes
                await self._hang()
                await self._wait_for_step(
                    self._settings.latency.seconds(plan.prompt_tokens, plan.prompt_pairs, plan.decodes, plan.context)
                )
                for advanced in self.batch.perform(plan):
                    self._conclude(advanced, tasks)
            if self.memory.changed():
                self._cache_changed.set()
            if self._ended:
                ended, self._ended = self._ended, []
                await self._outputs.put(ended)
            elif plan is None:
                self._wake.clear()
                self._waits = True
                await self._wake.wait()
                self._waits = False
                self._due = clock.time()

    def _note_scheduled(self, sequence: Running) -> None:
        """Note the time at which the engine begins with an attempt, if the attempt is traced."""
        if sequence.start.request_id in self._unscheduled:
            self._unscheduled.discard(sequence.start.request_id)
            sequence.times = AttemptTimes(scheduled=SystemClock.now())

    async def _hang(self) -> None:
        """Make no progress while the file `hang_file` exists, a fault for tests."""
        if not self._settings.hang_file:
            return
        fault = Path(self._settings.hang_file)
        while await asyncio.to_thread(fault.exists):  # noqa: ASYNC110 - polling, because the removal of a file sends no signal
            await asyncio.sleep(HANG_SECONDS)

    async def _wait_for_step(self, seconds: float) -> None:
        """Wait for the modelled duration of a step, less the delay of earlier steps that ended late (at most `CATCH_UP_SECONDS`)."""
        clock = asyncio.get_running_loop()
        self._due = max(self._due, clock.time() - CATCH_UP_SECONDS) + seconds / self._settings.speedup
        await asyncio.sleep(max(0.0, self._due - clock.time()))

    def _conclude(self, advanced: StepOutcome, tasks: asyncio.TaskGroup) -> None:
        """Offer a request's new full blocks to the store, and queue the output of the step for it. An ended prefill is handed off first."""
        sequence, sampled = advanced.sequence, advanced.sampled
        self._offer(advanced)
        if sampled is None:
            return
        request_id = sequence.start.request_id
        if (pooling := sequence.start.pooling) is not None:
            vector = self._shape.model.vector(sequence.start.tokens, pooling, self._settings.vector_size)
            self._ended.append(
                Progress(
                    request_id=request_id,
                    finish=Finish.STOP,
                    kv=sequence.report(),
                    times=sequence.times,
                    vector=vector,
                )
            )
            return
        if sequence.start.phase is Phase.PREFILL:
            last = Progress(
                request_id=request_id,
                token_ids=(sampled.token,),
                logprobs=sampled.logprobs,
                finish=sampled.finish,
                kv=sequence.report(),
                times=sequence.times,
            )
            tasks.create_task(self._hand_off(sequence, last), name=f"hand off {request_id}")
            return
        self._ended.append(
            Progress(
                request_id=request_id,
                token_ids=(sampled.token,),
                logprobs=sampled.logprobs,
                finish=sampled.finish,
                kv=sequence.report() if sampled.finish is not None or sequence.generated == 1 else None,
                prompt_logprobs=sequence.prompt_logprobs() if sequence.generated == 1 else (),
                times=sequence.times,
            )
        )

    # The methods that load and publish blocks.

    def _loads(self, sequence: Running) -> bool:
        """Return whether a sequence waits for `_fetch`: it has a LoRA adapter, or the store or a prefill engine may have its blocks."""
        start = sequence.start
        return bool(start.adapter) or self.store is not None or _is_direct(start.handoff)

    async def _fetch(self, sequence: Running) -> None:
        """Load the LoRA adapter, and fetch the prompt's blocks that the store or the prefill engine has.

        The engine computes the blocks that neither of them has.
        """
        if sequence.start.adapter:
            await self._load_adapter(sequence.start.adapter, first=sequence.loads_adapter)
        async with self._transfers:
            await self._fetch_blocks(sequence)

    async def _fetch_blocks(self, sequence: Running) -> None:
        start = sequence.start
        self._note_scheduled(sequence)
        names = sequence.reusable_names[len(sequence.blocks) :]
        clock = asyncio.get_running_loop()
        began, transfer_began = clock.time(), SystemClock.now()
        blocks: list[bytes] = []
        tiers: dict[str, int] = {}
        source, origin = Source.STORE, ""
        deadline = Nanos(self._settings.load_timeout_ms * MILLISECOND)
        if start.handoff is not None and _is_direct(start.handoff):
            source, origin = Source.DIRECT, start.handoff.prefill_worker
            blocks = await self._borrow(start.handoff, names, deadline)
        elif self.store is not None:
            origin = self.store.store_id or ""
            loaded = await self.store.load(names, deadline, call_trace(start.trace))
            blocks, tiers = loaded.blocks, loaded.tiers
        if blocks:  # wait, so that the transfer takes at least the time of the latency model
            modelled = self._settings.latency.transfer_ms(sum(map(len, blocks))) / 1000 / self._settings.speedup
            await asyncio.sleep(max(0.0, began + modelled - clock.time()))
        if (times := sequence.times) is not None and names:
            sequence.times = msgspec.structs.replace(
                times, transfer_began=transfer_began, transfer_ended=SystemClock.now()
            )
        if self.batch.accept(sequence, blocks, source, origin, tiers):
            self._wake.set()

    async def _load_adapter(self, name: str, *, first: bool) -> None:
        """Wait until a LoRA adapter is loaded.

        The request with `first` loads the adapter; further requests that need it meanwhile wait for this load.
        """
        if first:
            loading = self._adapters_loading[name] = asyncio.Event()
            await asyncio.sleep(self._settings.adapter_load_ms / 1000 / self._settings.speedup)
            loading.set()
            if self._adapters_loading.get(name) is loading:
                del self._adapters_loading[name]
        elif (under_way := self._adapters_loading.get(name)) is not None:
            await under_way.wait()

    async def _borrow(self, handoff: Handoff, names: Sequence[BlockHash], deadline: Nanos) -> list[bytes]:
        try:
            params = msgspec.json.decode(handoff.params, type=DirectParams)
        except msgspec.DecodeError as error:
            log.warning("handoff unreadable", extra={"prefill": handoff.prefill_worker, "cause": str(error)})
            return []
        if not params.lease:
            return []
        return await borrow(params, names, block_bytes=self._shape.model.block_bytes, deadline=deadline)

    async def _hand_off(self, sequence: Running, last: Progress) -> None:
        """Put the prompt's blocks where the decode worker can fetch them, then end the prefill."""
        start = sequence.start
        assert start.kv_path is not None, "the worker refuses prefill work without a path"
        if start.kv_path is KvPath.STORE:
            await self._publish(sequence, {name: bytes(content) for name, content in sequence.blocks.items()})
        if self.batch.sequences.get(start.request_id) is not sequence:
            return  # the request was cancelled before this task began, or while the blocks were published
        match start.kv_path:
            case KvPath.STORE:
                params = b"{}"
            case KvPath.DIRECT:
                self.batch.name(sequence)
                lease = self.lending.lend(sequence.blocks) if sequence.blocks else ""
                params = msgspec.json.encode(DirectParams(address=self.lending.address, lease=lease))
            case _:
                assert_never(start.kv_path)
        self.batch.remove(start.request_id)
        handoff = Handoff(
            kv_path=start.kv_path,
            prefill_worker=NO_WORKER,
            fingerprint=self._facts.fingerprint,
            num_tokens=len(sequence.blocks) * self._facts.block_tokens,
            params=params,
            kv=self._facts.kv,
        )
        self._ended.append(msgspec.structs.replace(last, handoff=handoff))
        self._wake.set()

    async def _publish(self, sequence: Running, blocks: Mapping[BlockHash, bytes]) -> None:
        if self.store is None:
            return
        within = Nanos(self._settings.publish_timeout_ms * MILLISECOND)
        published = await self.store.publish(blocks, within, call_trace(sequence.start.trace))
        log.debug("blocks published", extra={"request": sequence.start.request_id, "blocks": published})

    def _offer(self, advanced: StepOutcome) -> None:
        """Write new full blocks to the store in the background, except those that `_hand_off` writes anyway."""
        start = advanced.sequence.start
        if self.store is None or (start.phase is Phase.PREFILL and start.kv_path is KvPath.STORE):
            return
        for name in advanced.filled:
            self.store.offer(name, bytes(advanced.sequence.blocks[name]))

    def _fault(self, start: Start) -> tuple[str, str] | None:
        """Return the invalid field of an attempt and the reason; None if this engine can run the attempt."""
        if start.adapter and start.adapter not in self._shape.adapters:
            return "adapter", f"this engine does not have {start.adapter!r}"
        if start.request_id in self.batch.sequences:
            return "request_id", f"{start.request_id} runs already"
        if not start.tokens or len(start.tokens) % TOKEN_BYTES:
            return "tokens", f"{len(start.tokens)} bytes; at least one id of {TOKEN_BYTES} bytes is needed"
        if start.sampling.form is not None and self._shape.writer is None:
            return (
                "sampling.form",
                "without a tokenizer, a simulated engine supports no structured output; leave it out",
            )
        if (field := field_beyond_vocabulary(start.sampling, self._shape.model.vocab_size)) is not None:
            return f"sampling.{field}", f"a token is not in the vocabulary of {self._shape.model.vocab_size}"
        highest = int(np.frombuffer(start.tokens, dtype="<u4").max())
        if highest >= self._shape.model.vocab_size:
            return "tokens", f"{highest} is not in the vocabulary of {self._shape.model.vocab_size}"
        if start.pooling is not None and start.pooling.dimensions > self._settings.vector_size:
            return (
                "pooling.dimensions",
                f"{start.pooling.dimensions} is more than the model's {self._settings.vector_size}",
            )
        if start.pooling is None and len(start.tokens) // TOKEN_BYTES >= self._facts.max_model_len:
            return "tokens", f"leave no room for an answer within {self._facts.max_model_len} tokens"
        return None

    def _reject(self, start: Start, reason: Reason, field: str, fault: str) -> None:
        self._ended.append(
            Rejected(request_id=start.request_id, reason=reason, message=f"{field}: {fault}", field=field)
        )
        self._wake.set()


def _is_direct(handoff: Handoff | None) -> bool:
    return handoff is not None and handoff.kv_path is KvPath.DIRECT


def _draws_anew(start: Start) -> bool:
    """Return whether the decode engine samples the first token again, so that only the decode engine can end the answer."""
    return start.phase is Phase.PREFILL and start.kv_path is KvPath.DIRECT and start.sampling.temperature != 0
