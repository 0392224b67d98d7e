"""A vLLM engine over several nodes: what each node's part of it is told, and the parts that do not lead.

vLLM spreads an engine in two ways (0.32, multiprocessing executor): ranks of one model over nodes, which take orders from the first
node's scheduler (tensor and pipeline parallelism), or whole engines beside each other that are given requests by the first node's client
(data parallelism, which with `enable_expert_parallel` shares out the experts). In both the further nodes run what vLLM calls headless:
it has a process of its own here, since it blocks, and has to end when the leader is gone, which vLLM itself does not see.
"""

import argparse
import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm.namespace import weights_revision
from workers.ports import EngineDied
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0  # for vLLM's processes to end by themselves


@asynccontextmanager
async def open_rank(settings: WorkerSettings) -> AsyncIterator[None]:
    """Run this node's part of an engine that another node leads, while the context is open.

    Args:
        settings: Of a group that has formed.

    Raises:
        ConfigurationRefused: Names the setting that vLLM cannot work with; nothing was started.
        EngineDied: vLLM's processes here have ended by themselves; raised in the body.
    """
    vllm_launch.check(settings)
    scratch = Path(tempfile.mkdtemp(prefix="fleet-vllm-"))
    try:
        vllm_launch.prepare_environment(settings, scratch)
        process = multiprocessing.get_context("spawn").Process(target=_main, args=(settings, scratch), name="vllm-rank")
        process.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(process))
                yield
                watch.cancel()
        finally:
            await asyncio.to_thread(_stop, process)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


async def _watch(process: BaseProcess) -> None:
    """Until it ends.

    Raises:
        EngineDied: It has.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    raise EngineDied("vLLM's processes of this rank ended; the cause is in their log, above")


def _stop(process: BaseProcess) -> None:
    family = vllm_launch.family()
    process.terminate()
    process.join(STOP_SECONDS)
    if process.is_alive():
        log.warning("vLLM does not end, and is killed")
        process.kill()
        process.join()
    for each in family:  # a rank that is stopped has seen nothing of all that
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.close()


def _main(settings: WorkerSettings, scratch: Path) -> None:
    """The process: vLLM's own headless mode, told what the leader is told but for the rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.entrypoints.cli.serve import run_headless  # noqa: PLC0415 - takes seconds, and only this process needs it

    vllm_launch.end_quickly()
    arguments = vllm_launch.engine_args(settings, revision=weights_revision(Path(settings.model_dir)), scratch=scratch)
    own = {"headless": True, "api_server_count": 0, "reasoning_parser_plugin": ""}
    run_headless(argparse.Namespace(**(vars(arguments) | own)))


def _end_with_parent() -> None:
    """Nobody else would tell vLLM that the worker was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(STOP_SECONDS)
    os._exit(1)
