"""vLLM engine: the `Engine` port over vLLM's `AsyncLLM`, embedded in the worker's process.

vLLM runs its scheduler and its model outside the worker's process and starts these processes by spawning. A program
that calls `open_engine` therefore needs the `if __name__ == "__main__"` guard.
"""

import asyncio
import gc
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from fleet.backends.kv_events.health import NEVER, EventHealth, KvEventAlert
from fleet.backends.kv_events.stream import EventStreamCounters, read_events
from fleet.backends.kv_events.translator import KvEventTranslator
from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused, Reason
from fleet.core.ids import RequestId, StoreId
from fleet.core.requests import ENGINE_FIELDS, IMAGES, AnswerParsers, Finish, KvReport
from fleet.core.roles import KvPath, Phase
from fleet.core.work import KvEvent, LoadReport, Progress, PulledBlocks, Rejected, Start
from kvstore.block import HashAlgorithm, blocks_for
from kvstore.client.store_client import StoreClient
from kvstore.errors import BadCredentials, StoreError
from kvstore.layouts.fingerprint import describe
from kvstore.namespace import KvNamespace
from workers.acceptance import field_beyond_vocabulary, refusal
from workers.engines.debugger import is_traced
from workers.engines.novel_work import NovelWork
from workers.engines.parser_names import parsers_for
from workers.engines.vllm import images as vllm_images
from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm import parallelism as vllm_spread
from workers.engines.vllm import pooling as vllm_pooling
from workers.engines.vllm import requests as vllm_requests
from workers.engines.vllm.answer_parser import VllmAnswerParser, VllmAnswerParsers, check_names
from workers.engines.vllm.blocks.pull_counts import PullReader, pull_file
from workers.engines.vllm.headless_rank import open_rank
from workers.engines.vllm.images import ImagePrompts, ImageRefused, PreparationCancelled
from workers.engines.vllm.launch import available
from workers.engines.vllm.lora import AdapterFiles, LoadedAdapters, adapters_of, lora_request
from workers.engines.vllm.namespace import namespace_of, weights_revision
from workers.engines.vllm.step_counter import StepReader, step_file
from workers.engines.vllm.store_planner import PromptBlockCounts
from workers.ports import Engine, EngineDied, EngineFacts, EngineOutput, Pulse, facts_with_store
from workers.settings import POOLING_TASKS, WorkerSettings
from workers.start_phase import StartPhase, note_phase

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.inputs import MultiModalInput, TokensInput
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import PrefillStats

__all__ = ["available", "open_engine", "open_rank"]

log = logging.getLogger(__name__)

STORE_SECONDS = 10.0  # maximum wait for the KV store node at the worker's start; then the worker starts without it
# If the tools of a request have more characters than this, its answer parser is opened in a thread, otherwise in the
# event loop. Each token of the answer that another worker has generated counts as 32 characters.
INLINE_CHARACTERS = 4096
# Seconds between two checks whether vLLM has died, for an idle engine; if an engine with requests dies, this is noticed at once.
# The same pause lies between two tries to kill a vLLM whose start was cancelled.
HEALTH_SECONDS = 0.5
LOADED_CHECK_SECONDS = 0.05  # pause between two checks whether the weights are loaded; then the phase WARM_UP is noted


@asynccontextmanager
async def open_engine(settings: WorkerSettings) -> AsyncIterator[Engine]:
    """Run vLLM while the context is open. Entering the context takes 15 to 30 s on CPUs.

    Raises:
        ConfigurationRefused: vLLM cannot work with a setting, which the message names; nothing is left running.
        EngineDied: vLLM ended while starting; its log output before this error has the cause.
    """
    vllm_launch.check(settings)
    scratch = Path(tempfile.mkdtemp(prefix="fleet-vllm-"))
    with ExitStack() as opened:
        opened.callback(shutil.rmtree, scratch, ignore_errors=True)
        vllm_launch.prepare_environment(settings, scratch)
        opened.enter_context(vllm_launch.side_channels(settings))
        await asyncio.to_thread(_import_vllm)
        settings = await asyncio.to_thread(vllm_pooling.with_task, settings, scratch)
        llm, facts, block_bytes, awaited, parsers = await _start(settings, scratch)
        try:
            async with asyncio.TaskGroup() as tasks:
                engine = VllmEngine(llm, facts, settings, block_bytes, scratch, tasks, awaited, parsers)
                watch = tasks.create_task(engine.watch())
                yield engine
                watch.cancel()
                engine.stop()
        finally:
            if awaited is not None:
                await asyncio.to_thread(awaited.close)
            await asyncio.to_thread(_stop, llm)
            del llm, engine
            gc.collect()  # runs vLLM's finaliser for the engine now, because it would fail when the interpreter ends


