"""Real vLLM engines on an event loop of their own; the tests of a module share the engines, because engines start slowly."""

import asyncio
import gc
import multiprocessing
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fleet.core.ids import ModelName, WorkerId
from fleet.core.roles import KvPath, Role
from kvstore.namespace import KvNamespace
from tests.support.waiting import until
from tests.support.workers.engine_driver import EngineDriver, driven_engines
from workers.engines.vllm.engine import open_engine
from workers.engines.vllm.namespace import weights_revision
from workers.ports import Engine
from workers.settings import VllmSettings, WorkerSettings

START_SECONDS = 240  # time limit for two engines on a busy machine
TEST_SECONDS = 120

Result = TypeVar("Result")


def vllm_worker(
    model_dir: Path, *, role: Role = Role.BOTH, store: str = "", kv_paths: tuple[KvPath, ...] = ()
) -> WorkerSettings:
    return WorkerSettings(
        worker_id=WorkerId(f"vllm-{role}"),
        role=role,
        model_dir=str(model_dir),
        model=ModelName("tiny"),
        store=store,
        kv_paths=kv_paths,
        vllm=VllmSettings(kv_cache_gib=0.25, dtype="float32"),
    )


def tiny_namespace(model_dir: Path) -> KvNamespace:
    """Return the namespace of the built-in model's blocks, written out so that a test can compare it with the computed one."""
    return KvNamespace(
        model="tiny",
        revision=weights_revision(model_dir),
        dtype="float32",
        block_tokens=32,
        layers=4,
        kv_heads=2,
        head_dim=2 * 64,
        block_bytes=4 * 2 * 32 * 128 * 4,
    )


class VllmEngines:
    """Runs engines in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event, engines: list[EngineDriver]):
        self._loop = loop
        self._stopping = stopping
        self.engines = engines
        self.ended: Future[None] = Future()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the engines' event loop, wait for its end, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TEST_SECONDS)

    def stop(self) -> None:
        if not self.ended.done():
            self._loop.call_soon_threadsafe(self._stopping.set)

    def forget(self) -> None:
        self.engines = []
        self.ended = Future()


@contextmanager
def hosted(*settings: WorkerSettings) -> Iterator[VllmEngines]:
    ready: Future[VllmEngines] = Future()
    cancel: Future[Callable[[], object]] = Future()
    thread = threading.Thread(
        target=asyncio.run, args=(_host(settings, ready, cancel),), name="vllm-engines", daemon=True
    )
    thread.start()
    try:
        engines = ready.result(START_SECONDS)
    except TimeoutError:
        cancel.result(START_SECONDS)()
        thread.join(60)  # otherwise the next tests in this process would count these engines as theirs
        raise
    try:
        yield engines
    finally:
        engines.stop()
        thread.join(60)
        assert not thread.is_alive(), "the engines did not stop"
        engines.forget()
        gc.collect()  # vLLM leaves sockets to the collector, whose warnings must not reach a test


async def _host(
    settings: Sequence[WorkerSettings], ready: "Future[VllmEngines]", cancel: "Future[Callable[[], object]]"
) -> None:
    loop, stopping, over, others = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event(), _cores()
    task = asyncio.current_task()
    assert task is not None
    cancel.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        async with asyncio.TaskGroup() as tasks:
            opened: list[asyncio.Future[Engine]] = []
            for number, each in enumerate(settings, 1):
                opened.append(loop.create_future())
                tasks.create_task(_hold(each, opened[-1], over))
                # Engines take settings from the environment of this process, so start them one by one.
                await until(lambda: opened[-1].done() or _cores() >= others + number, START_SECONDS)  # noqa: B023 - awaited here
            try:
                async with driven_engines(*[await each for each in opened]) as drivers:
                    ready.set_result(VllmEngines(loop, stopping, drivers))
                    await stopping.wait()
            finally:
                over.set()
    except BaseException as error:  # noqa: BLE001 - supervisor: the error is passed to the tests
        (ready.result().ended if ready.done() else ready).set_exception(error)
    else:
        ready.result().ended.set_result(None)


async def _hold(settings: WorkerSettings, opened: "asyncio.Future[Engine]", over: asyncio.Event) -> None:
    async with open_engine(settings) as engine:
        opened.set_result(engine)
        await over.wait()


def _cores() -> int:
    """Return how many engine processes of vLLM this process has started."""
    return sum(process.name.startswith("EngineCore") for process in multiprocessing.active_children())
