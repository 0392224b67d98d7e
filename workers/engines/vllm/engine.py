"""vLLM embedded in the worker's process: our `Engine` over its `AsyncLLM`. A translation and nothing more.

vLLM runs its scheduler and its model in processes of their own and starts them by spawning, so the program that calls
`open_engine` needs the `if __name__ == "__main__"` guard.
"""

import asyncio
import gc
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet.backends.kv_events.health import NEVER, EventHealth, KvEventAlert
from fleet.backends.kv_events.stream import EventStreamCounters, read_events
from fleet.backends.kv_events.translator import KvEventTranslator
from fleet.core.clock import Nanos
from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.ids import RequestId, StoreId
from fleet.core.requests import TOKEN_BYTES, Finish, KvReport
from fleet.core.roles import KvPath, Phase
from fleet.core.work import KvEvent, LoadReport, Progress, Rejected, Start
from kvstore.block import HashAlgorithm, blocks_for
from kvstore.client.store_client import StoreClient
from kvstore.errors import StoreError
from kvstore.layouts.fingerprint import describe
from kvstore.namespace import KvNamespace
from workers.acceptance import refusal
from workers.engines.debugger import is_traced
from workers.engines.novel_work import NovelWork
from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm import parallelism as vllm_spread
from workers.engines.vllm import requests as vllm_requests
from workers.engines.vllm.headless_rank import open_rank
from workers.engines.vllm.launch import available
from workers.engines.vllm.lora import AdapterFiles, LoadedAdapters, adapters_of, lora_request
from workers.engines.vllm.namespace import namespace_of, weights_revision
from workers.engines.vllm.step_counter import StepReader, step_file
from workers.engines.vllm.store_planner import PromptBlockCounts
from workers.ports import Engine, EngineDied, EngineFacts, EngineOutput, Pulse, facts_with_store
from workers.settings import WorkerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import PrefillStats

__all__ = ["available", "open_engine", "open_rank"]

log = logging.getLogger(__name__)

STORE_SECONDS = 10.0  # how long a start waits for the KV store node, which may be starting as well
HEALTH_SECONDS = 0.5  # a dead engine with work in flight says so at once; an idle one is asked this often