async def _start(settings: WorkerSettings, scratch: Path) -> "Started":
    started = await _start_shielded(settings, scratch)
    llm, facts, *_ = started
    if facts.pooling is not None:
        try:
            vllm_pooling.check_tasks(facts.pooling, await llm.get_supported_tasks())
        except BaseException:
            await asyncio.to_thread(_stop, llm)
            raise
    return started


async def _start_shielded(settings: WorkerSettings, scratch: Path) -> "Started":
    starting = asyncio.ensure_future(  # noqa: TID251 - the following lines always wait for this task
        asyncio.to_thread(_start_blocking, settings, scratch)
    )
    loaded = vllm_launch.loaded_mark(scratch)
    try:
        while not starting.done() and not loaded.exists():
            await asyncio.wait([starting], timeout=LOADED_CHECK_SECONDS)
        if not starting.done():
            note_phase(StartPhase.WARM_UP)
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # vLLM must not go on after this call, but its start cannot be interrupted. So vLLM's processes are killed, and
        # the start fails soon after. Without this, the start could take minutes, and would never end if a rank of a
        # group has ended. If vLLM runs in this process alone, it is stopped as soon as it has started.
        while not starting.done():
            vllm_launch.end_processes()
            await asyncio.wait([starting], timeout=HEALTH_SECONDS)
        with suppress(EngineDied, ConfigurationRefused):
            llm, _, _, awaited, _ = await starting
            if awaited is not None:
                await asyncio.to_thread(awaited.close)
            await asyncio.to_thread(_stop, llm)
        raise


def _import_vllm() -> None:
    """Import vLLM from a call stack that holds few objects.

    vLLM keeps the tracebacks of its imports for ever. A traceback keeps all local objects of the functions on the call
    stack alive.
    """
    import vllm.v1.engine.async_llm  # noqa: F401, PLC0415 - the import takes seconds, and only this worker needs it

    vllm_launch.end_quickly()


