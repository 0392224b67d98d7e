"""Processes that run simulations beside the caller's."""

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
    """So many, while the block lasts; they end with the caller, however that ends.

    Args:
        number: Of them.
        finish: Whether what still runs when the block ends well is waited for. What ends otherwise never waits: runs may take hours.

    Raises:
        ConfigurationRefused: One of them was killed.
    """
    others = multiprocessing.active_children()  # of the caller
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=_die_with_caller)
    try:
        yield pool
        if not finish:
            _end_all_but(others)
    except BrokenProcessPool as error:
        raise ConfigurationRefused(
            f"--processes: one of {number} was killed, for want of memory perhaps; take fewer at a time"
        ) from error
    except BaseException:  # Ctrl-C, or nobody wants the rest
        _end_all_but(others)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def watch(pool: ProcessPoolExecutor) -> None:
    """Have it notice the death of the process that it has started last; to be called after a `submit`.

    A `submit` wakes the watch of processes before it starts one, which is then unwatched until the next.
    """
    pool.submit(int)


def _end_all_but(others: list[multiprocessing.process.BaseProcess]) -> None:
    for child in multiprocessing.active_children():
        if child not in others:
            child.terminate()


def _die_with_caller() -> None:
    """At Ctrl-C, and when the caller is killed: nobody would ask for more runs, or read what they came to."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if (caller := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_die_after, args=(caller.sentinel,), daemon=True).start()


def _die_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