@asynccontextmanager
async def open_engine(settings: WorkerSettings) -> AsyncIterator[Engine]:
    """Start vLLM; ready after 15 to 30 s on CPUs.

    Raises:
        ConfigurationRefused: Names the setting that vLLM cannot work with; nothing was started.
        EngineDied: vLLM ended while starting; the cause is in its log, above.
    """
    vllm_launch.check(settings)
    scratch = Path(tempfile.mkdtemp(prefix="fleet-vllm-"))
    try:
        vllm_launch.prepare_environment(settings, scratch)
        llm, facts, block_bytes, awaited = await _start(settings, scratch)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine = VllmEngine(llm, facts, settings, block_bytes, scratch, tasks, awaited)
                watch = tasks.create_task(engine.watch())
                yield engine
                watch.cancel()
                engine.stop()
        finally:
            if awaited is not None:
                await asyncio.to_thread(awaited.close)
            await asyncio.to_thread(_stop, llm)
            del llm, engine
            gc.collect()  # its finaliser would run when the interpreter ends, and fail there
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def _start(settings: WorkerSettings, scratch: Path) -> "Started":
    await asyncio.to_thread(_import_vllm)
    starting = asyncio.ensure_future(  # noqa: TID251 - owned by the next lines, which never leave it behind
        asyncio.to_thread(_start_blocking, settings, scratch)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # vLLM cannot be interrupted while it starts, and must not be left behind. Without its processes it gives up, which may take
        # minutes otherwise, and if a rank of a group is gone, for ever; where it has none, it ends as soon as it has started.
        while not starting.done():
            vllm_launch.end_processes()
            await asyncio.wait([starting], timeout=HEALTH_SECONDS)
        with suppress(EngineDied, ConfigurationRefused):
            llm, _, _, awaited = await starting
            if awaited is not None:
                await asyncio.to_thread(awaited.close)
            await asyncio.to_thread(_stop, llm)
        raise


def _import_vllm() -> None:
    """Apart from the start: vLLM keeps tracebacks of its imports, and with them whatever their callers hold."""
    import vllm.v1.engine.async_llm  # noqa: F401, PLC0415 - takes seconds, and only this worker needs it

    vllm_launch.end_quickly()


def _start_blocking(settings: WorkerSettings, scratch: Path) -> "Started":
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - loaded by now

    revision = weights_revision(Path(settings.model_dir))
    config = _configure(settings, revision, scratch)
    if settings.store:
        vllm_launch.check_model(config)
    namespace = namespace_of(config, model=settings.model, revision=revision)
    # Of a head, each in a rank's memory of its own.
    replicas = max(1, vllm_launch.ranks_of(settings) // max(namespace.kv_heads, 1))
    vllm_launch.check_cache(settings, namespace.block_bytes * replicas)
    store_id, awaited = _meet_store(settings, namespace) if settings.store else (None, None)
    try:
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except (RuntimeError, ValueError) as error:
        if awaited is not None:
            awaited.close()
        raise EngineDied(f"vLLM did not start: {error}") from error
    facts = EngineFacts(
        name=f"vllm {vllm_launch.version()}",
        model=settings.model,
        block_tokens=namespace.block_tokens,
        max_model_len=config.model_config.max_model_len,
        kv_blocks=config.cache_config.num_gpu_blocks or 0,
        max_running=config.scheduler_config.max_num_seqs * vllm_spread.engines(settings),
        fingerprint=namespace.fingerprint,
        kv_paths=settings.kv_paths,
        kv=describe(namespace, tp=1 if config.model_config.use_mla else config.parallel_config.tensor_parallel_size),
        keeps_forms=settings.vllm.keeps_forms,
        adapters=adapters_of(settings),
        adapter_slots=settings.adapter_slots if settings.adapters else 0,
    )
    return llm, facts_with_store(facts, settings.kv_paths, store_id), namespace.block_bytes, awaited


def _stop(llm: "AsyncLLM") -> None:
    if llm.output_handler is not None:  # it would take the end of the engine for a failure
        llm.output_handler.get_loop().call_soon_threadsafe(llm.output_handler.cancel)
    llm.shutdown()


def _configure(settings: WorkerSettings, revision: str, scratch: Path) -> "VllmConfig":
    args = vllm_launch.engine_args(settings, revision=revision, scratch=scratch)
    try:
        return args.create_engine_config()
    except (RuntimeError, ValueError) as error:
        raise ConfigurationRefused(f"vllm: {error}") from error


def _meet_store(settings: WorkerSettings, namespace: KvNamespace) -> "tuple[StoreId | None, StoreClient | None]":
    """Return who the store node is; where it does not answer yet, the client that joins it as soon as it does.

    vLLM's own processes have clients of their own, which join by themselves too (`vllm_connector`).

    Raises:
        ConfigurationRefused: The node answers, and cannot hold these blocks.
    """
    try:
        client = StoreClient.join(
            settings.store, namespace, wait_seconds=STORE_SECONDS, credentials=settings.store_credentials
        )
    except StoreError as error:
        raise ConfigurationRefused(f"store: {error}") from error
    if not client.joined:
        log.warning("the store node does not answer, starting without it", extra={"address": settings.store})
        return None, client
    with client:
        if not _can_share(client, settings):
            ranks = vllm_launch.ranks_of(settings)
            raise ConfigurationRefused(
                f"store: {ranks} ranks write a block together, in the store node's memory; they need a node on this host"
                f" that offers it (shm_socket), and reach this one by {client.path}"
            )
        return StoreId(client.store_id), None


def _can_share(client: StoreClient, settings: WorkerSettings) -> bool:
    """Return whether all ranks of this engine can write to the node that has answered."""
    return vllm_launch.ranks_of(settings) == 1 or client.writes_shards


Started = tuple["AsyncLLM", EngineFacts, int, StoreClient | None]
"""vLLM, what it is, bytes of a block, and the client that joins a store node which did not answer; None: none is awaited."""


class _InFlight:
    """A request that vLLM is working on."""

    def __init__(self, start: Start):
        self.start = start
        self.generated = 0
        self.cancelled = False


class VllmEngine:
    """`Engine` over a started `AsyncLLM`; made by `open_engine`."""

    def __init__(
        self,
        llm: "AsyncLLM",
        facts: EngineFacts,
        settings: WorkerSettings,
        block_bytes: int,
        scratch: Path,
        tasks: asyncio.TaskGroup,
        awaited: StoreClient | None = None,
    ):
        self._llm = llm
        self._awaited = awaited
        self._facts = facts
        self._settings = settings
        self._adapters = LoadedAdapters(self._facts.adapter_slots)
        self._adapter_files = AdapterFiles(settings)
        self._role = settings.role
        self._block_bytes = block_bytes
        self._scratch = scratch
        self._tasks = tasks
        self._vocab_size = llm.model_config.get_vocab_size()
        self._requests: dict[RequestId, _InFlight] = {}
        self._step: list[Progress | Rejected] = []  # of this turn of the event loop
        self._steps: deque[EngineOutput] = deque()  # bounded by what the requests in flight may generate
        self._arrived = asyncio.Event()
        self._dead: str | None = None
        self._lent_until: deque[float] = deque()  # by the event loop's clock; bounded by hand-offs in a lease
        self._prefilled = _keep_prefill_stats(llm)
        self._novel = NovelWork()
        self._counters = _step_readers(scratch, vllm_spread.engines(settings))

    @property
    def facts(self) -> EngineFacts:
        """Return what the engine says of itself: with the store from when a node that was awaited has answered."""
        if self._awaited is not None and self._awaited.joined:
            client, self._awaited = self._awaited, None
            if _can_share(client, self._settings):
                store_id = StoreId(client.store_id)
                self._facts = facts_with_store(self._facts, self._settings.kv_paths, store_id)
            else:
                log.error("the store node offers no shared memory, which several ranks need; going on without it")
            client.close()
        return self._facts

    def submit(self, start: Start) -> None:
        rejected = self._unfit(start)
        if rejected is not None:
            self._tell(rejected)
            return
        request = _InFlight(start)
        self._requests[start.request_id] = request
        self._tasks.create_task(self._serve(request))

    def cancel(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        self._tasks.create_task(self._abort(request_id))

    async def outputs(self) -> AsyncIterator[EngineOutput]:
        while True:
            while self._steps:
                yield self._steps.popleft()
            if self._dead is not None:
                raise EngineDied(self._dead)
            self._arrived.clear()
            await self._arrived.wait()

    async def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        if not vllm_launch.tells_events(self._settings):
            await asyncio.Event().wait()  # for ever: routers take its cache for empty
        books = KvEventTranslator(
            block_tokens=self._facts.block_tokens,
            algorithm=HashAlgorithm.SHA256_128,
            capacity=self._facts.kv_blocks,
        )
        endpoint = vllm_launch.events_endpoint(self._scratch)
        heard = EventStreamCounters()
        health = EventHealth(books, heard, NEVER)
        told: KvEventAlert | None = None
        async for events in read_events(endpoint, vllm_launch.replay_endpoint(self._scratch), books, heard):
            if events:
                yield events
            if (alert := health.alert(Nanos(0))) is not told:
                told = alert
                if alert is not None:
                    log.error(
                        "vLLM's KV events are of no use; routers take its cache for empty", extra={"alert": alert}
                    )

    def load(self) -> LoadReport:
        """Counted here: as many as fit the batch run, the rest waits; blocks that requests share count for each."""
        held = sum(
            blocks_for(len(request.start.tokens) // TOKEN_BYTES + request.generated, self._facts.block_tokens)
            for request in self._requests.values()
        )
        running = min(len(self._requests), self._facts.max_running)
        return LoadReport(
            running=running,
            waiting=len(self._requests) - running,
            kv_blocks_used=min(held, self._facts.kv_blocks),
            adapters=self._adapters.names,
        )

    def pulses(self) -> Sequence[Pulse]:
        novel = bool(self._novel)
        return [
            reader.pulse(working=self._is_working(engine), novel=novel) for engine, reader in self._counters.items()
        ]

    def traced(self) -> bool:
        return is_traced([os.getpid(), *(process.pid for process in vllm_launch.family())])

    def kill(self) -> None:
        vllm_launch.kill_family()
        self._die()

    @property
    def lent(self) -> int:
        """Those whose lease may still run: vLLM tells nobody outside of its own processes that blocks were fetched."""
        now = asyncio.get_running_loop().time()
        while self._lent_until and self._lent_until[0] <= now:
            self._lent_until.popleft()
        return len(self._lent_until)

    async def watch(self) -> None:
        """Notice an engine that died while nothing was in flight."""
        while self._dead is None:
            await asyncio.sleep(HEALTH_SECONDS)
            if self._llm.errored:
                self._die()

    def stop(self) -> None:
        """Cancel what is in flight; its tasks end by themselves."""
        for request_id in list(self._requests):
            self.cancel(request_id)

    def _is_working(self, engine: int) -> bool:
        """True if one of vLLM's engines holds requests; where there are several, vLLM's client says which one has which."""
        client = self._llm.engine_core
        if (held := getattr(client, "engine_inflight", None)) is None:
            return bool(self._requests)
        return bool(held[client.core_engines[engine]])

    def _unfit(self, start: Start) -> Rejected | None:
        if (rejected := refusal(start, self._role, self._facts)) is not None:
            return rejected
        if start.request_id in self._requests:
            return _rejected(start, Reason.INVALID_ARGUMENT, "request_id", "is in use")
        if int(np.frombuffer(start.tokens, dtype="<u4").max()) >= self._vocab_size:
            # Such a token would end the engine, not only the request.
            return _rejected(start, Reason.INVALID_ARGUMENT, "tokens", f"the vocabulary has {self._vocab_size} tokens")
        if start.adapter and not self._adapter_files.are_as_described(start.adapter):
            return _rejected(start, Reason.NO_WORKER, "adapter", f"the files of {start.adapter!r} have changed here")
        return None

    async def _serve(self, request: _InFlight) -> None:
        """Run one request to its end."""
        from vllm.exceptions import VLLMClientError, VLLMError  # noqa: PLC0415 - loaded by now
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        start = request.start
        try:
            if request.cancelled:
                self._tell(Progress(request_id=start.request_id, finish=Finish.CANCELLED))
                return
            await self._generate(request)
        except EngineDeadError:
            self._die()
        except (VLLMClientError, ValueError) as error:  # its two kinds of validation
            # What else could be wrong with its sampling, the router has looked at.
            field = "sampling" if start.sampling.form is None else "sampling.form"
            self._tell(_rejected(start, Reason.INVALID_ARGUMENT, field, str(error)))
        except VLLMError as error:
            log.exception("vLLM gave a request up", extra={"request": start.request_id})
            self._tell(_rejected(start, Reason.INTERNAL, "", f"the engine gave up: {error}"))
        finally:
            del self._requests[start.request_id]
            self._novel.ended(start.request_id)
            self._prefilled.pop(start.request_id, None)

    async def _generate(self, request: _InFlight) -> None:
        from vllm.inputs import tokens_input  # noqa: PLC0415 - loaded by now

        start = request.start
        params = vllm_requests.sampling_params(start, vllm_requests.transfer_params(start))
        prompt = tokens_input(vllm_requests.token_ids(start), cache_salt=start.salt.hex() or None)
        adapter = lora_request(start.adapter, self._settings)
        loads = adapter is not None and start.adapter not in self._adapters.names
        self._novel.begun(start.request_id, start.sampling, loads=loads)
        if adapter is not None:
            self._adapters.use(start.adapter)
        async for output in self._llm.generate(
            prompt, params, start.request_id, lora_request=adapter, priority=-start.priority
        ):
            self._tell(self._progress(request, output))

    def _progress(self, request: _InFlight, output: "RequestOutput") -> Progress | Rejected:
        start = request.start
        (completion,) = output.outputs
        stats = self._prefilled.pop(start.request_id, None)  # there with the first tokens
        if self._novel:
            self._novel.brought(start.request_id)
        request.generated += len(completion.token_ids)
        if completion.finish_reason is None:
            return Progress(
                request_id=start.request_id,
                token_ids=tuple(completion.token_ids),
                logprobs=vllm_requests.logprobs_of(completion, start.sampling.logprobs),
                kv=None if stats is None else self._report_at_start(start, stats),
            )
        finish = vllm_requests.FINISHES.get(completion.finish_reason)
        if finish is None and start.sampling.form is not None and not request.generated:
            fault = "the engine's grammar library does not take it; its log has the cause"
            return _rejected(start, Reason.INVALID_ARGUMENT, "sampling.form", fault)
        if finish is None:
            return _rejected(start, Reason.INTERNAL, "", f"the engine gave up: {completion.finish_reason}")
        if finish is Finish.CANCELLED:
            return Progress(request_id=start.request_id, finish=finish)
        if start.phase is Phase.PREFILL and start.kv_path is KvPath.DIRECT:
            self._lent_until.append(asyncio.get_running_loop().time() + vllm_launch.NIXL_LEASE_SECONDS)
        return Progress(
            request_id=start.request_id,
            token_ids=tuple(completion.token_ids),
            logprobs=vllm_requests.logprobs_of(completion, start.sampling.logprobs),
            finish=finish,
            kv=self._report(start, vllm_requests.counts_at_end(output)),
            handoff=vllm_requests.handoff_of(start, output, self._facts) if start.phase is Phase.PREFILL else None,
        )

    def _report_at_start(self, start: Start, stats: "PrefillStats") -> KvReport:
        return self._report(start, vllm_requests.counts_at_start(start, stats, self._facts.block_tokens))

    def _report(self, start: Start, counts: PromptBlockCounts) -> KvReport:
        return vllm_requests.report_of(start, counts, self._facts, self._block_bytes)

    async def _abort(self, request_id: RequestId) -> None:
        """Abort; vLLM answers with a last output, which ends the request's task."""
        await self._llm.abort(request_id)

    def _tell(self, item: Progress | Rejected) -> None:
        """Add to this step. vLLM wakes all requests of a step in one turn of the loop; the next turn sends them."""
        if not self._step:
            asyncio.get_running_loop().call_soon(self._end_step)
        self._step.append(item)

    def _end_step(self) -> None:
        self._steps.append(self._step)
        self._step = []
        self._arrived.set()

    def _die(self) -> None:
        if self._dead is None:
            self._dead = "vLLM's engine process ended; the cause is in its log, above"
            self._arrived.set()


def _step_readers(scratch: Path, engines: int) -> dict[int, StepReader]:
    """The counters by number of the engine; engines of another node count their steps there."""
    readers = {}
    for engine in range(engines):
        with suppress(OSError):
            readers[engine] = StepReader(step_file(scratch, engine))
    if not readers:
        log.warning("vLLM runs without Fleet's connector and does not show its steps; nobody will notice when it hangs")
    return readers


def _keep_prefill_stats(llm: "AsyncLLM") -> "dict[str, PrefillStats]":
    """Where prompt tokens came from, by request: in the returned dict before anybody gets the first new token.

    vLLM's engine says it with the first output of a request, and its output processor keeps no more than a sum. The
    processor outlives the engine here and there (in tracebacks), so it must not lead back to it.
    """
    prefilled: dict[str, PrefillStats] = {}
    processor = llm.output_processor
    process = processor.process_outputs

    def process_outputs(outputs: "list[EngineCoreOutput]", *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            if output.prefill_stats is not None and (state := processor.request_states.get(output.request_id)):
                prefilled[state.external_req_id] = output.prefill_stats
        return process(outputs, *args, **kwargs)

    processor.process_outputs = process_outputs
    return prefilled


def _rejected(start: Start, reason: Reason, field: str, message: str) -> Rejected:
    return Rejected(
        request_id=start.request_id, reason=reason, message=f"{field}: {message}" if field else message, field=field
    )
