"""Embedded node: a store node inside another process, with its own thread and event loop.

Rules:

1. An embedded node is a normal node with the same settings, sockets, metrics and health. Its clients may run in any
   process of the machine. The only difference is that the node runs in the process of a host program, such as a worker.
2. The node and the host program have separate event loops. An engine that computes for a long time therefore delays no
   look-up. A busy node slows down the host program only because both share one Python interpreter (docs/kvstore.md has
   figures).
3. The node serves as long as the context of `open_embedded` is open. Its clients must be closed before the context
   ends.
4. If the node ends by itself, which is a bug, the context is cancelled and raises `NodeEnded`, which ends the host
   program. If the program continued, a worker would run without a store, and nobody would notice that its blocks are
   lost.
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

# Time for which the host program waits for the node to stop; then it leaves the node's thread behind. An SSD tier with
# pending writes needs most of this time.
STOP_SECONDS = 15.0

NewLoop = Callable[[], asyncio.AbstractEventLoop]

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_embedded(
    settings: StoreSettings, clock: Clock, *, new_loop: NewLoop = asyncio.new_event_loop
) -> AsyncIterator[StoreEndpoints]:
    """Run a node on its own thread, with an event loop from `new_loop`, while the context is open.

    Raises:
        StoreNotStarted: The settings cannot be used on this machine; nothing is left running.
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
            node.thread.join()  # the thread ends at once, because setting `ended` was its last step
        else:
            log.error("store node does not stop; its thread is left behind", extra={"store": settings.store_id})


class _EmbeddedNode:
    """Controls the node's thread, for the host program.

    If the node ends by an exception, this exception is the *result* of the future `ended`. No future raises it, so
    asyncio never warns that an exception was not retrieved.
    """

    def __init__(self, settings: StoreSettings, clock: Clock, loop: asyncio.AbstractEventLoop):
        self._settings = settings
        self._clock = clock
        self._loop = loop
        self._serving: asyncio.Task[None] | None = None
        self._asked_to_stop = False
        self.thread = threading.Thread(target=self._run, name="kvstore-node", daemon=True)
        self.ready: Future[StoreEndpoints] = Future()
        self.ended: Future[BaseException | None] = Future()
        """Exception with which the node ended, or None if it was asked to stop. The thread sets this future as its last
        step.
        """

    def start(self) -> None:
        """Start the thread. If no thread can be started, close the event loop and raise RuntimeError."""
        try:
            self.thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def stop(self) -> None:
        """Ask the node to stop, if it still runs; do not wait for its end."""
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed already
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
        except BaseException as error:  # noqa: BLE001 - supervisor: the host program gets any exception of the node from `ended`
            cause = None if self._asked_to_stop and isinstance(error, asyncio.CancelledError) else error
        # Free the pool's memory at once. Without this call the memory would stay, because the node has reference
        # cycles.
        gc.collect()
        self.ended.set_result(cause)

    async def _serve(self) -> None:
        if not self._asked_to_stop:
            self._serving = asyncio.current_task()
            await serve(self._settings, self.ready.set_result, clock=self._clock)


@contextlib.asynccontextmanager
async def _cancelled_with(ended: "asyncio.Future[BaseException | None]") -> AsyncIterator[None]:
    """Cancel the context and raise NodeEnded when the node ends by itself."""

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
        raise group.exceptions[0] from group.exceptions[0].__cause__  # the single exception, with its original cause
