"""Process pool: runs simulations in several processes, in parallel to the caller."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait

from fleet.core.errors import ConfigurationRefused


@contextmanager
def process_pool(number: int, *, finish: bool = True) -> Iterator[ProcessPoolExecutor]:
    """Open a process pool for a `with` block. Its processes also end when the calling process ends or is killed.

    Args:
        number: Number of processes.
        finish: What happens to running tasks when the block ends without an error. True: wait for them. False: end them.
            After an error, tasks are always ended at once, because a run may take hours.

    Raises:
        ConfigurationRefused: One of the processes was killed.
    """
    others = multiprocessing.active_children()  # processes that the caller started before; they must not be ended below
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=_die_with_caller)
    try:
        yield pool
        if not finish:
            _end_all_but(others)
    except BrokenProcessPool as error:
        raise ConfigurationRefused(
            f"--processes: one of {number} was killed, perhaps for lack of memory; use fewer processes"
        ) from error
    except BaseException:  # BaseException, so that Ctrl-C also ends the processes
        _end_all_but(others)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def watch(pool: ProcessPoolExecutor) -> None:
    """Make the pool watch the process that it started last, so that the pool notices if this process dies. Call this after `submit`.

    Python's `submit` first wakes the thread that watches the processes, and then starts a process. So this thread
    learns of the new process only at the next `submit`. Therefore this function calls `submit` once more.
    """
    pool.submit(int)


def _end_all_but(others: list[multiprocessing.process.BaseProcess]) -> None:
    for child in multiprocessing.active_children():
        if child not in others:
            child.terminate()


def _die_with_caller() -> None:
    """Prepare a new process of the pool: make it end on Ctrl-C, and when the calling process ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if (caller := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_die_after, args=(caller.sentinel,), daemon=True).start()


def _die_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