def _start_blocking(settings: WorkerSettings, scratch: Path) -> "Started":
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - vLLM is loaded already

    revision = weights_revision(Path(settings.model_dir))
    check_names(settings)
    names = None if settings.task in POOLING_TASKS else parsers_for(settings, in_engine=True)
    config = _configure(settings, revision, scratch, names)
    if settings.store:
        vllm_launch.check_model(config)
    namespace = namespace_of(config, model=settings.model, revision=revision)
    # vLLM counts the replicas of a head as well, because each of them is in the memory of another rank.
    replicas = max(1, vllm_launch.ranks_of(settings) // max(namespace.kv_heads, 1))
    vllm_launch.check_cache(settings, namespace.block_bytes * replicas)
    store_id, awaited = meet_store(settings, namespace) if settings.store else (None, None)
    try:
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except (RuntimeError, ValueError) as error:
        if awaited is not None:
            awaited.close()
        raise EngineDied(f"vLLM did not start: {error}") from error
    try:
        parsers = _answer_parsers(llm, settings, names)
    except ConfigurationRefused:
        if awaited is not None:
            awaited.close()
        _stop(llm)
        raise
    facts = EngineFacts(
        name=f"vllm {vllm_launch.version()}",
        model=settings.model,
        block_tokens=namespace.block_tokens,
        max_model_len=config.model_config.max_model_len,
        kv_blocks=_kv_blocks(settings, config),
        max_running=config.scheduler_config.max_num_seqs * vllm_spread.engines(settings),
        fingerprint=namespace.fingerprint,
        kv_paths=settings.kv_paths,
        kv=describe(namespace, tp=1 if config.model_config.use_mla else config.parallel_config.tensor_parallel_size),
        keeps_forms=settings.vllm.keeps_forms,
        sampling_fields=_sampling_fields(llm, config),
        continued_fields=vllm_launch.continued_fields(settings, config),
        adapters=adapters_of(settings),
        adapter_slots=settings.adapter_slots if settings.adapters else 0,
        parsers=None if parsers is None else parsers.names,
        pooling=vllm_pooling.pooling_model(settings, config.model_config),
    )
    return llm, facts_with_store(facts, settings.kv_paths, store_id), namespace.block_bytes, awaited, parsers


def _sampling_fields(llm: "AsyncLLM", config: "VllmConfig") -> tuple[str, ...]:
    """Return the names of the request fields that the engine supports, for `EngineFacts.sampling_fields`.

    vLLM can limit the length of the reasoning only if it has a reasoning parser, because the parser names the tokens at
    which the reasoning begins and ends.
    """
    limits_thinking = config.reasoning_config is not None and config.reasoning_config.enabled
    fields = ENGINE_FIELDS if limits_thinking else tuple(each for each in ENGINE_FIELDS if each != "thinking_tokens")
    return (*fields, IMAGES) if vllm_images.takes_images(llm) else fields


def _kv_blocks(settings: WorkerSettings, config: "VllmConfig") -> int:
    """Return the number of blocks that fit into the KV cache.

    For a pooling model, the result is at least the number of blocks that a full batch needs: encoders have no KV cache, so
    blocks must not limit their batch.
    """
    blocks = int(config.cache_config.num_gpu_blocks or 0)
    if settings.task not in POOLING_TASKS:
        return blocks
    longest = blocks_for(config.model_config.max_model_len, settings.block_tokens) + 1
    return max(blocks, longest * int(config.scheduler_config.max_num_seqs))


def _answer_parsers(llm: "AsyncLLM", settings: WorkerSettings, names: AnswerParsers | None) -> VllmAnswerParsers | None:
    if names is None or (tokenizer := llm.tokenizer) is None:
        return None
    config = llm.model_config
    return VllmAnswerParsers.fitting(names, settings, tokenizer, config, model_type=config.hf_config.model_type)


def _stop(llm: "AsyncLLM") -> None:
    # vLLM's task for outputs is cancelled first, because otherwise it would report the end of the engine as a failure.
    if llm.output_handler is not None:
        llm.output_handler.get_loop().call_soon_threadsafe(llm.output_handler.cancel)
    llm.shutdown()


def _configure(settings: WorkerSettings, revision: str, scratch: Path, parsers: AnswerParsers | None) -> "VllmConfig":
    reasoning_parser = "" if parsers is None else parsers.reasoning
    args = vllm_launch.engine_args(settings, revision=revision, scratch=scratch, reasoning_parser=reasoning_parser)
    try:
        return vllm_launch.engine_config(settings, args)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationRefused(f"vllm: {error}") from error


def meet_store(settings: WorkerSettings, namespace: KvNamespace) -> "tuple[StoreId | None, StoreClient | None]":
    """Return the store node's id and None. If the node does not answer yet, return None and a client that joins it later.

    vLLM's own processes have other clients, which also join by themselves (`workers.engines.vllm.connector`).

    Raises:
        ConfigurationRefused: The node answers, and cannot store these blocks; or a file of the credentials cannot be used.
    """
    try:
        client = StoreClient.join(
            settings.store,
            namespace,
            wait_seconds=STORE_SECONDS,
            credentials=settings.store_credentials,
            credentials_field="store_credentials",
        )
    except BadCredentials as error:
        raise ConfigurationRefused(str(error)) from error
    except StoreError as error:
        raise ConfigurationRefused(f"store: {error}") from error
    if not client.joined:
        log.warning("store unreachable, starting without it", extra={"address": settings.store})
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
    """Return whether the ranks of this engine can write blocks to this node.

    Several ranks write a block in shards, which needs the node's shared memory.
    """
    return vllm_launch.ranks_of(settings) == 1 or client.writes_shards


Started = tuple["AsyncLLM", EngineFacts, int, StoreClient | None, VllmAnswerParsers | None]
"""Five values: the started vLLM; its description; the number of bytes of a block; the client that waits for a store
node which has not answered (None: the node has answered, or there is none); the parsers of its answers (None: answers
are not parsed)."""


class _InFlight:
    """Records a request that was submitted and has not ended."""

    def __init__(self, start: Start):
        self.start = start
        # Sources of the prompt's blocks by vLLM's statistics; only for prompts with images, which Fleet's connector skips.
        self.counts = PromptBlockCounts()
        self.image_tokens = 0  # number of tokens by which images make the prompt longer than `start.tokens`
        self.generated = 0
        self.cancelled = False
        # True once vLLM's engine gets the request; until then, its images are decoded and its parser is opened.
        self.given = False


class VllmEngine:
    """Runs requests on a started `AsyncLLM`. Implements `workers.ports.Engine`; made by `open_engine`."""

    def __init__(
        self,
        llm: "AsyncLLM",
        facts: EngineFacts,
        settings: WorkerSettings,
        block_bytes: int,
        scratch: Path,
        tasks: asyncio.TaskGroup,
        awaited: StoreClient | None = None,
        parsers: VllmAnswerParsers | None = None,
    ):
        self._llm = llm
        self._awaited = awaited
        self._parsers = parsers
        self._facts = facts
        self._settings = settings
        self._adapters = LoadedAdapters(self._facts.adapter_slots)
        self._adapter_files = AdapterFiles(settings)
        self._role = settings.role
        self._block_bytes = block_bytes
        self._scratch = scratch
        self._tasks = tasks
        self._vocab_size = llm.model_config.get_vocab_size()
        self._has_token_types = vllm_pooling.has_token_types(llm.model_config, llm.tokenizer)
        self._requests: dict[RequestId, _InFlight] = {}
        self._step: list[Progress | Rejected] = []  # outputs that have arrived since the last `_end_step` (see `_tell`)
        # Outputs for the server. Their number is limited by the tokens that the running requests may generate.
        self._steps: deque[EngineOutput] = deque()
        self._arrived = asyncio.Event()
        self._dead: str | None = None
        # The times at which the leases of handoffs end, by the event loop's clock.
        self.lent_until: deque[float] = deque()
        self._prefilled = _keep_prefill_stats(llm)
        self._novel = NovelWork()
        self._image_prompts = ImagePrompts(llm)
        self._counters = _step_readers(scratch, vllm_spread.engines(settings))
        self._pulls = _pull_readers(scratch, vllm_spread.engines(settings))

    @property
    def facts(self) -> EngineFacts:
        """Return the engine's description. It has the store's id from the first answer of the store node on."""
        if self._awaited is not None and self._awaited.joined:
            client, self._awaited = self._awaited, None
            if _can_share(client, self._settings):
                store_id = StoreId(client.store_id)
                self._facts = facts_with_store(self._facts, self._settings.kv_paths, store_id)
            else:
                log.error("store offers no shared memory, which several ranks need; going on without it")
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
            await asyncio.Event().wait()  # waits for ever: without events, routers believe that the cache is empty
        books = KvEventTranslator(
            block_tokens=self._facts.block_tokens,
            algorithm=HashAlgorithm.SHA256_128,
            capacity=self._facts.kv_blocks,
        )
        endpoint = vllm_launch.events_endpoint(self._scratch)
        counters = EventStreamCounters()
        health = EventHealth(books, counters, NEVER)
        logged_alert: KvEventAlert | None = None
        async for events in read_events(endpoint, vllm_launch.replay_endpoint(self._scratch), books, counters):
            if events:
                yield events
            if (alert := health.alert(Nanos(0))) is not logged_alert:
                logged_alert = alert
                if alert is not None:
                    log.error("kv events unusable, routers believe that the cache is empty", extra={"alert": alert})

    def load(self) -> LoadReport:
        """Return an estimated load report.

        At most a full batch of requests counts as running. A block that several requests share counts once for each of
        them.
        """
        held = sum(
            blocks_for(request.start.num_tokens + request.image_tokens + request.generated, self._facts.block_tokens)
            for request in self._requests.values()
        )
        running = min(len(self._requests), self._facts.max_running)
        return LoadReport(
            running=running,
            waiting=len(self._requests) - running,
            kv_blocks_used=min(held, self._facts.kv_blocks),
            adapters=self._adapters.names,
            pulled=sum((reader.counts() for reader in self._pulls), PulledBlocks()),
        )

    def pulses(self) -> Sequence[Pulse]:
        novel = bool(self._novel)
        fetches = any(not each.generated and vllm_requests.fetches(each.start) for each in self._requests.values())
        fetch_limit = Nanos((vllm_launch.NIXL_LEASE_SECONDS if fetches else 0) * SECOND)
        return [
            reader.pulse(working=self._is_working(engine), novel=novel, fetch_limit=fetch_limit)
            for engine, reader in self._counters.items()
        ]

    def traced(self) -> bool:
        return is_traced([os.getpid(), *(process.pid for process in vllm_launch.family())])

    def kill(self) -> None:
        vllm_launch.kill_family()
        self._die()

    @property
    def lent(self) -> int:
        """Number of handoffs whose blocks vLLM may still keep.

        A handoff counts until its lease ends, because vLLM does not report when its blocks have been fetched.
        """
        now = asyncio.get_running_loop().time()
        while self.lent_until and self.lent_until[0] <= now:
            self.lent_until.popleft()
        return len(self.lent_until)

    async def watch(self) -> None:
        """Check regularly whether the engine is alive, to notice an engine that dies while it has no requests."""
        while self._dead is None:
            await asyncio.sleep(HEALTH_SECONDS)
            if self._llm.errored:
                self._die()

    def stop(self) -> None:
        """Cancel all requests that have not ended; their tasks then end by themselves (`_abort`)."""
        for request_id in list(self._requests):
            self.cancel(request_id)

    def _is_working(self, engine: int) -> bool:
        """Return whether the engine with this number has requests.

        Requests that are only prepared here do not count, because the engine makes no step for them.
        If there are several engines, vLLM's client knows which engine has which request.
        """
        client = self._llm.engine_core
        if (held := getattr(client, "engine_inflight", None)) is None:
            return any(each.given for each in self._requests.values())
        return bool(held[client.core_engines[engine]])

    def _unfit(self, start: Start) -> Rejected | None:
        if (rejected := refusal(start, self._role, self._facts)) is not None:
            return rejected
        if start.request_id in self._requests:
            return _rejected(start, Reason.INVALID_ARGUMENT, "request_id", "is in use")
        if int(np.frombuffer(start.tokens, dtype="<u4").max()) >= self._vocab_size:
            # Such a token would not only fail its request, but end the whole engine.
            return _rejected(start, Reason.INVALID_ARGUMENT, "tokens", f"the vocabulary has {self._vocab_size} tokens")
        if (field := field_beyond_vocabulary(start.sampling, self._vocab_size)) is not None:
            fault = f"a token is not in the vocabulary of {self._vocab_size}"
            return _rejected(start, Reason.INVALID_ARGUMENT, f"sampling.{field}", fault)
        if start.adapter and not self._adapter_files.are_as_described(start.adapter):
            return _rejected(start, Reason.NO_WORKER, "adapter", f"the files of {start.adapter!r} have changed here")
        return None

    async def _serve(self, request: _InFlight) -> None:
        """Run one request until it has ended."""
        from vllm.exceptions import VLLMClientError, VLLMError  # noqa: PLC0415 - vLLM is loaded already
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415

        start = request.start
        try:
            if request.cancelled:
                self._tell(Progress(request_id=start.request_id, finish=Finish.CANCELLED))
                return
            if start.pooling is None:
                await self._generate(request)
            else:
                await self._pool(request)
        except EngineDeadError:
            self._die()
        except (VLLMClientError, ValueError) as error:  # vLLM raises two kinds of errors for invalid requests
            # vLLM does not name the invalid field. The router has checked all fields except those that only vLLM can
            # check, so one of these must be the invalid one.
            self._tell(_rejected(start, Reason.INVALID_ARGUMENT, _form_field(start), str(error)))
        except VLLMError as error:
            log.exception("request failed in vllm", extra={"request": start.request_id})
            self._tell(_rejected(start, Reason.INTERNAL, "", f"the engine gave up: {error}"))
        finally:
            del self._requests[start.request_id]
            self._novel.ended(start.request_id)
            self._prefilled.pop(start.request_id, None)

    async def _generate(self, request: _InFlight) -> None:
        start = request.start
        try:
            parser = await self._open_parser(start)
        except ValueError as error:
            self._tell(_rejected(start, Reason.INVALID_ARGUMENT, "chat.tools", f"vLLM refuses them: {error}"))
            return
        params = vllm_requests.sampling_params(start, vllm_requests.transfer_params(start), parser)
        prompt: TokensInput | MultiModalInput | None
        if start.images:
            prompt = await self._prompt_with_images(request, params)
            if prompt is None:
                return
        else:
            prompt = vllm_requests.prompt_of(start)
        if request.cancelled:  # the request was cancelled while its parser was opened
            self._tell(Progress(request_id=start.request_id, finish=Finish.CANCELLED))
            return
        adapter = lora_request(start.adapter, self._settings)
        loads = adapter is not None and start.adapter not in self._adapters.names
        self._novel.begun(start.request_id, start.sampling, loads=loads)
        if adapter is not None:
            self._adapters.use(start.adapter)
        request.given = True
        async for output in self._llm.generate(
            prompt,
            params,
            start.request_id,
            lora_request=adapter,
            priority=-start.priority,
            reasoning_ended=None if parser is None else parser.reasoning_ended,
            reasoning_parser_kwargs=None if parser is None else parser.reasoning_parser_kwargs,
        ):
            outcome = self._progress(request, output)
            if parser is not None and isinstance(outcome, Progress):
                outcome = _parsed(outcome, parser, start)
            self._tell(outcome)

    async def _prompt_with_images(self, request: _InFlight, params: "SamplingParams") -> "MultiModalInput | None":
        """Return the prompt of a request with images; None if the request has ended: it was refused or cancelled, or has failed."""
        start = request.start
        try:
            prompt = await self._image_prompts.prompt_of(start, lambda: request.cancelled)
            request.image_tokens = vllm_images.fit_answer(start, prompt, params, self._facts.max_model_len)
            if not request.cancelled:
                return prompt
        except ImageRefused as refused:
            self._tell(_rejected(start, Reason.INVALID_ARGUMENT, "chat.messages", str(refused)))
            return None
        except PreparationCancelled:
            pass
        except Exception:  # supervisor: the image libraries may raise any exception; only this request fails
            log.exception("images not prepared", extra={"request": start.request_id})
            self._tell(_rejected(start, Reason.INTERNAL, "", "the worker could not prepare the images"))
            return None
        # vLLM did not have the request yet when `_abort` was called, so vLLM reports no end of it.
        self._tell(Progress(request_id=start.request_id, finish=Finish.CANCELLED))
        return None

    async def _pool(self, request: _InFlight) -> None:
        """Compute the vector of one prompt."""
        from vllm.inputs import tokens_input  # noqa: PLC0415 - vLLM is loaded already

        start = request.start
        params = vllm_pooling.pooling_params(start, token_types=self._has_token_types)
        prompt = tokens_input(vllm_requests.token_ids(start))
        request.given = True
        async for output in self._llm.encode(prompt, params, start.request_id, priority=-start.priority):
            if request.cancelled:
                self._tell(Progress(request_id=start.request_id, finish=Finish.CANCELLED))
                return
            try:
                vector = vllm_pooling.vector_of(output)
            except ValueError as error:
                self._tell(_rejected(start, Reason.INTERNAL, "", str(error)))
                return
            report = self._report(request, PromptBlockCounts(engine=0, store=0, direct=0))
            self._tell(Progress(request_id=start.request_id, finish=Finish.STOP, kv=report, vector=vector))

    async def _open_parser(self, start: Start) -> VllmAnswerParser | None:
        """Return a new parser for the answer of an attempt; None if its answer is not parsed."""
        if (task := start.parsing) is None or self._parsers is None:
            return None
        if len(task.tools) + 32 * start.generated_tokens <= INLINE_CHARACTERS:
            return self._parsers.open(start, task)
        return await asyncio.to_thread(self._parsers.open, start, task)

    def _progress(self, request: _InFlight, output: "RequestOutput") -> Progress | Rejected:
        start = request.start
        (completion,) = output.outputs
        # The first output has the statistics (`_keep_prefill_stats`); for later outputs there are none.
        stats = self._prefilled.pop(start.request_id, None)
        if self._novel:
            self._novel.brought(start.request_id)
        request.generated += len(completion.token_ids)
        if completion.finish_reason is None:
            return Progress(
                request_id=start.request_id,
                token_ids=tuple(completion.token_ids),
                logprobs=vllm_requests.logprobs_of(completion, start.sampling.logprobs),
                prompt_logprobs=vllm_requests.prompt_logprobs_of(output, start),
                kv=None if stats is None else self._report_at_start(request, stats),
            )
        finish = vllm_requests.FINISHES.get(completion.finish_reason)
        if finish is None and start.sampling.form is not None and not (request.generated or start.generated_tokens):
            fault = "the engine's grammar library refuses it; the engine's log has the cause"
            return _rejected(start, Reason.INVALID_ARGUMENT, _form_field(start), fault)
        if finish is None:
            return _rejected(start, Reason.INTERNAL, "", f"the engine gave up: {completion.finish_reason}")
        if finish is Finish.CANCELLED:
            return Progress(request_id=start.request_id, finish=finish)
        if start.phase is Phase.PREFILL and start.kv_path is KvPath.DIRECT:
            self.lent_until.append(asyncio.get_running_loop().time() + vllm_launch.NIXL_LEASE_SECONDS)
        return Progress(
            request_id=start.request_id,
            token_ids=tuple(completion.token_ids),
            logprobs=vllm_requests.logprobs_of(completion, start.sampling.logprobs),
            prompt_logprobs=vllm_requests.prompt_logprobs_of(output, start),
            finish=finish,
            kv=self._report(request, vllm_requests.counts_at_end(output)),
            handoff=vllm_requests.handoff_of(start, output, self._facts) if start.phase is Phase.PREFILL else None,
        )

    def _report_at_start(self, request: _InFlight, stats: "PrefillStats") -> KvReport:
        counts = vllm_requests.counts_at_start(request.start, stats, self._facts.block_tokens)
        if request.start.images:
            request.counts = counts  # kept here, because Fleet's connector does not count for requests with images
        return self._report(request, counts)

    def _report(self, request: _InFlight, counts: PromptBlockCounts) -> KvReport:
        if request.start.images:
            counts = request.counts
        return vllm_requests.report_of(request.start, counts, self._facts, self._block_bytes, request.image_tokens)

    async def _abort(self, request_id: RequestId) -> None:
        """Abort a request in vLLM; vLLM then sends a last output, by which the request's task ends.

        vLLM ignores the call if it does not have the request yet. The request's task therefore looks at `cancelled` once
        the request is prepared, right before vLLM gets it.
        """
        await self._llm.abort(request_id)

    def _tell(self, item: Progress | Rejected) -> None:
        """Add an output to the outputs of the current step.

        vLLM wakes the tasks of all requests of a step in the same iteration of the event loop. In the next iteration,
        all their outputs go to the server together.
        """
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


def _parsed(progress: Progress, parser: VllmAnswerParser, start: Start) -> Progress:
    """Return the progress with the parsed parts of its tokens, and without the tokens after a stop string.

    After the step with the stop string, and for a cancelled request, return the progress unchanged.
    """
    if parser.stopped or progress.finish is Finish.CANCELLED:
        return progress
    ends = progress.finish is not None and not (start.phase is Phase.PREFILL and progress.finish is Finish.LENGTH)
    taken, parsed = parser.add(progress.token_ids, is_finished=ends, is_cut=progress.finish is Finish.LENGTH)
    return structs.replace(
        progress, token_ids=progress.token_ids[:taken], logprobs=progress.logprobs[:taken], parsed=parsed
    )


def _step_readers(scratch: Path, engines: int) -> dict[int, StepReader]:
    """Return the readers of the step counters of this node's engines, by engine number.

    Engines on other nodes are left out, because their counters are files on those nodes.
    """
    readers = {}
    for engine in range(engines):
        with suppress(OSError):
            readers[engine] = StepReader(step_file(scratch, engine))
    if not readers:
        log.warning("vllm runs without Fleet's connector, so a hang stays unnoticed")
    return readers


def _pull_readers(scratch: Path, engines: int) -> list[PullReader]:
    """Return the readers of the pull counts of this node's engines; none if the engine does not check the blocks that it pulls."""
    readers = []
    for engine in range(engines):
        with suppress(OSError):
            readers.append(PullReader(pull_file(scratch, engine)))
    return readers


def _keep_prefill_stats(llm: "AsyncLLM") -> "dict[str, PrefillStats]":
    """Return a dict that gets each request's prefill statistics before the request's first new token is delivered.

    vLLM's engine sends the statistics with the first output of a request, but its output processor keeps only a sum of
    them. Tracebacks may keep the processor alive longer than the engine, so the processor must have no reference to the
    engine.
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


def _form_field(start: Start) -> str:
    """Return the field of an attempt that is probably invalid, for errors that vLLM raises without naming a field."""
    if start.pooling is not None:
        return "pooling.dimensions" if start.pooling.dimensions else "pooling"
    if start.parsing is not None and start.parsing.tools:
        return "chat.tools"
    return "sampling" if start.sampling.form is None else "sampling.form"


def _rejected(start: Start, reason: Reason, field: str, message: str) -> Rejected:
    return Rejected(
        request_id=start.request_id, reason=reason, message=f"{field}: {message}" if field else message, field=field
    )
