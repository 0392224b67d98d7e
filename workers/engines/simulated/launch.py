"""Start of the simulated engine, which runs no model, but has exact KV and the timing of a latency model.

The engine has the parts of a real one: continuous batching, chunked prefill, a limited number of blocks, a prefix cache
with KV events, and two KV paths. It needs neither vLLM nor a GPU. Its tokens depend on every byte of KV
(`workers.engines.simulated.model`), so each end-to-end test with this engine also proves that KV was moved correctly.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from fleet.core.errors import ConfigurationRefused
from fleet.core.requests import ENGINE_FIELDS, STATE_FIELDS, PairForm, PoolingModel, PoolingTask
from fleet.core.roles import KvPath
from fleet.core.work import LoraAdapter
from kvstore.layouts.fingerprint import describe
from kvstore.namespace import KvNamespace
from workers.engines.parser_names import parsers_for
from workers.engines.simulated.direct_transfer import listen
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.layout import EngineLayout
from workers.engines.simulated.model import SimulatedModel
from workers.engines.simulated.scripts import ScriptWriter
from workers.engines.simulated.store import SimulatedStore
from workers.ports import EngineFacts
from workers.settings import POOLING_TASKS, WorkerSettings

NAME = "simulated 1"

# Sizes of the model: enough heads for 4 ranks, and enough layers and heads for the layouts to differ.
LAYERS, KV_HEADS = 2, 4


class ModelConfig(Struct, frozen=True):
    """The fields that the engine reads from a model folder's config.json."""

    vocab_size: Annotated[int, Meta(ge=2)]
    eos_token_id: int | tuple[int, ...] | None = None


@contextlib.asynccontextmanager
async def open_engine(settings: WorkerSettings) -> AsyncIterator[SimulatedEngine]:
    """Run an engine while the context is open.

    Raises:
        ConfigurationRefused: A file of the model folder, or the address `simulated.direct_listen`, cannot be used.
        LayoutMismatch: The store has blocks of this model that differ from this engine's blocks, or another format version.
        InvalidArgument: The store cannot keep this engine's blocks.
        BadCredentials: A file of the store's credentials cannot be used.
    """
    await asyncio.sleep(settings.simulated.start_ms / 1000)
    model = model_of(settings)
    namespace = namespace_of(settings, model)
    layout = _layout(settings)
    kv = describe(namespace, layout=layout.axes, tp=layout.tensor_parallel)
    parsers = parsers_for(settings, in_engine=False)
    writer = ScriptWriter.open(settings.model_dir, model.vocab_size, parsers)
    async with contextlib.AsyncExitStack() as stack:
        store = None
        if settings.store:
            store = await SimulatedStore.open(settings.store, kv, settings.store_credentials)
            stack.callback(store.close)
        facts = EngineFacts(
            name=NAME,
            model=settings.model,
            block_tokens=settings.block_tokens,
            max_model_len=settings.max_model_len,
            kv_blocks=settings.simulated.kv_blocks,
            max_running=settings.max_running,
            fingerprint=namespace.fingerprint,
            kv_paths=settings.kv_paths,
            kv=kv,
            sampling_fields=ENGINE_FIELDS,
            continued_fields=STATE_FIELDS,
            adapters=tuple(LoraAdapter(name, folder) for name, folder in settings.adapters.items()),
            adapter_slots=settings.adapter_slots if settings.adapters else 0,
            keeps_forms=writer is not None,
            parsers=parsers,
            pooling=_pooling_model(settings),
        )
        engine = SimulatedEngine(settings, facts, model, layout, store=store, writer=writer)
        if KvPath.DIRECT in settings.kv_paths:
            await stack.enter_async_context(listen(engine.lending, settings.simulated.direct_listen))
        async with _running(engine):
            yield engine


@contextlib.asynccontextmanager
async def open_rank(settings: WorkerSettings) -> AsyncIterator[None]:
    """Take the place of a rank above 0 of a worker group. It computes nothing, because the first rank has all blocks.

    Raises:
        ConfigurationRefused: config.json of the model folder cannot be used.
    """
    model_of(settings)
    yield


def namespace_of(settings: WorkerSettings, model: SimulatedModel) -> KvNamespace:
    """Return the namespace of the engine's blocks.

    Two simulated engines share blocks only if their namespaces are equal. The seed stands for the revision of the
    weights.
    """
    return KvNamespace(
        model=settings.model,
        revision=f"seed {model.seed}, vocabulary {model.vocab_size}",
        dtype="simulated",
        block_tokens=settings.block_tokens,
        layers=LAYERS,
        kv_heads=KV_HEADS,
        head_dim=settings.simulated.bytes_per_token // (LAYERS * KV_HEADS),
        block_bytes=model.block_bytes,
    )


def _pooling_model(settings: WorkerSettings) -> PoolingModel | None:
    if settings.task not in POOLING_TASKS:
        return None
    task = PoolingTask(settings.task)
    return PoolingModel(task=task, pairs=PairForm.SEPARATED if task is PoolingTask.CLASSIFY else PairForm.NONE)


def _layout(settings: WorkerSettings) -> EngineLayout:
    return EngineLayout(
        layers=LAYERS,
        kv_heads=KV_HEADS,
        block_tokens=settings.block_tokens,
        head_bytes=settings.simulated.bytes_per_token // (LAYERS * KV_HEADS),
        tensor_parallel=settings.simulated.tensor_parallel,
        kv_layout=settings.simulated.kv_layout,
    )


def model_of(settings: WorkerSettings) -> SimulatedModel:
    simulated = settings.simulated
    config = ModelConfig(vocab_size=simulated.vocab_size, eos_token_id=simulated.eos_token_ids)
    path = Path(settings.model_dir) / "config.json"
    if settings.model_dir and path.exists():
        try:
            config = msgspec.json.decode(path.read_bytes(), type=ModelConfig)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigurationRefused(f"{path}: {error}") from error
    eos = config.eos_token_id
    return SimulatedModel(
        seed=simulated.seed,
        vocab_size=config.vocab_size,
        eos_token_ids=(eos,) if isinstance(eos, int) else eos or (),
        eos_probability=simulated.eos_probability,
        block_bytes=settings.block_tokens * simulated.bytes_per_token,
    )


@contextlib.asynccontextmanager
async def _running(engine: SimulatedEngine) -> AsyncIterator[None]:
    """Run the engine's loop as a task that ends with the context."""
    try:
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(engine.run(), name=NAME)
            try:
                yield
            finally:
                loop.cancel()
    except ExceptionGroup as group:
        # The group holds only the exception of the context's body, because the loop catches its own exceptions.
        (error,) = group.exceptions
        raise error from error.__cause__
