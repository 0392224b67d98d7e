"""A node inside another process: a thread, and an event loop of its own.

Rules:

1. It is a node like any other: the same settings, sockets, metrics and health, and whoever uses it may run in any process of
   the host. It shares nothing with the process that it is in but that.
2. Nothing of the node runs on its host's event loop, and nothing of the host on the node's: an engine that computes for
   long holds up no look-up, and a node that is busy takes from its host no more than threads of one interpreter take from
   each other (docs/kvstore.md has figures).
3. It serves from the beginning of the context to its end. Whoever uses it is closed before.
4. A node that ends by itself, which is a bug, ends the work of its host: the context is cancelled and raises `NodeEnded`. A
   process that went on without would be a worker whose blocks nobody gets, and nobody would know.
"""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

from kvstore.clock import Clock
from kvstore.errors import NodeEnded, reason
from kvstore.messages import StoreEndpoints
from kvstore.service.server import serve
from kvstore.service.settings import StoreSettings

STOP_SECONDS = 15.0  # for a node to end; longest takes an SSD that is being written to

NewLoop = Callable[[], asyncio.AbstractEventLoop]

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_embedded(
    settings: StoreSettings, clock: Clock, *, new_loop: NewLoop = asyncio.new_event_loop
) -> AsyncIterator[StoreEndpoints]:
    """A node that serves while the context is open, on a thread of its own.

    Args:
        settings: What the node is told.
        clock: Of leases and deadlines.
        new_loop: Makes the node's event loop.

    Raises:
        StoreNotStarted: The settings cannot be obeyed here; nothing is left running.
        NodeEnded: The node ended by itself while the context was open.
    """
    node = _EmbeddedNode(settings, clock, new_loop())
    ready, ended = asyncio.wrap_future(node.ready), asyncio.wrap_future(node.ended)
    node.start()
    try:
        either: list[asyncio.Future[Any]] = [ready, ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise ended.result() or NodeEnded("the store node has ended before it was ready")
        async with _cancelled_with(ended):
            yield ready.result()
    finally:
        node.stop()
        await asyncio.wait([ended], timeout=STOP_SECONDS)
        if ended.done():
            node.thread.join()  # that was its last step
        else:
            log.error("the store node does not end; its thread is left behind", extra={"store": settings.store_id})


class _EmbeddedNode:
    """The thread, as its host sees it. Its futures only ever get results: nobody cancels them, nobody has to look."""

    def __init__(self, settings: StoreSettings, clock: Clock, loop: asyncio.AbstractEventLoop):
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._serving: asyncio.Task[None] | None = None
        self._asked_to_stop = False
        self.thread = threading.Thread(target=self._run, name="kvstore-node", daemon=True)
        self.ready: Future[StoreEndpoints] = Future()
        self.ended: Future[BaseException | None] = Future()
        """Set last, to what it ended with; None where it was asked to."""

    def start(self) -> None:
        """Nothing is left where no thread can be had."""
        try:
            self.thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def stop(self) -> None:
        """Have it end, if it has not."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._asked_to_stop = True
        if self._serving is not None:
            self._serving.cancel()

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - supervisor: handed to the host, which ends with it
            cause = None if self._asked_to_stop and isinstance(error, asyncio.CancelledError) else error
        gc.collect()  # the parts of a node know each other: else its pool stayed until somebody has the interpreter look
        self.ended.set_result(cause)

    async def _serve(self) -> None:
        if not self._asked_to_stop:
            self._serving = asyncio.current_task()
            await serve(self._settings, self.ready.set_result, clock=self._clock)


@contextlib.asynccontextmanager
async def _cancelled_with(ended: "asyncio.Future[BaseException | None]") -> AsyncIterator[None]:
    """Cancels the context when the node ends by itself.

    Raises:
        NodeEnded: It did.
    """

    async def watch() -> None:
        await asyncio.wait([ended])
        cause = ended.result()
        why = reason(cause) if isinstance(cause, Exception) else repr(cause)
        raise NodeEnded(f"the store node has ended by itself: {why}") from cause

    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch())
            yield
            watching.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from group.exceptions[0].__cause__  # as it was
