"""Headless rank: runs this node's part of a vLLM engine whose first rank is on another node.

vLLM spreads an engine in two ways (0.32, multiprocessing executor). Ranks of one model on several nodes follow the
first node's scheduler (tensor and pipeline parallelism). Or whole engines run beside each other, and the first node's
client gives them requests (data parallelism, which distributes the experts with `enable_expert_parallel`). In both
cases the other nodes run vLLM's headless mode. This module runs the headless mode in a separate process, because the
headless mode blocks its thread. vLLM also does not notice that the leader has ended; the worker then ends the separate
process.
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
from contextlib import ExitStack, asynccontextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from workers.engines.vllm import launch as vllm_launch
from workers.engines.vllm.namespace import weights_revision
from workers.ports import EngineDied
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0  # time in which vLLM's processes may end by themselves before they are killed


@asynccontextmanager
async def open_rank(settings: WorkerSettings) -> AsyncIterator[None]:
    """Run this node's part of an engine that another node leads, while the context is open.

    Args:
        settings: Settings with a group that has formed.

    Raises:
        ConfigurationRefused: vLLM cannot work with a setting, which the message names; nothing was started.
        EngineDied: vLLM's processes on this node have ended by themselves; the body is cancelled, and the error is raised in an
            exception group.
    """
    vllm_launch.check(settings)
    scratch = Path(tempfile.mkdtemp(prefix="fleet-vllm-"))
    with ExitStack() as opened:
        opened.callback(shutil.rmtree, scratch, ignore_errors=True)
        vllm_launch.prepare_environment(settings, scratch)
        opened.enter_context(vllm_launch.side_channels(settings))
        process = multiprocessing.get_context("spawn").Process(target=_main, args=(settings, scratch), name="vllm-rank")
        process.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(process))
                yield
                watch.cancel()
        finally:
            await asyncio.to_thread(_stop, process)


async def _watch(process: BaseProcess) -> None:
    """Wait until vLLM's process has ended.

    Raises:
        EngineDied: The process has ended.
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
        log.warning("vllm does not end, killing it")
        process.kill()
        process.join()
    for each in family:  # kills ranks that did not end, for example because they are suspended (SIGSTOP)
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.close()


def _main(settings: WorkerSettings, scratch: Path) -> None:
    """Run vLLM's headless mode in this process, with the arguments of the leader's engine and the rank of this node."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.entrypoints.cli.serve import run_headless  # noqa: PLC0415 - the import takes seconds, and only this process needs it

    vllm_launch.end_quickly()
    arguments = vllm_launch.engine_args(settings, revision=weights_revision(Path(settings.model_dir)), scratch=scratch)
    own = {"headless": True, "api_server_count": 0, "reasoning_parser_plugin": ""}
    run_headless(argparse.Namespace(**(vars(arguments) | own)))


def _end_with_parent() -> None:
    """End this process when the worker process was killed; vLLM itself would not notice it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(STOP_SECONDS)
    os._exit(1)
